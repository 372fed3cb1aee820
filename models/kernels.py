"""Compiled kernels of a quantised decoder: a product of integers, and all layers in one function.

numba compiles them for the processor, which must have AVX-512 VNNI, and keeps them on disk.
Activations are float64. Before each product a row is quantised to int8; the sums are integers and
exact. Keys and values are rounded to the numbers of the pool. No result depends on how many rows a
forward has or on where keys are stored, but for the noise of float64, which almost never moves a
code. Weights are passed as addresses, since a call with hundreds of arrays would take as long as a
layer. The types of numba's functions are its own: mypy does not check this file."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic, overload

LANES = 16  # outputs of a block of packed weights
DEPTH = 4  # inputs whose products one instruction adds
OFFSET = 128  # of activation codes, which the instruction takes unsigned
UP_FROM = 0.5 + 2.0**-30  # as in `integer`
MAX_TILE = 8  # rows that one pass over a block of weights multiplies

INT8 = ir.IntType(8)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
VECTOR = ir.VectorType(INT32, LANES)


def tile_product(rows: int) -> Any:
    """A function that multiplies `rows` rows of codes by one block of weights.

    Its arguments are addresses of codes [rows, I] in uint8, of a block [I / 4, 16, 4] in int8, of
    the sums [rows, 16] in int32, and the number I."""

    @intrinsic
    def product(typing: Any, codes: Any, block: Any, sums: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            codes, block, sums, depth = arguments
            kind = ir.FunctionType(VECTOR, (VECTOR, VECTOR, VECTOR))
            name = "llvm.x86.avx512.vpdpbusd.512"
            dot = builder.module.declare_intrinsic(name, (), kind)
            zero = ir.Constant(VECTOR, [0] * LANES)
            undefined = ir.Constant(VECTOR, ir.Undefined)
            before = builder.block
            loop = builder.append_basic_block("depth")
            after = builder.append_basic_block("done")
            starts = [
                builder.add(codes, builder.mul(depth, ir.Constant(INT64, row)))
                for row in range(rows)
            ]
            builder.branch(loop)
            builder.position_at_end(loop)
            place = builder.phi(INT64)
            place.add_incoming(ir.Constant(INT64, 0), before)
            old = [builder.phi(VECTOR) for _ in range(rows)]
            offset = builder.mul(place, ir.Constant(INT64, LANES))
            address = builder.inttoptr(builder.add(block, offset), VECTOR.as_pointer())
            weights = builder.load(address, align=64)
            new = []
            for row in range(rows):
                old[row].add_incoming(zero, before)
                four = builder.inttoptr(builder.add(starts[row], place), INT32.as_pointer())
                lane = builder.insert_element(
                    undefined, builder.load(four, align=1), ir.Constant(INT32, 0)
                )
                all_lanes = builder.shuffle_vector(lane, undefined, zero)
                new.append(builder.call(dot, [old[row], all_lanes, weights]))
            following = builder.add(place, ir.Constant(INT64, DEPTH))
            place.add_incoming(following, loop)
            for row in range(rows):
                old[row].add_incoming(new[row], loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
            builder.position_at_end(after)
            for row in range(rows):
                step = ir.Constant(INT64, row * 4 * LANES)
                address = builder.inttoptr(builder.add(sums, step), VECTOR.as_pointer())
                builder.store(new[row], address, align=4)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), generate

    return product


@intrinsic
def pointer(typing: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to numbers of a type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.intp, kind), generate


def bitcast(source: Any, result: Any) -> Any:
    """A function of a number that returns the number of type `result` with the same bits."""

    @intrinsic
    def cast(typing: Any, bits: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(result))

        return result(source), generate

    return cast


float64_of = bitcast(types.int64, types.float64)
float32_of = bitcast(types.int32, types.float32)
bits_of = bitcast(types.float32, types.int32)


one_row = tile_product(1)
two_rows = tile_product(2)
four_rows = tile_product(4)
eight_rows = tile_product(8)

OPTIONS: Any = {"nogil": True, "error_model": "numpy", "cache": True}
FAST: Any = {**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}}


@njit(**OPTIONS)
def exp(x):
    """e^x to about 1e-16; x at most 0 or a little more, without overflow checks."""
    x = max(x, -700.0)
    n = np.floor(x * 1.4426950408889634 + 0.5)
    r = x - n * 0.693147180369123816490
    r = r - n * 1.90821492927058770002e-10
    p = 1.0 / 6227020800.0
    p = p * r + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * float64_of((np.int64(n) + 1023) << 52)


@njit(**FAST)
def quantise(x_I, codes_I):
    """Write the codes of a row, plus OFFSET; returns the scale of the row."""
    largest = 0.0
    for i in range(x_I.size):
        largest = max(largest, abs(x_I[i]))
    scale = largest / 127.0
    if scale == 0.0:
        scale = 1.0
    inverse = 1.0 / scale
    for i in range(x_I.size):
        codes_I[i] = np.uint8(np.int32(np.floor(x_I[i] * inverse + UP_FROM)) + OFFSET)
    for i in range(x_I.size, codes_I.size):
        codes_I[i] = OFFSET
    return scale


@njit(**FAST)
def normalise(x_H, weight_H, eps, out_H):
    total = 0.0
    for i in range(x_H.size):
        total += x_H[i] * x_H[i]
    factor = 1.0 / np.sqrt(total / x_H.size + eps)
    for i in range(x_H.size):
        out_H[i] = x_H[i] * factor * weight_H[i]


@njit(**OPTIONS)
def product(codes_NI, scale_N, blocks, shift_O, scale_O, out_NO, add):
    """Rows of codes by packed weights, from the address `blocks`: written to, or added to, out."""
    rows, depth = codes_NI.shape
    outputs = scale_O.size
    sums = np.empty((MAX_TILE, LANES), np.int32)
    sums_at = sums.ctypes.data
    codes_at = codes_NI.ctypes.data
    for first in range(0, outputs, LANES):
        block = blocks + first * depth
        last = min(first + LANES, outputs)
        row = 0
        while row < rows:
            left = rows - row
            codes = codes_at + row * depth
            if left >= 8:
                eight_rows(codes, block, sums_at, depth)
                tile = 8
            elif left >= 4:
                four_rows(codes, block, sums_at, depth)
                tile = 4
            elif left >= 2:
                two_rows(codes, block, sums_at, depth)
                tile = 2
            else:
                one_row(codes, block, sums_at, depth)
                tile = 1
            for t in range(tile):
                scale = scale_N[row + t]
                for o in range(last - first):
                    value = np.float64(sums[t, o] - shift_O[first + o]) * (
                        scale * scale_O[first + o]
                    )
                    if add:
                        value += out_NO[row + t, first + o]
                    out_NO[row + t, first + o] = value
            row += tile


@njit(**FAST)
def rotate(x_d, cos_d, sin_d, out_d):
    half = x_d.size // 2
    for i in range(half):
        out_d[i] = x_d[i] * cos_d[i] + x_d[i + half] * sin_d[i]
        out_d[i + half] = x_d[i + half] * cos_d[i + half] + x_d[i] * sin_d[i + half]


def stored(x):
    """A number of a pool as float64; int16 has the bits of bfloat16."""


def to_store(x, like):
    """A float64 rounded to the numbers of a pool, of which `like` is one."""


@overload(stored)
def _stored(x):
    if isinstance(x, types.Integer):
        return lambda x: np.float64(float32_of(np.int32(x) << 16))
    return lambda x: np.float64(x)


@overload(to_store)
def _to_store(x, like):
    if not isinstance(like, types.Integer):
        return lambda x, like: x

    def rounded(x, like):
        bits = bits_of(np.float32(x))
        return np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    return rounded


@njit(**FAST)
def widen(x_d, out_d):
    for i in range(x_d.size):
        out_d[i] = stored(x_d[i])


@njit(**OPTIONS)
def store(x_d, out_d):
    for i in range(x_d.size):
        out_d[i] = to_store(x_d[i], out_d[i])


@njit(**FAST)
def dot(x_d, y_d):
    total = 0.0
    for i in range(x_d.size):
        total += x_d[i] * y_d[i]
    return total


@njit(**FAST)
def add_scaled(x_d, factor, out_d):
    for i in range(x_d.size):
        out_d[i] += factor * x_d[i]


@njit(**OPTIONS)
def exponentials(scores_K):
    """Replace scores by e^(score - largest); returns their sum. A score of -inf gives 0."""
    largest = -np.inf
    for k in range(scores_K.size):
        largest = max(largest, scores_K[k])
    total = 0.0
    if largest == -np.inf:
        return total
    for k in range(scores_K.size):
        scores_K[k] = exp(scores_K[k] - largest)
    for k in range(scores_K.size):
        total += scores_K[k]
    return total


@njit(**OPTIONS)
def attend(q_Nhd, keys_gSd, values_gSd, groups_X, out_NI):
    """Attention of rows over slots of a layer of the pool; groups_X: see `CompiledLayers`."""
    kv_heads, _, dim = keys_gSd.shape
    folded = q_Nhd.shape[1] // kv_heads
    factor = 1.0 / np.sqrt(np.float64(dim))
    wide_d = np.empty(dim)
    for x in range(len(groups_X)):
        rows_at, sequences, queries, count, slots_at, first, stride, mask_at = groups_X[x]
        mask_GqK = carray(pointer(mask_at, types.uint8), (sequences, queries, count))
        rows_Gq = carray(pointer(rows_at, types.int64), (sequences, queries))
        slots_GK = carray(pointer(slots_at, types.int64), (sequences, count))
        scores_QK = np.empty((queries * folded, count))
        for s in range(sequences):
            own = queries  # a shorter sequence repeats its last row
            while rows_at and own > 1 and rows_Gq[s, own - 1] == rows_Gq[s, own - 2]:
                own -= 1
            for h in range(kv_heads):
                for k in range(count):
                    slot = slots_GK[s, k] if slots_at else first + s * stride + k
                    widened = False
                    for q in range(own):
                        if not mask_GqK[s, q, k]:
                            for j in range(folded):
                                scores_QK[q * folded + j, k] = -np.inf
                            continue
                        if not widened:
                            widen(keys_gSd[h, slot], wide_d)
                            widened = True
                        row = rows_Gq[s, q] if rows_at else s * queries + q
                        for j in range(folded):
                            score = dot(q_Nhd[row, h * folded + j], wide_d)
                            scores_QK[q * folded + j, k] = score * factor
                for q in range(own):
                    row = rows_Gq[s, q] if rows_at else s * queries + q
                    for j in range(folded):
                        total = exponentials(scores_QK[q * folded + j])
                        out_d = out_NI[row, (h * folded + j) * dim : (h * folded + j + 1) * dim]
                        out_d[:] = 0.0
                        if total > 0.0:
                            scores_QK[q * folded + j] *= 1.0 / total
                for k in range(count):
                    slot = slots_GK[s, k] if slots_at else first + s * stride + k
                    widened = False
                    for q in range(own):
                        if not mask_GqK[s, q, k]:
                            continue
                        if not widened:
                            widen(values_gSd[h, slot], wide_d)
                            widened = True
                        row = rows_Gq[s, q] if rows_at else s * queries + q
                        for j in range(folded):
                            at = (h * folded + j) * dim
                            add_scaled(
                                wide_d, scores_QK[q * folded + j, k], out_NI[row, at : at + dim]
                            )


@njit(**FAST)
def gate(both_I, inner):
    """silu(gate) * up, into the first half."""
    for i in range(inner):
        x = both_I[i]
        size = abs(x)
        e = exp(-size)
        sigmoid = (1.0 if x >= 0.0 else e) / (1.0 + e)
        both_I[i] = x * sigmoid * both_I[inner + i]


@njit(**OPTIONS)
def multiply(x_NI, blocks, shift_O, scale_O, out_NO, add):
    """Quantise rows and multiply them."""
    rows, depth = x_NI.shape
    padded = (depth + DEPTH - 1) // DEPTH * DEPTH
    codes_NI = np.empty((rows, padded), np.uint8)
    scale_N = np.empty(rows)
    for n in range(rows):
        scale_N[n] = quantise(x_NI[n], codes_NI[n])
    product(
        codes_NI=codes_NI,
        scale_N=scale_N,
        blocks=blocks,
        shift_O=shift_O,
        scale_O=scale_O,
        out_NO=out_NO,
        add=add,
    )


@njit(**OPTIONS)
def linear(x_NI, weight, out_NO, add):
    """weight: addresses of blocks, shifts, scales and bias (0: none)."""
    rows, outputs = out_NO.shape
    multiply(
        x_NI=x_NI,
        blocks=weight[0],
        shift_O=carray(pointer(weight[1], types.int32), (outputs,)),
        scale_O=carray(pointer(weight[2], types.float32), (outputs,)),
        out_NO=out_NO,
        add=add,
    )
    if weight[3]:
        bias_O = carray(pointer(weight[3], types.float64), (outputs,))
        for n in range(rows):
            for o in range(outputs):
                out_NO[n, o] += bias_O[o]


@njit(**OPTIONS)
def run_layers(
    x_NH, layers_LA, sizes, eps, cos_Nd, sin_Nd, slots_N, kv_LtgSd, groups_X, taps_T, tapped_TNH
):
    """The rows of x through all layers, in place. layers_LA: for each layer the addresses of the
    weights, see `CompiledLayers`; sizes: heads, kv_heads, head_dim, width of the MLP."""
    heads, kv_heads, dim, inner = sizes
    rows, hidden = x_NH.shape
    width = heads * dim
    all_width = width + 2 * kv_heads * dim
    normed_NH = np.empty((rows, hidden))
    qkv_NI = np.empty((rows, all_width))
    q_Nhd = np.empty((rows, heads, dim))
    out_NI = np.zeros((rows, width))  # a row that sees nothing has zeros
    both_NI = np.empty((rows, 2 * inner))
    turned_d = np.empty(dim)
    for layer in range(len(layers_LA)):
        for t in range(taps_T.size):
            if taps_T[t] == layer:
                tapped_TNH[t] = x_NH
        own = layers_LA[layer]
        norm_H = carray(pointer(own[0], types.float64), (hidden,))
        for n in range(rows):
            normalise(x_NH[n], norm_H, eps, normed_NH[n])
        linear(normed_NH, own[1:5], qkv_NI, False)
        keys_gSd = kv_LtgSd[layer, 0]
        values_gSd = kv_LtgSd[layer, 1]
        for n in range(rows):
            slot = slots_N[n]
            for h in range(heads + kv_heads):
                head_d = qkv_NI[n, h * dim : (h + 1) * dim]
                if own[5]:
                    which = 8 * dim if h >= heads else 0
                    norm_d = carray(pointer(own[5] + which, types.float64), (dim,))
                    normalise(head_d, norm_d, eps, head_d)
                if h < heads:
                    rotate(head_d, cos_Nd[n], sin_Nd[n], q_Nhd[n, h])
                else:
                    rotate(head_d, cos_Nd[n], sin_Nd[n], turned_d)
                    store(turned_d, keys_gSd[h - heads, slot])
                    at = width + kv_heads * dim + (h - heads) * dim
                    store(qkv_NI[n, at : at + dim], values_gSd[h - heads, slot])
        attend(q_Nhd, keys_gSd, values_gSd, groups_X=groups_X, out_NI=out_NI)
        linear(out_NI, own[6:10], x_NH, True)
        norm_H = carray(pointer(own[10], types.float64), (hidden,))
        for n in range(rows):
            normalise(x_NH[n], norm_H, eps, normed_NH[n])
        linear(normed_NH, own[11:15], both_NI, False)
        for n in range(rows):
            gate(both_NI[n], inner)
        linear(both_NI[:, :inner], own[15:19], x_NH, True)
