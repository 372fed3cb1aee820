"""Chi-square of real draws: the rules pass, and every planted wrong algorithm fails."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import helpers.laws
import pytest
import torch
from helpers import laws
from helpers.vanilla import vectors
from torch import Tensor

from specsot.engine.certify.texts import ALPHA, chi_square, p_value
from specsot.ops.draft import proposals as drafting
from specsot.ops.sampling.coins import CoinRole, fold, round_keys, uniforms
from specsot.ops.sampling.settings import FITS, Draws, Rule
from specsot.ops.verify import rejection as accept_rejection
from specsot.ops.verify.rejection import accept_chain, inverse_cdf


def test_false_alarms_are_as_rare_as_they_should_be() -> None:
    """Twenty seeds: the statistic is above its median in half of them, never above critical."""
    toy, high = laws.reference_toy(), 0
    for seed in range(0, 200_000, 10_000):
        found = laws.p_values(laws.rounds()["chain"], toy, samples=2000, seed=seed)
        assert min(found) >= ALPHA
        high += sum(p < 0.5 for p in found)
    assert 15 <= high <= 45  # of 60


@pytest.mark.parametrize("toy", laws.TOYS)
@pytest.mark.parametrize("name", laws.rounds())
def test_a_way_of_accepting_has_the_targets_law(name: str, toy: str) -> None:
    assert min(laws.p_values(laws.rounds()[name], laws.TOYS[toy])) >= ALPHA


# --- wrong algorithms: those of the vectors have exactly the law that is written there -----------


def coin(now: laws.Round, depth: int, role: CoinRole) -> Tensor:
    """Uniform numbers, float64 [S]."""
    none_S = torch.zeros_like(now.key_S)
    return uniforms(round_keys(now.key_S, now.root_S, none_S + depth, none_S, role))


def compared_and_drawn_again(toy: laws.Toy, now: laws.Round) -> Tensor:
    p_SV, draft_S = toy.p_KV[now.last_S], toy.q_KV[now.last_S].argmax(1)
    first_S = inverse_cdf(p_SV, coin(now, 1, CoinRole.ACCEPT))
    again_S = inverse_cdf(p_SV, coin(now, 0, CoinRole.FINAL))
    return torch.where(first_S == draft_S, draft_S, again_S)[:, None]


def one_draft(
    now: laws.Round, p_KV: Tensor, draft_S: Tensor, told_SV: Tensor, kept_S: Tensor
) -> Tensor:
    verdict = accept_chain(
        p_KV[torch.stack([now.last_S, draft_S], 1)],
        told_SV[:, None],
        draft_S[:, None],
        kept_S[:, None],
        coin(now, 1, CoinRole.ACCEPT)[:, None],
        coin(now, 0, CoinRole.FINAL),
    )
    return laws.emitted(verdict.path_ST, draft_S[:, None], verdict.bonus_S)


def best_under_a_soft_law(toy: laws.Toy, now: laws.Round) -> Tensor:
    q_SV = toy.q_KV[now.last_S]
    draft_S = q_SV.argmax(1)
    return one_draft(now, toy.p_KV, draft_S, q_SV, draft_S >= 0)


def unsure_drafts_dropped(toy: laws.Toy, now: laws.Round) -> Tensor:
    q_SV = toy.q_KV[now.last_S]
    draft_S = inverse_cdf(q_SV, coin(now, 1, CoinRole.DRAFT))
    sure_S = q_SV.gather(1, draft_S[:, None]).squeeze(1) >= 2 / 5
    return one_draft(now, toy.p_KV, draft_S, q_SV, sure_S)


def colder_than_told(toy: laws.Toy, now: laws.Round) -> Tensor:
    q_SV = toy.q_KV[now.last_S]
    draft_S = inverse_cdf(q_SV**2, coin(now, 1, CoinRole.DRAFT))
    return one_draft(now, toy.p_KV, draft_S, q_SV, draft_S >= 0)


MISFITS = [(Rule.WITH_REPLACEMENT, Draws.DISTINCT), (Rule.WITHOUT_REPLACEMENT, Draws.SAMPLED)]
WITH_ON_WITHOUT, WITHOUT_ON_WITH = (laws.judged_round(rule, draws) for rule, draws in MISFITS)
WRONG: dict[str, laws.Step] = {
    "skip_sample_adjustment": laws.judged_round(
        Rule.CHAIN, Draws.SAMPLED, skip_sample_adjustment=True
    ),
    "nasd_resample": compared_and_drawn_again,
    "argmax_draft_softmax_q": best_under_a_soft_law,
    "drop_low_confidence_token": unsure_drafts_dropped,
    "with_rule_on_without_samples_k2": WITH_ON_WITHOUT,
    "without_rule_on_with_samples_k2": WITHOUT_ON_WITH,
    "temperature_mismatch": colder_than_told,
}
CONTROLS = {case["name"]: case["output"] for case in vectors("enumeration")["negative_controls"]}


def test_every_control_of_the_vectors_is_planted() -> None:
    assert WRONG.keys() == CONTROLS.keys()
    assert all(draws not in FITS[rule] for rule, draws in MISFITS)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_algorithm_fails(name: str) -> None:
    assert max(laws.p_values(WRONG[name], laws.reference_toy())[:2]) < ALPHA


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_algorithm_is_the_one_that_is_meant(name: str) -> None:
    law_V = torch.tensor([float(Fraction(one)) for one in CONTROLS[name]], dtype=torch.float64)
    first_S = laws.sample(WRONG[name], laws.reference_toy(), 1, laws.SAMPLES, 1)[:, 0]
    statistic, df = chi_square(torch.bincount(first_S, minlength=4).double(), laws.SAMPLES * law_V)
    assert p_value(statistic, df) >= ALPHA


# --- wrong keys ----------------------------------------------------------------------------------


def by_position_alone(
    key: Tensor, root: Tensor, depth: Tensor, rank: Tensor, role: CoinRole
) -> Tensor:
    return fold(key, root + depth)


def one_role(key: Tensor, root: Tensor, depth: Tensor, rank: Tensor, role: CoinRole) -> Tensor:
    return round_keys(key, root, depth, rank, CoinRole.DRAFT)


def one_r(key: Tensor, root: Tensor, depth: Tensor, rank: Tensor, role: CoinRole) -> Tensor:
    return round_keys(key, root, depth, rank * (role is not CoinRole.ACCEPT), role)


def no_round(key: Tensor, root: Tensor, depth: Tensor, rank: Tensor, role: CoinRole) -> Tensor:
    return round_keys(key, root * 0, depth, rank, role)


def no_branch(key: Tensor, root: Tensor, depth: Tensor, rank: Tensor, role: CoinRole) -> Tensor:
    first = torch.arange(len(key)) // helpers.laws.BRANCHES * helpers.laws.BRANCHES
    return round_keys(key[first], root, depth, rank, role)


TREES = ("tree with replacement", "tree without replacement", "top-k tree")
JUDGED = [name for name in laws.rounds() if name != "match"]
WRONG_KEYS: list[tuple[Callable[..., Tensor], Sequence[str]]] = [
    (by_position_alone, ("chain", "block", *TREES)),
    (one_role, TREES),  # a chain has one final coin a round, at a depth of its own
    (one_r, TREES),
    (no_round, JUDGED),
    (no_branch, ("chain", "block", *TREES)),
]


@pytest.mark.parametrize(
    "keys, name",
    [(keys, name) for keys, names in WRONG_KEYS for name in names],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_wrong_keys_fail(
    keys: Callable[..., Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (accept_rejection, drafting):
        monkeypatch.setattr(module, "round_keys", keys)
    toy = laws.leftover_toy() if keys is one_r else laws.reference_toy()
    assert (max if keys is one_r else min)(laws.p_values(laws.rounds()[name], toy)) < ALPHA


@pytest.mark.parametrize("rule, draws", [(rule, FITS[rule][0]) for rule in Rule])
def test_a_skipped_adjustment_fails_under_every_rule(rule: Rule, draws: Draws) -> None:
    step = laws.judged_round(rule, draws, skip_sample_adjustment=True)
    assert max(laws.p_values(step, laws.leftover_toy())) < ALPHA


def test_a_match_without_positions_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers.laws, "token_keys", lambda key_S, position_S: key_S)
    assert min(laws.p_values(laws.match_round, laws.reference_toy())) < ALPHA
