"""Chi-square of real draws: the rules pass, and every planted wrong algorithm fails."""

from dataclasses import replace
from fractions import Fraction

import helpers.laws
import pytest
import torch
from helpers.laws import (
    SAMPLES,
    TOYS,
    Choice,
    Keys,
    Round,
    Step,
    Toy,
    chain_round,
    emitted,
    judged_round,
    judged_rounds,
    leftover_toy,
    match_round,
    p_values,
    reference_toy,
    rounds,
    sample,
    tree_round,
)
from helpers.vanilla import vectors
from torch import Tensor

from specsot.engine.certify.texts import ALPHA, chi_square, p_value
from specsot.ops.draft import proposals as drafting
from specsot.ops.sampling.coins import CoinRole, fold, round_keys
from specsot.ops.sampling.settings import FITS, Draws, Rule
from specsot.ops.verify import rejection as accept_rejection
from specsot.ops.verify.rejection import Acceptance, accept_chain, inverse_cdf

TWO = (-1, -1)


def test_false_alarms_are_as_rare_as_they_should_be() -> None:
    """Twenty seeds: the statistic is above its median in half of them, never above critical."""
    toy, high = reference_toy(), 0
    for seed in range(0, 200_000, 10_000):
        found = p_values(rounds()["chain"], toy, samples=2000, seed=seed)
        assert min(found) >= ALPHA
        high += sum(p < 0.5 for p in found)
    assert 15 <= high <= 45  # of 60


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("name", rounds() | judged_rounds())
def test_a_way_of_accepting_has_the_targets_law(name: str, toy: str) -> None:
    assert min(p_values((rounds() | judged_rounds())[name], TOYS[toy])) >= ALPHA


def test_samples_go_on_over_several_rounds() -> None:
    seen: list[Round] = []

    def two_at_a_time(toy: Toy, now: Round) -> Tensor:
        seen.append(now)
        return torch.tensor([[len(seen), 9, -1], [len(seen), -1, -1]])

    said_SC = sample(two_at_a_time, reference_toy(), 3, 2, 0)
    assert said_SC.tolist() == [[1, 9, 2], [1, 2, 3]]
    assert [now.root_S.tolist() for now in seen] == [[7, 7], [9, 8], [11, 9]]
    assert [now.last_S.tolist() for now in seen] == [[-1, -1], [9, 1], [9, 2]]
    assert all(len(now.key_S.unique()) == 2 for now in seen)


# --- wrong algorithms: those of the vectors have exactly the law that is written there -----------


def unadjusted(p_STV: Tensor, q_SNV: Tensor | None, *others: Tensor) -> Acceptance:
    tokens_SN, valid_SN, r_SN, u_S = others
    verdict = accept_chain(p_STV, q_SNV, tokens_SN, valid_SN, r_SN, u_S)
    p_SV = p_STV[torch.arange(len(p_STV)), verdict.path_ST.sum(1) - 1]
    return replace(verdict, bonus_S=inverse_cdf(p_SV, u_S))


def compared_and_drawn_again(toy: Toy, now: Round) -> Tensor:
    p_SV, draft_S = toy.p_KV[now.last_S], toy.q_KV[now.last_S].argmax(1)
    first_S = inverse_cdf(p_SV, now.coin(1, 0, CoinRole.ACCEPT))
    again_S = inverse_cdf(p_SV, now.coin(0, 0, CoinRole.FINAL))
    return torch.where(first_S == draft_S, draft_S, again_S)[:, None]


def one_draft(now: Round, p_KV: Tensor, draft_S: Tensor, told_SV: Tensor, kept_S: Tensor) -> Tensor:
    verdict = accept_chain(
        p_KV[torch.stack([now.last_S, draft_S], 1)],
        told_SV[:, None],
        draft_S[:, None],
        kept_S[:, None],
        now.coin(1, 0, CoinRole.ACCEPT)[:, None],
        now.coin(0, 0, CoinRole.FINAL),
    )
    return emitted(verdict.path_ST, draft_S[:, None], verdict.bonus_S)


def best_under_a_soft_law(toy: Toy, now: Round) -> Tensor:
    q_SV = toy.q_KV[now.last_S]
    draft_S = q_SV.argmax(1)
    return one_draft(now, toy.p_KV, draft_S, q_SV, draft_S >= 0)


def unsure_drafts_dropped(toy: Toy, now: Round) -> Tensor:
    q_SV = toy.q_KV[now.last_S]
    draft_S = inverse_cdf(q_SV, now.coin(1, 0, CoinRole.DRAFT))
    sure_S = q_SV.gather(1, draft_S[:, None]).squeeze(1) >= 2 / 5
    return one_draft(now, toy.p_KV, draft_S, q_SV, sure_S)


