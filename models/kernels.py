"""Compiled products of rows and packed weights, by one thread or several.

numba compiles them at their first call, and keeps them on disk; after a change in `tiles` remove
its cache. A row is quantised to int8 before a product with codes, whose sums are exact, or rounded
to the weights' floats, whose sums are added in one order for any number of rows. A thread computes
its share of the outputs, so sums do not depend on the number of threads either."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types

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
    add_one,
    bits_of,
    give_way,
    largest_of_half,
    number_at,
    pointer,
    quantise_half,
    tile,
)

OPTIONS: Any = {"nogil": True, "error_model": "numpy", "cache": True}
FAST: Any = {**OPTIONS, "fastmath": {"reassoc", "contract", "nsz"}}

# The cells of a team, which every thread has of its own, see `Team`.
COUNTER, THREAD, THREADS, PASSED, TEAM_FIELDS = range(5)
TRIES = 20_000  # of a thread that waits for others, before it lets other programs run


def fields(*names: str) -> Any:
    return np.dtype([(name, np.int64) for name in names])


# Addresses and sizes; work: memory for `bytes_of_inputs`.
MULTIPLY = fields("blocks", "scale", "bits", "rows", "depth", "outputs", "x", "out", "work", "add")
NUMBERS = {  # int16 has the bits of bfloat16
    torch.float64: types.float64,
    torch.float32: types.float32,
    torch.bfloat16: types.int16,
}
MULTIPLY_TYPE = from_dtype(MULTIPLY)


def pack_numbers(weight_OI: Any) -> Any:
    """Blocks of float32 [O / 16, I, 16], of bfloat16, as int16, [O / 16, I / 2, 16, 2], or of uint8
    [O / 16, I / 4, 16, 4], 128 above the codes in int8."""
    padded = padded_rows(weight_OI, 0)
    each = 4 // padded.itemsize
    ordered = padded.reshape(-1, LANES, padded.shape[1] // each, each).transpose(0, 2, 1, 3)
    blocks = aligned((*ordered.shape[:2], LANES * 4))
    blocks.view(padded.dtype).reshape(ordered.shape)[:] = ordered
    return np.bitwise_xor(blocks, 128, out=blocks) if padded.dtype == np.int8 else blocks


def pack_int4(codes_OI: Any, steps_OG: Any, offsets_OG: Any) -> Any:
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
def share(count, team):
    """The part of a range that a thread of a team computes."""
    return count * team[THREAD] // team[THREADS], count * (team[THREAD] + 1) // team[THREADS]


@njit(**OPTIONS)
def barrier(team):
    """Wait until all threads of a team are here."""
    if team[THREADS] > 1:
        team[PASSED] += 1
        add_one(team[COUNTER])
        tries = 0
        while number_at(team[COUNTER]) < team[PASSED] * team[THREADS]:
            tries += 1
            if tries > TRIES:
                give_way()


@njit(**OPTIONS)
def product(inputs, weight, out_NO, add, team):
    """The product of rows, once all threads have prepared theirs, written to, or added to, out; it
    ends with a barrier. weight: addresses of blocks and scales, bits of a code, address of a bias
    (0: none). A group is what one step of a tile multiplies."""
    barrier(team)
    inputs_NI, terms_NGt, scale_N = inputs
    rows, stride = inputs_NI.shape
    blocks = weight[0]
    scale_O = carray(pointer(weight[1], types.float32), (out_NO.shape[1],))
    bits = weight[2]
    groups = stride // GROUP if bits < 16 else stride * 8 // bits // FLOATS_AT_ONCE
    segment = SEGMENT if bits < 16 else groups
    size = stride // groups * LANES
    if bits == 4:
        size = size // 2 + 4 * LANES
    width = terms_NGt.strides[0]
    sums_TO = np.empty((MAX_TILE, PANEL))
    tiles = (rows + MAX_TILE - 1) // MAX_TILE
    first_block, last_block = share((scale_O.size + LANES - 1) // LANES, team)
    outputs = min(last_block * LANES, scale_O.size)
    panels = (last_block - first_block + PANEL // LANES - 1) // (PANEL // LANES)
    for step in range(panels * tiles):
        row = step % tiles * MAX_TILE
        count = min(MAX_TILE, rows - row)
        panel = first_block * LANES + step // tiles * PANEL
        end = min(panel + PANEL, outputs)
        sums_TO[:count] = 0.0
        for first in range(panel, end, LANES):
            block = blocks + first // LANES * groups * size
            sums = sums_TO.ctypes.data + 8 * (first - panel)
            for group in range(0, groups, segment):
                numbers = inputs_NI.ctypes.data + row * stride
                numbers += group * (stride // groups)
                terms = terms_NGt.ctypes.data + row * width + group * 4 * TERMS
                some = min(segment, groups - group)
                part = block + group * size
                tile(count, bits, (numbers, stride, terms, width, part, some, sums))
        panel_O = scale_O[panel:end]
        for t in range(count):
            scale = scale_N[row + t]
            sums_O = sums_TO[t]
            out_O = out_NO[row + t, panel:end]
            for o in range(panel_O.size):
                scaled = sums_O[o] * (scale * np.float64(panel_O[o]))
                out_O[o] = out_O[o] + scaled if add else scaled
    if weight[3]:
        bias_O = carray(pointer(weight[3], types.float64), (outputs,))
        for n in range(rows):
            for o in range(first_block * LANES, outputs):
                out_NO[n, o] += bias_O[o]
    barrier(team)


@njit(**OPTIONS)
def rounded(x):
    """The bits of a number rounded to bfloat16."""
    bits = bits_of(np.float32(x))
    return np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@njit(**OPTIONS)
def inputs_at(address, rows, depth, bits):
    """Memory for prepared rows: numbers, terms of their groups, scales; see `bytes_of_inputs`."""
    groups = (depth + GROUP - 1) // GROUP
    width = groups * GROUP * max(bits // 8, 1)
    inputs_NI = carray(pointer(address, types.int8), (rows, width))
    scale_N = carray(pointer(address + rows * width, types.float64), (rows,))
    terms_at = pointer(address + rows * (width + 8), types.int32)
    return inputs_NI, carray(terms_at, (rows, groups, TERMS)), scale_N


def bytes_of_inputs(depth: int, bits: int) -> int:
    """Of a row."""
    groups = -(-depth // GROUP)
    return groups * (GROUP * max(bits // 8, 1) + 4 * TERMS) + 8


@njit(**OPTIONS)
def prepare(x_I, bits, inputs, n):
    """Write row n of the inputs: quantised for weights of 4 and 8 bits, else rounded to theirs."""
    inputs_NI, terms_NGt, scale_N = inputs
    depth = x_I.size
    if bits < 16:
        scale_N[n] = quantise(x_I, bits, codes_I=inputs_NI[n], terms_Gt=terms_NGt[n])
        return
    scale_N[n] = 1.0
    if bits == 16:
        halves_I = inputs_NI[n].view(np.int16)
        for i in range(depth):
            halves_I[i] = rounded(x_I[i])
        halves_I[depth:] = 0
    else:
        floats_I = inputs_NI[n].view(np.float32)
        for i in range(depth):
            floats_I[i] = x_I[i]
        floats_I[depth:] = 0.0


@njit(**OPTIONS)
def multiply(call, team, out_NO):
    """Rows by packed weights: `call` has the fields of MULTIPLY."""
    rows = len(out_NO)
    x_NI = carray(pointer(call.x, types.float64), (rows, call.depth))
    inputs = inputs_at(call.work, rows, call.depth, call.bits)
    first, last = share(rows, team)
    for n in range(first, last):
        prepare(x_NI[n], call.bits, inputs, n)
    weight = (call.blocks, call.scale, call.bits, 0)
    product(inputs, weight, out_NO, add=call.add != 0, team=team)


@cache
def multiply_of(dtype: torch.dtype) -> Any:
    """`multiply` into numbers of a type, as a function of two addresses: MULTIPLY, and the team."""
    numbers = NUMBERS[dtype]

    @cfunc(types.void(types.intp, types.intp), error_model="numpy", cache=True)
    def run(at, team_at):
        call = carray(pointer(at, MULTIPLY_TYPE), (1,))[0]
        team = carray(pointer(team_at, types.int64), (TEAM_FIELDS,))
        out_NO = carray(pointer(call.out, numbers), (call.rows, call.outputs))
        multiply(call, team, out_NO)

    return run.ctypes
