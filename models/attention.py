"""Attention of the compiled layers, over slots of a pool, in float64.

The sums of a row are added in the order of its keys, whatever other rows there are."""

from typing import Any

import numpy as np
from numba import carray, njit, types

from .tiles import (
    FAST,
    KEYS,
    OPTIONS,
    QUERIES,
    VALUES,
    add_values,
    float32_of,
    float64_of,
    pointer,
    score_keys,
    share,
    transpose,
)

MAXIMUM: Any = {**OPTIONS, "fastmath": {"reassoc", "nsz", "nnan"}}  # else a loop of `max` is slow
MASKED = -1e300  # the score of a key that a query does not see
GROUP_FIELDS = 8  # see `CompiledLayers._groups`


@njit(**OPTIONS)
def up(count, step):
    """The next multiple of a step."""
    return (count + step - 1) // step * step


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
def widen(x_d, out_d):
    """Numbers of a pool as float64; those of two bytes, int16, have the bits of bfloat16."""
    for i in range(x_d.size):
        if x_d.itemsize == 2:
            out_d[i] = float32_of(np.int32(x_d[i]) << 16)
        else:
            out_d[i] = x_d[i]


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
            for k in range(KEYS * block, min(KEYS * (block + 1), mask_qK.shape[1])):
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
            if count and ranges_B2[count - 1, 1] == block * KEYS:
                count -= 1
            else:
                ranges_B2[count, 0] = block * KEYS
            ranges_B2[count, 1] = (block + 1) * KEYS
            count += 1
    return count


@njit(**OPTIONS)
def unfold(pools, slots_K, blocks, keys_Bd8, values_Kd):
    """Write keys and values of slots as float64, blocks of keys transposed."""
    keys_Sd, values_Sd = pools
    dim = keys_Sd.shape[1]
    whole = dim // KEYS * KEYS
    size = keys_Sd.itemsize
    for block in range(blocks[0], blocks[1]):
        slots_8 = slots_K[block * KEYS : (block + 1) * KEYS]
        k_d8 = keys_Bd8[block]
        a, b = keys_Sd[slots_8[0]].ctypes.data, keys_Sd[slots_8[1]].ctypes.data
        c, d = keys_Sd[slots_8[2]].ctypes.data, keys_Sd[slots_8[3]].ctypes.data
        e, f = keys_Sd[slots_8[4]].ctypes.data, keys_Sd[slots_8[5]].ctypes.data
        g, h = keys_Sd[slots_8[6]].ctypes.data, keys_Sd[slots_8[7]].ctypes.data
        transpose(size, (a, b, c, d, e, f, g, h, whole, k_d8.ctypes.data))
        for k in range(KEYS):
            if whole < dim:
                widen(keys_Sd[slots_8[k], whole:], k_d8[whole:dim, k])
            widen(values_Sd[slots_8[k]], values_Kd[block * KEYS + k])


