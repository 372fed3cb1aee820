"""Compiled products of rows and packed weights, and all layers of a model, by several threads.

numba compiles them at their first call, and keeps them on disk; after a change in `tiles` remove
its cache. A row is quantised to int8 before a product with codes, whose sums are exact, or rounded
to the weights' floats, whose sums are added in one order for any number of rows. A thread computes
its share of the outputs, so sums do not depend on the number of threads either. Activations are
float64; keys and values are rounded to the numbers of the pool."""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types

from .attention import GROUP_FIELDS, attend, exp
from .codes import CEILING, GROUP, INT4_OFFSET, LANES, MAX_CODE, MAX_STEP
from .tiles import (
    ARGUMENTS,
    FAST,
    FLOATS_AT_ONCE,
    FUNCTION,
    IDLE_TRIES,
    MAX_TILE,
    OPTIONS,
    PANEL,
    SEGMENT,
    SHARED,
    SHARED_FIELDS,
    TEAM_FIELDS,
    TERMS,
    barrier,
    bits_of,
    call_at,
    largest_of_half,
    pointer,
    quantise_half,
    share,
    tile,
)

LAYER_FIELDS = 20  # see `CompiledLayers._addresses`; and the number of its RoPE


def fields(names: str) -> Any:
    return np.dtype([(name, np.int64) for name in names.split()])


# Addresses and sizes. mixed: the input of the first layer's attention, if it mixes; cos, sin: of
# every RoPE and all positions, of which there are `angles`, of `rotary_dim` numbers each; tapped:
# the rows before layers; work: memory for `bytes_of_inputs`, and for the rows between products.
MULTIPLY = fields("blocks scale bits rows depth outputs x out work add")
NAMES = (
    "layers num_layers hidden heads kv_heads head_dim inner x rows mixed mixed_width cos sin"
    " angles rotary_dim"
    " positions slots pool pool_slots groups num_groups taps num_taps tapped work"
)
RUN_LAYERS = np.dtype([("eps", np.float64), *fields(NAMES).descr])
NUMBERS = {  # int16 has the bits of bfloat16
    torch.float64: types.float64,
    torch.float32: types.float32,
    torch.bfloat16: types.int16,
}
MULTIPLY_TYPE = from_dtype(MULTIPLY)
RUN_TYPE = from_dtype(RUN_LAYERS)


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
    """Of a prepared row."""
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
    """Rotate the first part of a head; the rest is copied."""
    rotary_dim = cos_d.size
    for i in range(rotary_dim, x_d.size):
        out_d[i] = x_d[i]
    half = rotary_dim // 2
    lower_d, upper_d = x_d[:half], x_d[half:rotary_dim]
    for i in range(half):
        out_d[i] = lower_d[i] * cos_d[i] + upper_d[i] * sin_d[i]
    cos_d, sin_d, out_d = cos_d[half:], sin_d[half:], out_d[half:]
    for i in range(half):
        out_d[i] = upper_d[i] * cos_d[i] + lower_d[i] * sin_d[i]


@njit(**OPTIONS)
def store(x_d, out_d):
    """float64 rounded to the numbers of a pool."""
    for i in range(x_d.size):
        if out_d.itemsize == 2:
            out_d[i] = rounded(x_d[i])
        else:
            out_d[i] = x_d[i]


@njit(**OPTIONS)
def doubles(address, shape):
    return carray(pointer(address, types.float64), shape)


@njit(**FAST)
def gate(gate_I, up_I):
    """silu(gate) * up, in place of the gate."""
    for i in range(gate_I.size):
        x = gate_I[i]
        e = exp(-abs(x))
        sigmoid = (1.0 if x >= 0.0 else e) / (1.0 + e)
        gate_I[i] = x * sigmoid * up_I[i]


