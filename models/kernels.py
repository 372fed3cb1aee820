"""Compiled products of rows and packed weights, and all layers of a model as one function.

numba compiles them at their first call, and keeps them on disk; after a change in `tiles` remove
its cache. A row is quantised to int8 before a product with codes, whose sums are exact, or rounded
to the weights' floats, whose sums are added in one order for any number of rows. Activations are
float64; keys and values are rounded to the numbers of the pool."""

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from .codes import CEILING, GROUP, INT4_OFFSET, MAX_CODE, MAX_STEP
from .tiles import (
    BYTES,
    FLOATS_AT_ONCE,
    FOUR,
    LANES,
    MAX_TILE,
    PANEL,
    SEGMENT,
    TERMS,
    bits_of,
    eight_bit_tile,
    float32_of,
    float64_of,
    float_tile,
    four_bit_tile,
    half_tile,
    largest_of_half,
    pointer,
    quantise_half,
)

OPTIONS: Any = {"nogil": True, "error_model": "numpy", "cache": True}
FAST: Any = {**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}}
MAXIMUM: Any = {**OPTIONS, "fastmath": {"reassoc", "nsz", "nnan"}}  # else a loop of `max` is slow

MASKED = -1e300  # the score of a key that a query does not see
BLOCK = 8  # keys that are computed or left out together


# -- products -------------------------------------------------------------------------------------


