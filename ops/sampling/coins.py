"""Coins: random numbers that are functions of keys alone, with the same 64 bits on every device.

A key is one int64 for a request's seed and a branch, folded with a position or a place in a tree. A
coin is a key folded with a token id (Gumbel noise) or a key itself (a uniform number). Hashing is
SplitMix64 (Steele, Lea, Flood, 2014); logarithms are sums and products of IEEE 754."""

from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", Tensor, int)

STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: SplitMix64's increment
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
WORD = 1 << 64

LN_2 = 0.6931471805599453
ROOT_2 = 1.4142135623730951
ODD = tuple(range(21, 1, -2))  # denominators of the series of artanh, last term first
ONE_BITS = 0x3FF << 52  # sign and exponent of a float64 in [1, 2)
MANTISSA = (1 << 52) - 1

SPARE = 8  # more tokens than can be within rounding errors of each other


class CoinRole(IntEnum):
    """The decision that a coin of rejection sampling makes; the roles' coins are independent."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2


@lru_cache(4096)  # asked for again whenever other branches of a round change
def branch_key(seed: int, branch: int) -> int:
    """The key of a branch (an int64 value) from its request's seed and its index; root is -1."""
    return _signed(fold(fold(0, seed), branch) % WORD)


def token_keys(key_R: Tensor, position_R: Tensor) -> Tensor:
    """int64 keys of the tokens at these positions: the same for every node of one depth."""
    return fold(key_R, position_R)


def round_keys(
    key_R: Tensor, root_R: Tensor, depth_R: Tensor, rank_R: Tensor, role: CoinRole
) -> Tensor:
    """int64 keys of one role's coins in a round of rejection sampling, from the branch's key, the
    position of the round's root token, the node's depth, and its rank among its siblings."""
    key_R = fold(fold(fold(key_R, root_R), depth_R), rank_R)
    return fold(key_R, torch.full_like(key_R, int(role)))


def fold(key: T, value: T) -> T:
    """The key of (key, value): int64, any shapes that broadcast. Integers count modulo 2**64."""
    x = key + value * _signed(STEP)
    for shift, factor in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, SHIFTS[-1])


def uniforms(key: Tensor) -> Tensor:
    """float64 in (0, 1), of the key's shape: an odd multiple of 2**-53, never 0 and never 1."""
    return (_shifted(key, 12).double() + 0.5) * 2.0**-52


def gumbel(key_R: Tensor, ids_RK: Tensor) -> Tensor:
    """float64 [R, K]: standard Gumbel noise of these token ids under each row's key."""
    return -ln(-ln(uniforms(fold(key_R[:, None], ids_RK))))


def ln(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64 numbers, bit-equal on every device: x = m * 2**e
    with m near 1, ln m = 2 artanh((m - 1) / (m + 1)), summed in a fixed order."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & MANTISSA) | ONE_BITS).view(torch.float64)
    upper = m > ROOT_2
    m = torch.where(upper, m * 0.5, m)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = torch.zeros_like(s)
    for odd in ODD:
        series = (series + 1.0 / odd) * square
    return (exponent + upper).double() * LN_2 + (series * s + s) * 2.0


def ranked(scores_RV: Tensor, key_R: Tensor, most: int, count: int) -> Tensor:
    """int64 [R, min(count, most, V)]: ids by score + Gumbel noise, best first; padded with -1.

    Noise is exact to the last bit for ids that can be among the first; of equals the lowest id
    comes first. The best id that a grammar allows is a draw from the distribution renormalised to
    those. most: upper bound of the ids that a row keeps (`SamplingColumns.most_kept`)."""
    if most < scores_RV.shape[1]:
        ids_RK = scores_RV.topk(most).indices.sort(dim=-1).values
    else:
        ids_RK = torch.arange(scores_RV.shape[1], device=scores_RV.device).expand_as(scores_RV)
    kept_RK = scores_RV.gather(1, ids_RK).double()
    noise_RK = -(-uniforms(fold(key_R[:, None], ids_RK)).log()).log()
    last = min(count + SPARE, ids_RK.shape[1])
    place_RF = (kept_RK + noise_RK).topk(last).indices.sort(dim=-1).values
    ids_RF = ids_RK.gather(1, place_RF)
    exact_RF = kept_RK.gather(1, place_RF) + gumbel(key_R, ids_RF)
    order = exact_RF.sort(dim=-1, descending=True, stable=True)
    return ids_RF.gather(1, order.indices).where(order.values > -torch.inf, -1)[:, :count]


def perturbed(scores_RV: Tensor, key_R: Tensor) -> Tensor:
    """float64 [R, V]: score + Gumbel noise of every id, for the rare row that is read whole."""
    ids_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    return scores_RV.double() + gumbel(key_R, ids_V.expand(scores_RV.shape[0], -1))


def _shifted(x: T, count: int) -> T:
    """Logical shift of 64 bits to the right: int64 shifts copy the sign bit."""
    return (x >> count) & (WORD - 1 >> count)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - WORD if word >= WORD // 2 else word
