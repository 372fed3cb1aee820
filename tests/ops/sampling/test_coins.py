"""Coins: the same bits everywhere, independent keys, and the law of what is drawn with them."""

import math
from itertools import combinations, product

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.ops.sampling import coins

BITS_OF_KEYS = [5773085002495034107, 1589987630887777773]
BITS_OF_NOISE = [
    "-0x1.a50523f391008p+0",
    "0x1.8798ec59170bcp-1",
    "0x1.3f08f90eea143p-1",
    "0x1.faabcca7e982cp-1",
    "-0x1.5b4a197bdc1bfp-1",
    "-0x1.dc3dfc3e16010p-7",
]
WORDS = st.integers(-(2**63), 2**63 - 1)


def draw(scores_RV: Tensor, key_R: Tensor, most: int) -> Tensor:
    return coins.ranked(scores_RV, key_R, most, 1).squeeze(1)


def keys(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def splitmix(word: int) -> int:
    with np.errstate(over="ignore"):
        x = np.uint64(word)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return int(x ^ (x >> np.uint64(31)))


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS)
def test_folding_is_splitmix_in_wrapping_arithmetic(key: int, value: int) -> None:
    word = (key + value * coins.STEP) % 2**64
    assert coins.fold(keys(key), keys(value)).item() % 2**64 == splitmix(word)


def test_the_first_outputs_of_splitmix_are_the_published_ones() -> None:
    """Seed 1234567, as in the reference implementation (Vigna, prng.di.unimi.it)."""
    state = coins.fold(keys(1234567).expand(3), keys(1, 2, 3))
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [word % 2**64 for word in state.tolist()] == wanted


def test_coins_have_these_bits() -> None:
    key_R = coins.token_keys(keys(coins.branch_key(7, -1), coins.branch_key(7, 0)), keys(12, 12))
    assert key_R.tolist() == BITS_OF_KEYS
    noise = coins.gumbel(key_R, keys(0, 1, 31999).expand(2, -1))
    assert [value.hex() for value in noise.flatten().tolist()] == BITS_OF_NOISE


def test_uniform_numbers_are_never_0_or_1() -> None:
    u = coins.uniforms(keys(0, -1, 2**63 - 1, -(2**63), 4095))
    assert u.dtype == torch.float64
    assert ((u > 0) & (u < 1)).all()
    assert u.tolist()[:2] == [2.0**-53, 1 - 2.0**-53]


def test_logarithms_are_right_to_the_last_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    spread = torch.rand(20000, generator=generator, dtype=torch.float64)
    near_1 = 1 + (spread - 0.5) * 1e-6
    tiny = spread * 2.0**-45 + 2.0**-53
    for x in (spread + 1e-9, near_1, tiny, spread * 40):
        wanted = np.log(x.numpy().astype(np.longdouble)).astype(np.float64)
        assert np.allclose(coins.ln(x).numpy(), wanted, rtol=6e-16, atol=0)
    assert coins.ln(torch.tensor([1.0], dtype=torch.float64)).tolist() == [0.0]


def test_coins_do_not_depend_on_what_stands_beside_them() -> None:
    key_R = coins.fold(keys(5).expand(6), torch.arange(6))
    ids_V = torch.arange(1001)
    whole = coins.gumbel(key_R, ids_V.expand(6, -1))
    for row, token in ((0, 0), (3, 997), (5, 1000)):
        assert (
            coins.gumbel(key_R[row : row + 1], keys(token)[None]).item() == whole[row, token].item()
        )
    assert torch.equal(coins.gumbel(key_R, ids_V.flip(0)[::7].expand(6, -1)), whole.flip(1)[:, ::7])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def test_keys_have_independent_coins() -> None:
    """Seeds, branches, positions and tokens; rounds, depths, ranks and roles."""
    count = 20000
    each = torch.arange(count)
    rows = [
        coins.uniforms(
            coins.fold(
                coins.token_keys(keys(coins.branch_key(seed, branch)), keys(position)), each[None]
            )
        )[0]
        for seed, branch, position in product((0, 1), (-1, 0), (5, 6))
    ]
    key_R = coins.fold(keys(coins.branch_key(1, 0)).expand(count), each)
    columns = [
        coins.uniforms(
            coins.round_keys(key_R, *(keys(at).expand(count) for at in (root, depth, rank)), role)
        )
        for root, depth, rank, role in product((10, 11), (1, 2), (0, 1), coins.CoinRole)
    ]
    for one, other in (*combinations(rows, 2), *combinations(columns, 2)):
        assert abs(correlation(one, other)) < 5 / math.sqrt(count)
    for row in rows:
        assert abs(correlation(row[1:], row[:-1])) < 5 / math.sqrt(count)
        assert abs(float(row.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / count)


def chi2(counts: Tensor, p_V: Tensor) -> float:
    wanted = p_V * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


def test_draws_follow_the_softmax_of_the_scores() -> None:
    """df 7 at 1e-6: 40.52."""
    count = 40000
    scores_V = torch.tensor([0.0, 1.0, -1.0, 0.5, -torch.inf, 2.0, -0.3, 0.0, -2.0])
    key_R = coins.token_keys(keys(coins.branch_key(3, 2)).expand(count), torch.arange(count))
    drawn_R = draw(scores_V.expand(count, -1), key_R, most=9)
    counts = torch.bincount(drawn_R, minlength=9).double()
    kept = scores_V > -torch.inf
    assert counts[~kept].sum() == 0
    assert chi2(counts[kept], scores_V.double().softmax(0)[kept]) < 40.52


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(0, 2**31), st.booleans())
def test_a_draw_is_the_argmax_of_the_perturbed_scores(size: int, seed: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores_RV = torch.randn(4, size, generator=generator)
    scores_RV = scores_RV.round() if coarse else scores_RV
    kept = min(size, 12)
    last_R1 = scores_RV.sort(descending=True).values[:, kept - 1 : kept]
    scores_RV = scores_RV.where(scores_RV >= last_R1, -torch.inf)
    most = int((scores_RV > -torch.inf).sum(1).max())
    key_R = coins.token_keys(keys(coins.branch_key(seed, 0)).expand(4), torch.arange(4))
    wanted = coins.perturbed(scores_RV, key_R).argmax(-1)
    assert torch.equal(draw(scores_RV, key_R, most), wanted)
    assert torch.equal(draw(scores_RV, key_R, size), wanted)
    assert torch.equal(draw(scores_RV + 3.0, key_R, size), wanted)
    order = coins.perturbed(scores_RV, key_R).argsort(descending=True)
    order = order.where(scores_RV.gather(1, order) > -torch.inf, -1)
    assert torch.equal(coins.ranked(scores_RV, key_R, most, 5), order[:, : min(5, most)])


def test_what_a_grammar_forbids_leaves_the_law_of_what_it_allows() -> None:
    """df 2 at 1e-6: 27.63."""
    count = 30000
    scores_V = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5])
    key_R = coins.token_keys(keys(coins.branch_key(9, 1)).expand(count), torch.arange(count))
    legal = torch.tensor([0, 3, 4])
    order_RV = coins.ranked(scores_V.expand(count, -1), key_R, 5, 5)
    place_R = torch.isin(order_RV, legal).int().argmax(1, keepdim=True)
    counts = torch.bincount(order_RV.gather(1, place_R).squeeze(1), minlength=5)[legal].double()
    assert counts.sum() == count
    assert chi2(counts, scores_V[legal].double().softmax(0)) < 27.63