def colder_than_told(toy: Toy, now: Round) -> Tensor:
    q_SV = toy.q_KV[now.last_S]
    draft_S = inverse_cdf(q_SV**2, now.coin(1, 0, CoinRole.DRAFT))
    return one_draft(now, toy.p_KV, draft_S, q_SV, draft_S >= 0)


WRONG: dict[str, Step] = {
    "skip_sample_adjustment": chain_round(unadjusted),
    "nasd_resample": compared_and_drawn_again,
    "argmax_draft_softmax_q": best_under_a_soft_law,
    "drop_low_confidence_token": unsure_drafts_dropped,
    "with_rule_on_without_samples_k2": tree_round(Rule.WITH_REPLACEMENT, Choice.WITHOUT, TWO),
    "without_rule_on_with_samples_k2": tree_round(Rule.WITHOUT_REPLACEMENT, Choice.WITH, TWO),
    "temperature_mismatch": colder_than_told,
}
CONTROLS = {case["name"]: case["output"] for case in vectors("enumeration")["negative_controls"]}


def test_every_control_of_the_vectors_is_planted() -> None:
    assert WRONG.keys() == CONTROLS.keys()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_algorithm_fails(name: str) -> None:
    assert max(p_values(WRONG[name], reference_toy())[:2]) < ALPHA


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_algorithm_is_the_one_that_is_meant(name: str) -> None:
    law_V = torch.tensor([float(Fraction(one)) for one in CONTROLS[name]], dtype=torch.float64)
    first_S = sample(WRONG[name], reference_toy(), 1, SAMPLES, 1)[:, 0]
    statistic, df = chi_square(torch.bincount(first_S, minlength=4).double(), SAMPLES * law_V)
    assert p_value(statistic, df) >= ALPHA


# --- wrong keys ----------------------------------------------------------------------------------


def by_position(key: Tensor, root: Tensor, depth: Tensor, rank: Tensor, role: CoinRole) -> Tensor:
    """A token's own position instead of its round: a discarded draft's coins come back."""
    return fold(fold(fold(key, root + depth), rank), torch.full_like(key, int(role)))


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
SAMPLED = ("chain", "block", *TREES[:2])
WRONG_KEYS: list[tuple[Keys, tuple[str, ...]]] = [
    (by_position, ("block",)),  # a chain's decisions never look at what they discard
    (by_position_alone, ("chain", "block", *TREES)),
    (one_role, ("chain", "block", *TREES, "target match")),
    (one_r, TREES),
    (no_round, ("chain", "block", *TREES, "target match")),
    (no_branch, ("chain", "block", *TREES, "target match")),
]


@pytest.mark.parametrize(
    "keys, name",
    [(keys, name) for keys, names in WRONG_KEYS for name in names],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_wrong_keys_fail(keys: Keys, name: str) -> None:
    toy = leftover_toy() if keys is one_r else reference_toy()
    found = p_values(rounds()[name], toy, keys=keys)
    assert (max if keys is one_r else min)(found) < ALPHA


# --- the same through the ops of a run -----------------------------------------------------------


@pytest.mark.parametrize(
    "rule, draws",
    [(Rule.WITH_REPLACEMENT, Draws.DISTINCT), (Rule.WITHOUT_REPLACEMENT, Draws.SAMPLED)],
)
def test_draws_that_a_rule_is_not_exact_for_fail(rule: Rule, draws: Draws) -> None:
    assert draws not in FITS[rule]
    assert max(p_values(judged_round(rule, draws), reference_toy())[:2]) < ALPHA


@pytest.mark.parametrize("rule, draws", [(rule, FITS[rule][0]) for rule in Rule])
def test_a_skipped_adjustment_fails_under_every_rule(rule: Rule, draws: Draws) -> None:
    step = judged_round(rule, draws, skip_sample_adjustment=True)
    assert max(p_values(step, leftover_toy())) < ALPHA


@pytest.mark.parametrize("name", [f"{tree}, as run" for tree in TREES])
def test_one_r_for_all_siblings_fails_as_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_rejection, "round_keys", one_r)
    assert max(p_values(judged_rounds()[name], leftover_toy())) < ALPHA


@pytest.mark.parametrize("name", judged_rounds())
def test_coins_of_another_round_fail_as_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (accept_rejection, drafting):
        monkeypatch.setattr(module, "round_keys", no_round)
    assert min(p_values(judged_rounds()[name], reference_toy())) < ALPHA


def test_a_match_without_positions_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers.laws, "token_keys", lambda key_S, position_S: key_S)
    assert min(p_values(match_round, reference_toy())) < ALPHA
