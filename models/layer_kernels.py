"""All layers of a quantised decoder as one compiled function.

Activations are float64; keys and values are rounded to the numbers of the pool. No result depends
on how many rows a forward has or on where keys are stored, but for the noise of float64, which
almost never moves a code. numba does not see a change in `kernels`: after one, remove its cache."""

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic, overload

from .kernels import FAST, MAXIMUM, OPTIONS, multiply, pointer

MASKED = -1e300  # the score of a key that a query does not see


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