@njit(**OPTIONS)
def run_layers(call, team, kv_LtgSd):
    """The rows of x through all layers, in place: `call` has the fields of RUN_LAYERS. A thread
    computes its share of the rows, of a product's outputs, of the heads, or of the attention."""
    rows = call.rows
    hidden = call.hidden
    heads = call.heads
    kv_heads = call.kv_heads
    dim = call.head_dim
    inner = call.inner
    width = heads * dim
    kv_width = kv_heads * dim
    x_NH = doubles(call.x, (rows, hidden))
    mixed_NW = doubles(call.mixed, (rows, call.mixed_width))
    layers_LA = carray(pointer(call.layers, types.int64), (call.num_layers, LAYER_FIELDS))
    positions_N = carray(pointer(call.positions, types.int64), (rows,))
    slots_N = carray(pointer(call.slots, types.int64), (rows,))
    groups_X = carray(pointer(call.groups, types.int64), (call.num_groups, GROUP_FIELDS))
    taps_T = carray(pointer(call.taps, types.int64), (call.num_taps,))
    tapped_TNH = doubles(call.tapped, (call.num_taps, rows, hidden))
    qkv_NI = doubles(call.work, (rows, width + 2 * kv_width))
    q_Nhd = doubles(call.work + 8 * qkv_NI.size, (rows, heads, dim))
    out_NI = doubles(q_Nhd.ctypes.data + 8 * q_Nhd.size, (rows, width))
    both_NI = doubles(out_NI.ctypes.data + 8 * out_NI.size, (rows, 2 * inner))
    work = both_NI.ctypes.data + 8 * both_NI.size
    bits = layers_LA[0, 3]
    turned_d = np.empty(dim)
    normed_H = np.empty(hidden)
    first, last = share(rows, team)
    out_NI[first:last] = 0.0  # a row that sees nothing has zeros
    for layer in range(call.num_layers):
        for t in range(taps_T.size):
            if taps_T[t] == layer:
                tapped_TNH[t, first:last] = x_NH[first:last]
        own = layers_LA[layer]
        inputs = inputs_at(work, rows, hidden if own[0] else call.mixed_width, bits)
        for n in range(first, last):
            if own[0]:
                normalise(x_NH[n], doubles(own[0], (hidden,)), call.eps, normed_H)
                prepare(normed_H, bits, inputs, n)
            else:
                prepare(mixed_NW[n], bits, inputs, n)
        product(inputs, own[1:5], qkv_NI, add=False, team=team)
        keys_gSd = kv_LtgSd[layer, 0]
        values_gSd = kv_LtgSd[layer, 1]
        begin, end = share(rows * (heads + kv_heads), team)
        for place in range(begin, end):
            n, h = divmod(place, heads + kv_heads)
            head_d = qkv_NI[n, h * dim : (h + 1) * dim]
            if own[5]:
                which = 8 * dim if h >= heads else 0
                normalise(head_d, doubles(own[5] + which, (dim,)), call.eps, head_d)
            angles = 8 * call.rotary_dim * (own[19] * call.angles + positions_N[n])
            cos_d = doubles(call.cos + angles, (call.rotary_dim,))
            sin_d = doubles(call.sin + angles, (call.rotary_dim,))
            if h < heads:
                rotate(head_d, cos_d, sin_d, q_Nhd[n, h])
            else:
                slot = slots_N[n]
                rotate(head_d, cos_d, sin_d, turned_d)
                store(turned_d, keys_gSd[h - heads, slot])
                at = h * dim + kv_width
                store(qkv_NI[n, at : at + dim], values_gSd[h - heads, slot])
        barrier(team)
        attend(q_Nhd, keys_gSd, values_gSd, groups_X=groups_X, out_NI=out_NI, team=team)
        barrier(team)
        inputs = inputs_at(work, rows, width, bits)
        for n in range(first, last):
            prepare(out_NI[n], bits, inputs, n)
        product(inputs, own[6:10], x_NH, add=True, team=team)
        inputs = inputs_at(work, rows, hidden, bits)
        for n in range(first, last):
            normalise(x_NH[n], doubles(own[10], (hidden,)), call.eps, normed_H)
            prepare(normed_H, bits, inputs, n)
        product(inputs, own[11:15], both_NI, add=False, team=team)
        inputs = inputs_at(work, rows, inner, bits)
        for n in range(first, last):
            gate(both_NI[n, :inner], both_NI[n, inner:])
            prepare(both_NI[n, :inner], bits, inputs, n)
        product(inputs, own[15:19], x_NH, add=True, team=team)


@cache
def team_functions() -> Any:
    """`start` runs a function in all threads of a team; its arguments are the addresses of the
    function, of its arguments and of the calling thread's cells. `serve` is the loop of every other
    thread; its argument is the address of the thread's cells."""

    def start(function, arguments, cells):
        team = carray(pointer(cells, types.int64), (TEAM_FIELDS,))
        shared = carray(pointer(team[SHARED], types.int64), (SHARED_FIELDS,))
        shared[FUNCTION] = function
        shared[ARGUMENTS] = arguments
        barrier(team)
        call_at(function, arguments, cells)

    def serve(cells):
        team = carray(pointer(cells, types.int64), (TEAM_FIELDS,))
        shared = carray(pointer(team[SHARED], types.int64), (SHARED_FIELDS,))
        while True:
            barrier(team, IDLE_TRIES)
            call_at(shared[FUNCTION], shared[ARGUMENTS], cells)

    options: Any = {"error_model": "numpy", "cache": True}
    three = cfunc(types.void(types.intp, types.intp, types.intp), **options)(start)
    return three.ctypes, cfunc(types.void(types.intp), **options)(serve).ctypes


@cache
def layers_of(dtype: torch.dtype) -> int:
    """`run_layers` with pools of numbers of a type, the address of a function of two addresses:
    RUN_LAYERS, and the team."""
    numbers = NUMBERS[dtype]

    @cfunc(types.void(types.intp, types.intp), error_model="numpy", cache=True)
    def run(at, team_at):
        call = carray(pointer(at, RUN_TYPE), (1,))[0]
        team = carray(pointer(team_at, types.int64), (TEAM_FIELDS,))
        shape = (call.num_layers, 2, call.kv_heads, call.pool_slots, call.head_dim)
        run_layers(call, team, carray(pointer(call.pool, numbers), shape))

    address: int = run.address
    return address


@cache
def multiply_of(dtype: torch.dtype) -> int:
    """`multiply` into numbers of a type, the address of a function of two addresses: MULTIPLY, and
    the team."""
    numbers = NUMBERS[dtype]

    @cfunc(types.void(types.intp, types.intp), error_model="numpy", cache=True)
    def run(at, team_at):
        call = carray(pointer(at, MULTIPLY_TYPE), (1,))[0]
        team = carray(pointer(team_at, types.int64), (TEAM_FIELDS,))
        out_NO = carray(pointer(call.out, numbers), (call.rows, call.outputs))
        multiply(call, team, out_NO)

    address: int = run.address
    return address