@njit(**OPTIONS)
def attend(q_Nhd, keys_gSd, values_gSd, groups_X, out_NI, team):
    """Attention of rows over slots of a layer of the pool; groups_X: see `CompiledLayers`. The
    query heads that share a key head are computed together, four at a time, over the blocks of keys
    that one of them sees; K and d are rounded up. A thread has a range of such fours."""
    kv_heads, _, dim = keys_gSd.shape
    folded = q_Nhd.shape[1] // kv_heads
    factor = 1.0 / np.sqrt(np.float64(dim))
    depth = up(dim, VALUES)
    q_4d = np.zeros((QUERIES, depth))
    out_4d = np.empty((QUERIES, depth))
    total_4 = np.empty(QUERIES)
    for x in range(len(groups_X)):
        rows_at, sequences, queries, count, slots_at, first, stride, mask_at = groups_X[x]
        mask_GqK = carray(pointer(mask_at, types.uint8), (sequences, queries, count))
        rows_Gq = carray(pointer(rows_at, types.int64), (sequences, queries))
        slots_GK = carray(pointer(slots_at, types.int64), (sequences, count))
        length = up(count, KEYS)
        low_B = np.empty(length // KEYS, np.int64)
        high_B = np.empty(length // KEYS, np.int64)
        ranges_B2 = np.empty((length // KEYS, 2), np.int64)
        slots_K = np.empty(length, np.int64)
        keys_Bd8 = np.empty((length // KEYS, depth, KEYS))
        values_Kd = np.empty((length, depth))
        keys_Bd8[:, dim:] = 0.0
        values_Kd[:, dim:] = 0.0
        scores_4K = np.empty((QUERIES, length))
        fours = (queries * folded + QUERIES - 1) // QUERIES
        begin, end = share(sequences * kv_heads * fours, team)
        seen = -1
        size = 0
        for pair in range(begin // fours, (end + fours - 1) // fours):
            s, h = divmod(pair, kv_heads)
            if s != seen:
                own = queries  # a shorter sequence repeats its last row
                while rows_at and own > 1 and rows_Gq[s, own - 1] == rows_Gq[s, own - 2]:
                    own -= 1
                visible(mask_GqK[s], own, low_B, high_B)
                size = own * folded
                seen = s
                for k in range(length):
                    key = min(k, count - 1)
                    slots_K[k] = slots_GK[s, key] if slots_at else first + s * stride + key
            start = QUERIES * max(begin - pair * fours, 0)
            stop = min(QUERIES * (end - pair * fours), size)
            if start >= stop:
                continue
            last = (stop - 1) // folded
            ranges = ranges_of(low_B, high_B, start // folded, last=last, ranges_B2=ranges_B2)
            for place in range(ranges):
                blocks = (ranges_B2[place, 0] // KEYS, ranges_B2[place, 1] // KEYS)
                pools = (keys_gSd[h], values_gSd[h])
                unfold(pools, slots_K, blocks, keys_Bd8=keys_Bd8, values_Kd=values_Kd)
            for r in range(start, stop, QUERIES):
                some = min(QUERIES, stop - r)
                for i in range(some):
                    q = (r + i) // folded
                    row = rows_Gq[s, q] if rows_at else s * queries + q
                    widen(q_Nhd[row, h * folded + (r + i) % folded], q_4d[i])
                last = (r + some - 1) // folded
                ranges = ranges_of(low_B, high_B, r // folded, last=last, ranges_B2=ranges_B2)
                scores = scores_4K.ctypes.data
                for place in range(ranges):
                    for k in range(ranges_B2[place, 0], ranges_B2[place, 1], KEYS):
                        keys = keys_Bd8.ctypes.data + 8 * k * depth
                        left = (q_4d.ctypes.data, 8 * depth)
                        out = (scores + 8 * k, 8 * length)
                        score_keys(some, (*left, keys, 8 * KEYS, depth, *out))
                for i in range(some):
                    mask_K = mask_GqK[s, (r + i) // folded]
                    largest = MASKED
                    for place in range(ranges):
                        part = slice(ranges_B2[place, 0], ranges_B2[place, 1])
                        hide(scores_4K[i, part], mask_K[part])
                        largest = largest_of(scores_4K[i, part], largest)
                    total_4[i] = 0.0
                    for place in range(ranges):
                        part = slice(ranges_B2[place, 0], ranges_B2[place, 1])
                        total_4[i] += exponentials(scores_4K[i, part], factor, largest)
                out_4d[:] = 0.0
                for place in range(ranges):
                    k, until = ranges_B2[place]
                    left = (scores + 8 * k, 8 * length)
                    for d in range(0, depth, VALUES):
                        values = values_Kd.ctypes.data + 8 * (k * depth + d)
                        out = (out_4d.ctypes.data + 8 * d, 8 * depth)
                        add_values(some, (*left, values, 8 * depth, until - k, *out))
                for i in range(some):
                    q = (r + i) // folded
                    row = rows_Gq[s, q] if rows_at else s * queries + q
                    at = (h * folded + (r + i) % folded) * dim
                    scale = 1.0 / total_4[i] if total_4[i] > 0.0 else 0.0
                    for d in range(dim):
                        out_NI[row, at + d] = out_4d[i, d] * scale