def pack_floats(weight_OI: Any) -> Any:
    """Blocks [O / 16, I, 16] of float32; of bfloat16, as int16, [O / 16, I / 2, 16, 2]."""
    padded = padded_rows(weight_OI, 0)
    pair = 4 // padded.itemsize
    ordered = padded.reshape(-1, LANES, padded.shape[1] // pair, pair).transpose(0, 2, 1, 3)
    blocks = aligned((*ordered.shape[:2], LANES * 4))
    blocks.view(padded.dtype).reshape(ordered.shape)[:] = ordered
    return blocks


def pack_int8(codes_OI: Any, scale_O: Any) -> Any:
    """Blocks [O / 16, I / 4, 16, 4] of uint8, 128 above the codes."""
    padded = padded_rows(codes_OI, 0).view(np.uint8)
    ordered = padded.reshape(-1, LANES, padded.shape[1] // FOUR, FOUR).transpose(0, 2, 1, 3)
    blocks = aligned(ordered.shape)
    return np.bitwise_xor(ordered, 128, out=blocks)


def pack_int4(codes_OI: Any, steps_OG: Any, offsets_OG: Any, scale_O: Any) -> Any:
    """Blocks [O / 16, I / 64, 576] of uint8: two codes in a byte, for each 32 inputs 4 vectors of
    16 outputs; then a step and an offset for each 32 inputs and output."""
    padded = padded_rows(codes_OI, 8)
    blocks = padded.shape[0] // LANES
    groups = padded.shape[1] // GROUP
    pairs = np.zeros((blocks * LANES, 2 * groups, 2), np.int8)
    pairs[: len(steps_OG), : steps_OG.shape[1], 0] = steps_OG
    pairs[: len(steps_OG), : steps_OG.shape[1], 1] = offsets_OG
    nibbles = padded.reshape((blocks, LANES, groups, 2, 2, 4, FOUR))
    both = nibbles[:, :, :, :, 0] | nibbles[:, :, :, :, 1] << 4
    both = both.transpose((0, 2, 3, 4, 1, 5)).reshape(blocks, groups, -1)
    pairs = pairs.reshape((blocks, LANES, groups, 2, 2)).transpose((0, 2, 3, 1, 4))
    pairs = pairs.reshape(blocks, groups, -1).view(np.uint8)
    codes = both.shape[-1]
    packed = aligned((blocks, groups, codes + pairs.shape[-1]))
    packed[..., :codes] = both
    packed[..., codes:] = pairs
    return packed


def padded_rows(codes_OI: Any, zero: int) -> Any:
    """Codes with whole blocks of outputs and whole groups of inputs."""
    more = (-codes_OI.shape[0] % LANES, -codes_OI.shape[1] % GROUP)
    return np.pad(codes_OI, ((0, more[0]), (0, more[1])), constant_values=zero)


def aligned(shape: tuple[int, ...]) -> Any:
    """Memory for uint8 numbers that begins at a multiple of a vector's size."""
    size = int(np.prod(shape))
    memory = np.empty(size + BYTES, np.uint8)
    start = -memory.ctypes.data % BYTES
    return memory[start : start + size].reshape(shape)


def packed(bits: int, *arrays: Any) -> Any:
    """Blocks of weights [O, I] or of the tensors of codes."""
    if bits == 4:
        return pack_int4(*arrays)
    return pack_int8(*arrays) if bits == 8 else pack_floats(*arrays)


@njit(**OPTIONS)
def quantise(x_I, bits, codes_I, terms_Gt):
    """Write the codes of a row and the terms of each group: its step, and what corrects the sums of
    unsigned weights. Of eight bits, one number; of four bits, two for each half of the group: minus
    the zero of the codes, and the factor of the offset. Returns the scale of the row."""
    groups = len(terms_Gt)
    x_J = x_I
    if x_I.size < groups * GROUP:
        x_J = np.zeros(groups * GROUP)
        x_J[: x_I.size] = x_I
    half = GROUP // 2
    numbers = x_J.ctypes.data
    codes = codes_I.ctypes.data
    top_G = np.empty(groups)
    largest = 0.0
    for g in range(groups):
        first = numbers + 8 * g * GROUP
        top_G[g] = max(largest_of_half(first), largest_of_half(first + 8 * half))
        largest = max(largest, top_G[g])
    if largest == 0.0:
        largest = 1.0
    scale = largest / (MAX_CODE * MAX_STEP)
    for g in range(groups):
        step = max(np.floor(top_G[g] * (MAX_STEP / largest) + CEILING), 1.0)
        terms_Gt[g, 0] = np.int32(step)
        inverse = 1.0 / (scale * step)
        first = numbers + 8 * g * GROUP
        lower = quantise_half(first, inverse, codes + g * GROUP)
        upper = quantise_half(first + 8 * half, inverse, codes + g * GROUP + half)
        if bits == 8:
            terms_Gt[g, 1] = -128 * (lower + upper)
        else:
            terms_Gt[g, 1] = -8 * lower
            terms_Gt[g, 2] = (INT4_OFFSET * lower) << 16
            terms_Gt[g, 3] = -8 * upper
            terms_Gt[g, 4] = (INT4_OFFSET * upper) << 16
    return scale


@njit(**OPTIONS)
def scale_sums(sums_O, scale, scale_O, out_O, add):
    if add:
        for o in range(sums_O.size):
            out_O[o] += sums_O[o] * (scale * np.float64(scale_O[o]))
    else:
        for o in range(sums_O.size):
            out_O[o] = sums_O[o] * (scale * np.float64(scale_O[o]))


@njit(**OPTIONS)
def tile(rows, bits, places):
    if bits == 4:
        four_bit_tile(rows, places)
    elif bits == 8:
        eight_bit_tile(rows, places)
    elif bits == 16:
        half_tile(rows, places)
    else:
        float_tile(rows, places)


@njit(**OPTIONS)
def product(inputs_NI, terms_NGt, scale_N, blocks, scale_O, bits, out_NO, add):
    """Rows of inputs, as bytes, by packed weights from the address `blocks`: written to, or added
    to, out. A group is what one step of a tile multiplies."""
    rows, stride = inputs_NI.shape
    groups = stride // GROUP if bits < 16 else stride * 8 // bits // FLOATS_AT_ONCE
    segment = SEGMENT if bits < 16 else groups
    size = stride // groups * LANES
    if bits == 4:
        size = size // 2 + 4 * LANES
    width = terms_NGt.strides[0]
    outputs = scale_O.size
    sums_TO = np.empty((MAX_TILE, PANEL))
    tiles = (rows + MAX_TILE - 1) // MAX_TILE
    for step in range((outputs + PANEL - 1) // PANEL * tiles):
        row = step % tiles * MAX_TILE
        count = min(MAX_TILE, rows - row)
        panel = step // tiles * PANEL
        end = min(panel + PANEL, outputs)
        sums_TO[:count] = 0.0
        for first in range(panel, end, LANES):
            block = blocks + first // LANES * groups * size
            sums = sums_TO.ctypes.data + 8 * (first - panel)
            for group in range(0, groups, segment):
                inputs = inputs_NI.ctypes.data + row * stride
                inputs += group * (stride // groups)
                terms = terms_NGt.ctypes.data + row * width + group * 4 * TERMS
                some = min(segment, groups - group)
                part = block + group * size
                tile(count, bits, (inputs, stride, terms, width, part, some, sums))
        for t in range(count):
            scale_sums(
                sums_TO[t, : end - panel],
                scale_N[row + t],
                scale_O[panel:end],
                out_O=out_NO[row + t, panel:end],
                add=add,
            )


@njit(**OPTIONS)
def rounded(x):
    """The bits of a number rounded to bfloat16."""
    bits = bits_of(np.float32(x))
    return np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@njit(**OPTIONS)
def multiply(x_NI, blocks, scale_O, bits, out_NO, add):
    """Multiply rows, which are quantised for weights of 4 and 8 bits, and rounded for 16."""
    rows, depth = x_NI.shape
    groups = (depth + GROUP - 1) // GROUP
    inputs_NI = np.zeros((rows, groups * GROUP * max(bits // 8, 1)), np.int8)
    terms_NGt = np.empty((rows, groups, TERMS), np.int32)
    scale_N = np.ones(rows)
    for n in range(rows):
        x_I = x_NI[n]
        if bits < 16:
            scale_N[n] = quantise(x_I, bits, codes_I=inputs_NI[n], terms_Gt=terms_NGt[n])
        elif bits == 16:
            halves_I = inputs_NI[n].view(np.int16)
            for i in range(depth):
                halves_I[i] = rounded(x_I[i])
        else:
            floats_I = inputs_NI[n].view(np.float32)
            for i in range(depth):
                floats_I[i] = x_I[i]
    product(
        inputs_NI=inputs_NI,
        terms_NGt=terms_NGt,
        scale_N=scale_N,
        blocks=blocks,
        scale_O=scale_O,
        bits=bits,
        out_NO=out_NO,
        add=add,
    )


# -- layers ---------------------------------------------------------------------------------------


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
def normalise(x_H, weight_H, eps, out_H):
    total = 0.0
    for i in range(x_H.size):
        total += x_H[i] * x_H[i]
    factor = 1.0 / np.sqrt(total / x_H.size + eps)
    for i in range(x_H.size):
        out_H[i] = x_H[i] * factor * weight_H[i]


@njit(**FAST)
def rotate(x_d, cos_d, sin_d, out_d):
    half = x_d.size // 2
    lower_d, upper_d = x_d[:half], x_d[half:]
    for i in range(half):
        out_d[i] = lower_d[i] * cos_d[i] + upper_d[i] * sin_d[i]
    cos_d, sin_d, out_d = cos_d[half:], sin_d[half:], out_d[half:]
    for i in range(half):
        out_d[i] = upper_d[i] * cos_d[i] + lower_d[i] * sin_d[i]


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

    return lambda x, like: rounded(x)


@njit(**FAST)
def widen(x_d, out_d):
    for i in range(x_d.size):
        out_d[i] = stored(x_d[i])


@njit(**OPTIONS)
def store(x_d, out_d):
    for i in range(x_d.size):
        out_d[i] = to_store(x_d[i], out_d[i])


@njit(**FAST)
def add_product(a_4K, b_KN, inner, columns, out_4N):
    """Add the product of two matrices over a range of K, of a multiple of four numbers, to the
    columns of a range. Rows are sliced: numba would test each index of a range for its sign."""
    first, last = columns
    out0_N, out1_N = out_4N[0, first:last], out_4N[1, first:last]
    out2_N, out3_N = out_4N[2, first:last], out_4N[3, first:last]
    a_K, b_K, c_K, d_K = a_4K[0], a_4K[1], a_4K[2], a_4K[3]
    for k in range(inner[0], inner[1], 4):
        w_N, x_N = b_KN[k, first:last], b_KN[k + 1, first:last]
        y_N, z_N = b_KN[k + 2, first:last], b_KN[k + 3, first:last]
        a0, a1, a2, a3 = a_K[k], a_K[k + 1], a_K[k + 2], a_K[k + 3]
        b0, b1, b2, b3 = b_K[k], b_K[k + 1], b_K[k + 2], b_K[k + 3]
        c0, c1, c2, c3 = c_K[k], c_K[k + 1], c_K[k + 2], c_K[k + 3]
        d0, d1, d2, d3 = d_K[k], d_K[k + 1], d_K[k + 2], d_K[k + 3]
        for n in range(out0_N.size):
            w, x, y, z = w_N[n], x_N[n], y_N[n], z_N[n]
            out0_N[n] += a0 * w + a1 * x + a2 * y + a3 * z
            out1_N[n] += b0 * w + b1 * x + b2 * y + b3 * z
            out2_N[n] += c0 * w + c1 * x + c2 * y + c3 * z
            out3_N[n] += d0 * w + d1 * x + d2 * y + d3 * z


@njit(**OPTIONS)
def clear(out_4N, columns):
    for row in range(4):
        out_N = out_4N[row, columns[0] : columns[1]]
        for n in range(out_N.size):
            out_N[n] = 0.0


@njit(**MAXIMUM)
def largest_of(scores_K, largest):
    for k in range(scores_K.size):
        largest = max(largest, scores_K[k])
    return largest


@njit(**FAST)
def exponentials(scores_K, factor, largest):
    """Replace scores by e^(factor * (score - largest)), masked ones by 0; returns their sum."""
    total = 0.0
    for k in range(scores_K.size):
        e = exp(factor * (scores_K[k] - largest))
        scores_K[k] = e if scores_K[k] > MASKED else 0.0
        total += scores_K[k]
    return total


@njit(**OPTIONS)
def hide(scores_K, mask_K):
    for k in range(mask_K.size):
        scores_K[k] = scores_K[k] if mask_K[k] else MASKED
    scores_K[mask_K.size :] = MASKED


@njit(**OPTIONS)
def visible(mask_qK, queries, low_B, high_B):
    """For each block of keys the range of queries among which are all that see one of them."""
    for block in range(low_B.size):
        low = queries
        high = 0
        for q in range(queries):
            for k in range(BLOCK * block, min(BLOCK * (block + 1), mask_qK.shape[1])):
                if mask_qK[q, k]:
                    low = min(low, q)
                    high = q + 1
        low_B[block] = low
        high_B[block] = high


@njit(**OPTIONS)
def ranges_of(low_B, high_B, first, last, ranges_B2):
    """The ranges of keys whose blocks one of the queries from first to last sees; how many."""
    count = 0
    for block in range(low_B.size):
        if low_B[block] <= last and high_B[block] > first:
            if count and ranges_B2[count - 1, 1] == block * BLOCK:
                count -= 1
            else:
                ranges_B2[count, 0] = block * BLOCK
            ranges_B2[count, 1] = (block + 1) * BLOCK
            count += 1
    return count


@njit(**OPTIONS)
def attend(q_Nhd, keys_gSd, values_gSd, groups_X, out_NI):
    """Attention of rows over slots of a layer of the pool; groups_X: see `CompiledLayers`. The
    query heads that share a key head are computed together, four at a time, over the blocks of keys
    that one of them sees; K and d are rounded up with zeros."""
    kv_heads, _, dim = keys_gSd.shape
    folded = q_Nhd.shape[1] // kv_heads
    factor = 1.0 / np.sqrt(np.float64(dim))
    depth = up(dim, 4)
    q_4d = np.zeros((4, depth))
    out_4d = np.empty((4, dim))
    total_4 = np.empty(4)
    for x in range(len(groups_X)):
        rows_at, sequences, queries, count, slots_at, first, stride, mask_at = groups_X[x]
        mask_GqK = carray(pointer(mask_at, types.uint8), (sequences, queries, count))
        rows_Gq = carray(pointer(rows_at, types.int64), (sequences, queries))
        slots_GK = carray(pointer(slots_at, types.int64), (sequences, count))
        length = up(count, BLOCK)
        low_B = np.empty(length // BLOCK, np.int64)
        high_B = np.empty(length // BLOCK, np.int64)
        ranges_B2 = np.empty((length // BLOCK, 2), np.int64)
        keys_dK = np.zeros((depth, length))
        values_Kd = np.zeros((length, dim))
        scores_4K = np.zeros((4, length))
        for s in range(sequences):
            own = queries  # a shorter sequence repeats its last row
            while rows_at and own > 1 and rows_Gq[s, own - 1] == rows_Gq[s, own - 2]:
                own -= 1
            visible(mask_GqK[s], own, low_B, high_B)
            size = own * folded
            for h in range(kv_heads):
                for k in range(count):
                    slot = slots_GK[s, k] if slots_at else first + s * stride + k
                    widen(keys_gSd[h, slot], keys_dK[:dim, k])
                    widen(values_gSd[h, slot], values_Kd[k])
                for r in range(0, size, 4):
                    some = min(4, size - r)
                    for i in range(4):
                        q = min(r + i, size - 1) // folded
                        row = rows_Gq[s, q] if rows_at else s * queries + q
                        own_d = q_Nhd[row, h * folded + (r + i) % folded]
                        for d in range(dim):
                            q_4d[i, d] = own_d[d]
                    last = (r + some - 1) // folded
                    ranges = ranges_of(low_B, high_B, r // folded, last=last, ranges_B2=ranges_B2)
                    for place in range(ranges):
                        keys = (ranges_B2[place, 0], ranges_B2[place, 1])
                        clear(scores_4K, keys)
                        add_product(q_4d, keys_dK, (0, depth), columns=keys, out_4N=scores_4K)
                    for i in range(some):
                        mask_K = mask_GqK[s, (r + i) // folded]
                        largest = MASKED
                        for place in range(ranges):
                            start = ranges_B2[place, 0]
                            end = ranges_B2[place, 1]
                            hide(scores_4K[i, start:end], mask_K[start:end])
                            largest = largest_of(scores_4K[i, start:end], largest)
                        total_4[i] = 0.0
                        for place in range(ranges):
                            start = ranges_B2[place, 0]
                            end = ranges_B2[place, 1]
                            total_4[i] += exponentials(scores_4K[i, start:end], factor, largest)
                    clear(out_4d, (0, dim))
                    for place in range(ranges):
                        keys = (ranges_B2[place, 0], ranges_B2[place, 1])
                        add_product(scores_4K, values_Kd, keys, columns=(0, dim), out_4N=out_4d)
                    for i in range(some):
                        q = (r + i) // folded
                        row = rows_Gq[s, q] if rows_at else s * queries + q
                        at = (h * folded + (r + i) % folded) * dim
                        share = 1.0 / total_4[i] if total_4[i] > 0.0 else 0.0
                        for d in range(dim):
                            out_NI[row, at + d] = out_4d[i, d] * share


@njit(**OPTIONS)
def up(count, step):
    """The next multiple of a step."""
    return (count + step - 1) // step * step


@njit(**FAST)
def gate(gate_I, up_I):
    """silu(gate) * up, in place of the gate."""
    for i in range(gate_I.size):
        x = gate_I[i]
        e = exp(-abs(x))
        sigmoid = (1.0 if x >= 0.0 else e) / (1.0 + e)
        gate_I[i] = x * sigmoid * up_I[i]


@njit(**OPTIONS)
def linear(x_NI, weight, out_NO, add):
    """weight: addresses of blocks and scales, bits of a code, address of a bias (0: none)."""
    rows, outputs = out_NO.shape
    multiply(
        x_NI=x_NI,
        blocks=weight[0],
        scale_O=carray(pointer(weight[1], types.float32), (outputs,)),
        bits=weight[2],
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
    x_NH,
    mixed_NW,
    layers_LA,
    sizes,
    eps,
    cos_Nd,
    sin_Nd,
    slots_N,
    kv_LtgSd,
    groups_X,
    taps_T,
    tapped_TNH,
):
    """The rows of x through all layers, in place. mixed_NW: the input of the first attention if its
    layer has no norm. layers_LA: for each layer the addresses of the weights, see `CompiledLayers`;
    sizes: heads, kv_heads, head_dim, width of the MLP."""
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
        if own[0]:
            norm_H = carray(pointer(own[0], types.float64), (hidden,))
            for n in range(rows):
                normalise(x_NH[n], norm_H, eps, normed_NH[n])
            linear(normed_NH, own[1:5], qkv_NI, False)
        else:
            linear(mixed_NW, own[1:5], qkv_NI, False)
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
            gate(both_NI[n, :inner], both_NI[n, inner:])
        linear(both_NI[:, :inner], own[15:19], x_NH, True)
