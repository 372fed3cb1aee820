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

from .integer import CEILING, GROUP, INT4_OFFSET, MAX_CODE, MAX_STEP, UP_FROM

LANES = 16  # outputs of a block of packed weights
FOUR = 4  # inputs whose products one instruction adds
MAX_TILE = 8  # rows that one pass over a block of weights multiplies
SEGMENT = 16  # groups of inputs whose sum fits into int32
MASKED = -1e300  # the score of a key that a query does not see
TERMS = 5  # numbers of a row's group, see `quantise`
GROUP_BYTES_8 = GROUP * LANES  # of a block in eight bits
GROUP_BYTES_4 = GROUP * LANES // 2 + 4 * LANES

INT8 = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
VECTOR = ir.VectorType(INT32, LANES)
BYTES = 4 * LANES  # of a vector


def pack_int8(codes_OI: Any, scale_O: Any) -> Any:
    """Blocks [O / 16, I / 4, 16, 4] of uint8, 128 above the codes."""
    padded = padded_rows(codes_OI, 0).astype(np.int16) + 128
    ordered = padded.reshape(-1, LANES, padded.shape[1] // FOUR, FOUR).transpose(0, 2, 1, 3)
    return aligned(ordered.astype(np.uint8))


def pack_int4(codes_OI: Any, steps_OG: Any, offsets_OG: Any, scale_O: Any) -> Any:
    """Blocks [O / 16, I / 64, 576] of uint8: two codes in a byte, for each 32 inputs 4 vectors of
    16 outputs; then a step and an offset for each 32 inputs and output."""
    padded = padded_rows(codes_OI, 8)
    blocks = padded.shape[0] // LANES
    groups = padded.shape[1] // GROUP
    pairs = np.zeros((blocks * LANES, 2 * groups, 2), np.int8)
    pairs[: len(steps_OG), : steps_OG.shape[1], 0] = steps_OG
    pairs[: len(steps_OG), : steps_OG.shape[1], 1] = offsets_OG
    sixteens = padded.reshape(blocks, LANES, groups, 2, 2, 4, FOUR)
    both = sixteens[:, :, :, :, 0] | sixteens[:, :, :, :, 1] << 4
    both = both.transpose(0, 2, 3, 4, 1, 5).reshape(blocks, groups, -1)
    pairs = pairs.reshape(blocks, LANES, groups, 2, 2).transpose(0, 2, 3, 1, 4)
    pairs = pairs.reshape(blocks, groups, -1).view(np.uint8)
    return aligned(np.concatenate((both, pairs), -1))


def padded_rows(codes_OI: Any, zero: int) -> Any:
    """Codes with whole blocks of outputs and whole groups of inputs."""
    more = (-codes_OI.shape[0] % LANES, -codes_OI.shape[1] % GROUP)
    return np.pad(codes_OI, ((0, more[0]), (0, more[1])), constant_values=zero)


def aligned(numbers: Any) -> Any:
    """A copy of uint8 numbers that begins at a multiple of a vector's size."""
    memory = np.empty(numbers.size + BYTES, np.uint8)
    start = -memory.ctypes.data % BYTES
    copy = memory[start : start + numbers.size].reshape(numbers.shape)
    copy[:] = numbers
    return copy


class TileWriter:
    """Writes the instructions that multiply a tile of rows by a block of weights.

    rows: of the tile. The other arguments are values of 64 bits: addresses of codes [rows, depth]
    in int8, of terms [rows, width] in int32, of the block and of the sums [rows, 16] in int32."""

    def __init__(self, builder: Any, rows: int) -> None:
        self.builder = builder
        self.rows = range(rows)
        self.zero = ir.Constant(VECTOR, [0] * LANES)

    def call(self, name: str, *vectors: Any) -> Any:
        kind = ir.FunctionType(VECTOR, (VECTOR, VECTOR, VECTOR))
        function = self.builder.module.declare_intrinsic(f"llvm.x86.avx512.{name}.512", (), kind)
        return self.builder.call(function, vectors)

    def add(self, address: Any, distance: int) -> Any:
        return self.builder.add(address, ir.Constant(INT64, distance))

    def load(self, address: Any, kind: Any = VECTOR) -> Any:
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=BYTES if kind is VECTOR else 1)

    def spread(self, address: Any) -> Any:
        """The four bytes at an address, in all lanes."""
        undefined = ir.Constant(VECTOR, ir.Undefined)
        number = self.load(address, INT32)
        lane = self.builder.insert_element(undefined, number, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(lane, undefined, self.zero)

    def all_lanes(self, number: int) -> Any:
        return ir.Constant(VECTOR, [number] * LANES)

    def eight_bits(self, codes: list[Any], terms: list[Any], block: Any) -> list[Any]:
        """The sums of a group of inputs."""
        sums = [self.spread(self.add(term, 4)) for term in terms]
        for four in range(GROUP // FOUR):
            weights = self.load(self.add(block, four * BYTES))
            for row in self.rows:
                inputs = self.spread(self.add(codes[row], four * FOUR))
                sums[row] = self.call("vpdpbusd", sums[row], weights, inputs)
        return sums

    def four_bits(self, codes: list[Any], terms: list[Any], block: Any) -> list[Any]:
        """The sums of a group of inputs."""
        builder = self.builder
        mask = self.all_lanes(0x0F0F0F0F)
        totals = [self.zero for _ in self.rows]
        for half in range(2):
            sums = [self.spread(self.add(term, 4 + 8 * half)) for term in terms]
            for four in range(4):
                both = self.load(self.add(block, (4 * half + four) * BYTES))
                parts = (both, builder.lshr(both, self.all_lanes(4)))
                for place, part in enumerate(parts):
                    weights = builder.and_(part, mask)
                    for row in self.rows:
                        at = self.add(codes[row], 32 * half + 16 * place + 4 * four)
                        inputs = self.spread(at)
                        sums[row] = self.call("vpdpbusd", sums[row], weights, inputs)
            narrow = ir.VectorType(INT8, 2 * LANES)
            stored = self.load(self.add(block, 8 * BYTES + half * BYTES // 2), narrow)
            pairs = builder.sext(stored, ir.VectorType(INT16, 2 * LANES))
            pairs = builder.bitcast(pairs, VECTOR)
            for row in self.rows:
                low = builder.and_(sums[row], self.all_lanes(0xFFFF))
                both = builder.or_(low, self.spread(self.add(terms[row], 8 + 8 * half)))
                totals[row] = self.call("vpdpwssd", totals[row], both, pairs)
        return totals

    def write(self, bits: int, arguments: tuple[Any, ...]) -> None:
        """A loop over the groups, and the sums in memory."""
        builder = self.builder
        codes, depth, terms, width, block, groups, sums = arguments
        before = builder.block
        loop = builder.append_basic_block("groups")
        after = builder.append_basic_block("done")
        code_rows = [
            builder.add(codes, builder.mul(depth, ir.Constant(INT64, r))) for r in self.rows
        ]
        term_rows = [
            builder.add(terms, builder.mul(width, ir.Constant(INT64, 4 * r))) for r in self.rows
        ]
        builder.branch(loop)
        builder.position_at_end(loop)
        group = builder.phi(INT64)
        group.add_incoming(ir.Constant(INT64, 0), before)
        totals = [builder.phi(VECTOR) for _ in self.rows]

        def placed(start: Any, size: int) -> Any:
            return builder.add(start, builder.mul(group, ir.Constant(INT64, size)))

        code_at = [placed(start, GROUP) for start in code_rows]
        term_at = [placed(start, 4 * TERMS) for start in term_rows]
        of_bits = self.eight_bits if bits == 8 else self.four_bits
        group_sums = of_bits(
            code_at, term_at, placed(block, GROUP_BYTES_8 if bits == 8 else GROUP_BYTES_4)
        )
        following = self.add(group, 1)
        for row in self.rows:
            step = self.spread(term_at[row])
            total = builder.add(totals[row], builder.mul(group_sums[row], step))
            totals[row].add_incoming(self.zero, before)
            totals[row].add_incoming(total, loop)
            group_sums[row] = total
        group.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
        builder.position_at_end(after)
        for row in self.rows:
            address = self.add(sums, row * BYTES)
            pointer = builder.inttoptr(address, VECTOR.as_pointer())
            builder.store(group_sums[row], pointer, align=4)


def tile_product(bits: int) -> Any:
    """A function that multiplies 1 to MAX_TILE rows of codes by one block of weights.

    Its arguments: the number of rows, then those of `TileWriter.write`: the address of codes
    [rows, depth], depth, the address of terms [rows, width], width, the address of the block, the
    number of groups, and the address of the sums [rows, 16]."""

    @intrinsic
    def product(typing, rows, codes, depth, terms, width, block, groups, sums):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            end = builder.append_basic_block("end")
            cases = [builder.append_basic_block(f"rows_{n}") for n in range(1, MAX_TILE + 1)]
            switch = builder.switch(arguments[0], cases[-1])
            for number, case in enumerate(cases, 1):
                switch.add_case(ir.Constant(INT64, number), case)
                builder.position_at_end(case)
                TileWriter(builder, number).write(bits, arguments[1:])
                builder.branch(end)
            builder.position_at_end(end)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

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


eight_bit_tile = tile_product(8)
four_bit_tile = tile_product(4)

OPTIONS: Any = {"nogil": True, "error_model": "numpy", "cache": True}
FAST: Any = {**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}}
MAXIMUM: Any = {**OPTIONS, "fastmath": {"reassoc", "nsz", "nnan"}}  # else a loop of `max` is slow


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


@njit(**MAXIMUM)
def largest_of(x_I):
    largest = 0.0
    for i in range(x_I.size):
        largest = max(largest, abs(x_I[i]))
    return largest


@njit(**FAST)
def quantise_half(x_I, inverse, codes_I):
    """Write the codes of up to GROUP / 2 numbers; returns their sum."""
    total = np.int32(0)
    for i in range(x_I.size):
        code = np.int32(np.floor(x_I[i] * inverse + UP_FROM))
        codes_I[i] = np.int8(code)
        total += code
    return total


@njit(**FAST)
def quantise(x_I, bits, codes_I, terms_Gt):
    """Write the codes of a row and the terms of each group: its step, and what corrects the sums of
    unsigned weights. Of eight bits, one number; of four bits, two for each half of the group: minus
    the zero of the codes, and the factor of the offset. Returns the scale of the row."""
    largest = largest_of(x_I)
    if largest == 0.0:
        largest = 1.0
    scale = largest / (MAX_CODE * MAX_STEP)
    codes_I[x_I.size :] = 0
    for g in range(len(terms_Gt)):
        first = g * GROUP
        middle = first + GROUP // 2
        last = first + GROUP
        top = largest_of(x_I[first:last])
        step = max(np.floor(top * (MAX_STEP / largest) + CEILING), 1.0)
        terms_Gt[g, 0] = np.int32(step)
        inverse = 1.0 / (scale * step)
        lower = quantise_half(x_I[first:middle], inverse, codes_I[first:middle])
        upper = quantise_half(x_I[middle:last], inverse, codes_I[middle:last])
        if bits == 8:
            terms_Gt[g, 1] = -128 * (lower + upper)
        else:
            terms_Gt[g, 1] = -8 * lower
            terms_Gt[g, 2] = (INT4_OFFSET * lower) << 16
            terms_Gt[g, 3] = -8 * upper
            terms_Gt[g, 4] = (INT4_OFFSET * upper) << 16
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
def product(codes_NI, terms_NGt, scale_N, blocks, scale_O, bits, out_NO, add):
    """Rows of codes by packed weights, from the address `blocks`: written to, or added to, out."""
    rows, depth = codes_NI.shape
    groups = depth // GROUP
    outputs = scale_O.size
    block_bytes = groups * (GROUP_BYTES_8 if bits == 8 else GROUP_BYTES_4)
    sums_TO = np.empty((MAX_TILE, LANES), np.int32)
    sums = sums_TO.ctypes.data
    totals_TO = np.empty((MAX_TILE, LANES))
    width = groups * TERMS
    for first in range(0, outputs, LANES):
        last = min(first + LANES, outputs)
        block = blocks + first // LANES * block_bytes
        for row in range(0, rows, MAX_TILE):
            tile = min(MAX_TILE, rows - row)
            totals_TO[:tile] = 0.0
            for group in range(0, groups, SEGMENT):
                count = min(SEGMENT, groups - group)
                codes = codes_NI.ctypes.data + row * depth + group * GROUP
                terms = terms_NGt.ctypes.data + 4 * (row * width + group * TERMS)
                if bits == 8:
                    part = block + group * GROUP_BYTES_8
                    eight_bit_tile(tile, codes, depth, terms, width, part, count, sums)
                else:
                    part = block + group * GROUP_BYTES_4
                    four_bit_tile(tile, codes, depth, terms, width, part, count, sums)
                for t in range(tile):
                    for o in range(LANES):
                        totals_TO[t, o] += np.float64(sums_TO[t, o])
            for t in range(tile):
                scale = scale_N[row + t]
                for o in range(last - first):
                    value = totals_TO[t, o] * (scale * np.float64(scale_O[first + o]))
                    if add:
                        value += out_NO[row + t, first + o]
                    out_NO[row + t, first + o] = value


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
def add_product(a_4K, b_KN, first, last, out_4N):
    """Add the product of two matrices to columns first to last. K is a multiple of four."""
    a_K, b_K, c_K, d_K = a_4K[0], a_4K[1], a_4K[2], a_4K[3]
    for k in range(0, a_4K.shape[1], 4):
        a0, a1, a2, a3 = a_K[k], a_K[k + 1], a_K[k + 2], a_K[k + 3]
        b0, b1, b2, b3 = b_K[k], b_K[k + 1], b_K[k + 2], b_K[k + 3]
        c0, c1, c2, c3 = c_K[k], c_K[k + 1], c_K[k + 2], c_K[k + 3]
        d0, d1, d2, d3 = d_K[k], d_K[k + 1], d_K[k + 2], d_K[k + 3]
        for n in range(first, last):
            w, x, y, z = b_KN[k, n], b_KN[k + 1, n], b_KN[k + 2, n], b_KN[k + 3, n]
            out_4N[0, n] += a0 * w + a1 * x + a2 * y + a3 * z
            out_4N[1, n] += b0 * w + b1 * x + b2 * y + b3 * z
            out_4N[2, n] += c0 * w + c1 * x + c2 * y + c3 * z
            out_4N[3, n] += d0 * w + d1 * x + d2 * y + d3 * z


@njit(**MAXIMUM)
def raise_to(scores_R, largest_R):
    for r in range(scores_R.size):
        largest_R[r] = max(largest_R[r], scores_R[r])


@njit(**FAST)
def exponentials(scores_R, factor, largest_R, total_R):
    """Replace scores by e^(factor * (score - largest)), masked ones by 0; add them to totals."""
    for r in range(scores_R.size):
        e = exp(factor * (scores_R[r] - largest_R[r]))
        scores_R[r] = e if scores_R[r] > MASKED else 0.0
        total_R[r] += scores_R[r]


@njit(**OPTIONS)
def visible(mask_qK, queries, low_B, high_B):
    """For each four keys the range of queries among which are all that see one of them."""
    for block in range(low_B.size):
        low = queries
        high = 0
        for q in range(queries):
            for k in range(4 * block, min(4 * block + 4, mask_qK.shape[1])):
                if mask_qK[q, k]:
                    low = min(low, q)
                    high = q + 1
        low_B[block] = low
        high_B[block] = high


@njit(**OPTIONS)
def attend(q_Nhd, keys_gSd, values_gSd, groups_X, out_NI):
    """Attention of rows over slots of a layer of the pool; groups_X: see `CompiledLayers`. R: all
    queries of a sequence by the heads that share a key head; R, K and d are rounded up with zeros
    to what one step multiplies. Four keys at a time have the range of queries that see one."""
    kv_heads, _, dim = keys_gSd.shape
    folded = q_Nhd.shape[1] // kv_heads
    factor = 1.0 / np.sqrt(np.float64(dim))
    keys_4d = np.zeros((4, up(dim, 4)))
    out_4d = np.empty((4, dim))
    for x in range(len(groups_X)):
        rows_at, sequences, queries, count, slots_at, first, stride, mask_at = groups_X[x]
        mask_GqK = carray(pointer(mask_at, types.uint8), (sequences, queries, count))
        rows_Gq = carray(pointer(rows_at, types.int64), (sequences, queries))
        slots_GK = carray(pointer(slots_at, types.int64), (sequences, count))
        low_B = np.empty(up(count, 4) // 4, np.int64)
        high_B = np.empty(up(count, 4) // 4, np.int64)
        values_Kd = np.zeros((up(count, 4), dim))
        for s in range(sequences):
            own = queries  # a shorter sequence repeats its last row
            while rows_at and own > 1 and rows_Gq[s, own - 1] == rows_Gq[s, own - 2]:
                own -= 1
            visible(mask_GqK[s], own, low_B, high_B)
            size = own * folded
            q_dR = np.zeros((up(dim, 4), up(size, 8)))
            scores_KR = np.empty((up(count, 4), up(size, 8)))
            weights_RK = np.zeros((up(size, 4), up(count, 4)))
            largest_R = np.empty(up(size, 8))
            total_R = np.empty(up(size, 8))
            for h in range(kv_heads):
                for q in range(own):
                    row = rows_Gq[s, q] if rows_at else s * queries + q
                    for j in range(folded):
                        for d in range(dim):
                            q_dR[d, q * folded + j] = q_Nhd[row, h * folded + j, d]
                largest_R[:] = MASKED
                for block in range(low_B.size):
                    low = low_B[block] * folded
                    high = high_B[block] * folded
                    if low >= high:
                        continue
                    start = 4 * block
                    end = min(start + 4, count)
                    for k in range(start, end):
                        slot = slots_GK[s, k] if slots_at else first + s * stride + k
                        widen(keys_gSd[h, slot], keys_4d[k - start])
                        widen(values_gSd[h, slot], values_Kd[k])
                    if size < 8:
                        for k in range(start, end):
                            for r in range(low, high):
                                q = r // folded
                                row = rows_Gq[s, q] if rows_at else s * queries + q
                                head_d = q_Nhd[row, h * folded + r % folded]
                                scores_KR[k, r] = dot(head_d, keys_4d[k - start])
                    else:
                        scores_KR[start : start + 4, low:high] = 0.0
                        four_KR = scores_KR[start : start + 4]
                        add_product(keys_4d, q_dR, low, last=high, out_4N=four_KR)
                    for k in range(start, end):
                        for q in range(low_B[block], high_B[block]):
                            if not mask_GqK[s, q, k]:
                                scores_KR[k, q * folded : (q + 1) * folded] = MASKED
                        raise_to(scores_KR[k, low:high], largest_R[low:high])
                total_R[:] = 0.0
                for block in range(low_B.size):
                    low = low_B[block] * folded
                    high = high_B[block] * folded
                    for k in range(4 * block, min(4 * block + 4, count)):
                        weights_RK[:size, k] = 0.0
                        if low < high:
                            own_R = scores_KR[k, low:high]
                            exponentials(
                                own_R,
                                factor,
                                largest_R=largest_R[low:high],
                                total_R=total_R[low:high],
                            )
                            weights_RK[low:high, k] = own_R
                for r in range(0, size, 4):
                    out_4d[:] = 0.0
                    block = 0
                    while block < low_B.size:
                        end = block
                        while end < low_B.size and not (
                            low_B[end] * folded >= r + 4 or high_B[end] * folded <= r
                        ):
                            end += 1
                        if end > block:
                            part_4K = weights_RK[r : r + 4, 4 * block : 4 * end]
                            part_Kd = values_Kd[4 * block : 4 * end]
                            add_product(part_4K, part_Kd, 0, last=dim, out_4N=out_4d)
                        block = end + 1
                    for i in range(min(4, size - r)):
                        q = (r + i) // folded
                        row = rows_Gq[s, q] if rows_at else s * queries + q
                        at = (h * folded + (r + i) % folded) * dim
                        share = 1.0 / total_R[r + i] if total_R[r + i] > 0.0 else 0.0
                        for d in range(dim):
                            out_NI[row, at + d] = out_4d[i, d] * share


@njit(**OPTIONS)
def up(count, step):
    """The next multiple of a step."""
    return (count + step - 1) // step * step


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
def multiply(x_NI, blocks, scale_O, bits, out_NO, add):
    """Quantise rows and multiply them."""
    rows, depth = x_NI.shape
    groups = (depth + GROUP - 1) // GROUP
    codes_NI = np.empty((rows, groups * GROUP), np.int8)
    terms_NGt = np.empty((rows, groups, TERMS), np.int32)
    scale_N = np.empty(rows)
    for n in range(rows):
        scale_N[n] = quantise(x_NI[n], bits, codes_I=codes_NI[n], terms_Gt=terms_NGt[n])
    product(
        codes_NI=codes_NI,
        terms_NGt=terms_NGt,
        scale_N=scale_N,
        blocks=blocks,
        scale_O=scale_O,
        bits=bits,
        out_NO=out_NO,
        add=add,
    )


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
