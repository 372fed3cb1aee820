"""Exact laws, by enumeration and held to vectors, and chi-square of real draws: the rules have
them, every planted wrong rule fails."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from helpers import law_outcomes, laws
from helpers.vanilla import vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.engine.certify.texts import ALPHA, chi_square, p_value
from specsot.ops.draft import proposals as drafting
from specsot.ops.sampling.coins import CoinRole, fold, round_keys, uniforms
from specsot.ops.sampling.settings import FITS, Draws, Rule
from specsot.ops.verify import rejection as accept_rejection
from specsot.ops.verify.rejection import Acceptance, accept_chain, inverse_cdf

ENUMERATION = vectors("enumeration")


@pytest.mark.parametrize("kind", law_outcomes.TOLERANCE, ids=str)
@pytest.mark.parametrize("name", law_outcomes.RULES)
def test_a_rule_emits_the_targets_law(name: str, kind: torch.dtype) -> None:
    toys = [laws.reference_toy(), laws.leftover_toy(), *laws.random_toys(60, 2026)]
    worst, strays = law_outcomes.law_error(law_outcomes.RULES[name], toys, kind)
    assert worst <= law_outcomes.TOLERANCE[kind] and strays == 0


def test_random_toys_have_every_size_and_zeros() -> None:
    toys = laws.random_toys(200, 1)
    assert {toy.size for toy in toys} == {2, 3, 4, 5}
    assert 40 <= sum(bool((toy.p_KV == 0).any() and (toy.q_KV == 0).any()) for toy in toys) <= 80


def unadjusted(p_STV: Tensor, q_SNV: Any, *others: Tensor) -> Acceptance:
    verdict = accept_chain(p_STV, q_SNV, *others)
    p_SV = p_STV[torch.arange(len(p_STV)), verdict.path_ST.sum(1) - 1]
    return replace(verdict, weights_SV=p_SV, bonus_S=inverse_cdf(p_SV, others[-1]))


def unscaled(p_STV: Tensor, q_SNV: Tensor, *others: Tensor) -> Acceptance:
    verdict = laws.accept_block(p_STV, q_SNV, *others)
    row_S, last_S = torch.arange(len(p_STV)), verdict.path_ST.sum(1) - 1
    q_SV = q_SNV[row_S, last_S.clamp(max=q_SNV.shape[1] - 1)]
    left_SV = (p_STV[row_S, last_S] - q_SV).clamp(min=0)
    left_SV = left_SV / left_SV.sum(-1, keepdim=True)
    whole_S1 = (last_S == others[1].sum(1))[:, None]
    return replace(verdict, weights_SV=verdict.weights_SV.where(whole_S1, left_SV))


WRONG = {
    "unadjusted": law_outcomes.of_chains(unadjusted, laws.Choice.WITH),
    "a block's final token from a chain's rest": law_outcomes.of_chains(unscaled, laws.Choice.WITH),
    "argmax under a soft law": law_outcomes.of_chains(accept_chain, laws.Choice.TOP),
    "with-rule on draws without": law_outcomes.of_trees(Rule.WITH_REPLACEMENT, laws.Choice.WITHOUT),
    "without-rule on draws with": law_outcomes.of_trees(Rule.WITHOUT_REPLACEMENT, laws.Choice.WITH),
}


@pytest.mark.parametrize(
    "toy", [laws.reference_toy(), laws.leftover_toy()], ids=["reversed", "leftover"]
)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_has_another_law(name: str, toy: laws.Toy) -> None:
    worst, strays = law_outcomes.law_error(WRONG[name], [toy], torch.float64)
    assert worst > 1e-4 and strays == 0


def test_a_decision_that_is_not_made_at_its_probability_is_seen() -> None:
    def rule(toy: laws.Toy, length: int) -> law_outcomes.Outcomes:
        def accept(every: laws.Drafts, coin_SN: Tensor) -> Acceptance:
            before_ST = every.before()
            p_STV, q_SNV = toy.p_KV[before_ST], toy.q_KV[before_ST[:, :-1]]
            drawn = (every.tokens_SN, every.valid_SN, coin_SN**1.01, torch.zeros(len(coin_SN)))
            return accept_chain(p_STV, q_SNV, *drawn)

        return law_outcomes.outcomes(
            accept, laws.draft_lists(toy, (-1, 0, 1), laws.Choice.WITH, length)
        )

    assert law_outcomes.law_error(rule, [laws.reference_toy()], torch.float64)[1] > 0


SIZE = 4
TOY = laws.reference_toy()
CHOICES = {"with": laws.Choice.WITH, "without": laws.Choice.WITHOUT, "top": laws.Choice.TOP}


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-12)


def fractions(numbers: list[str]) -> Tensor:
    return torch.tensor([float(Fraction(n)) for n in numbers], dtype=torch.float64)


def lossless(found: law_outcomes.Outcomes, toy: laws.Toy) -> bool:
    wanted = laws.joint(toy.p_KV, found.path_ST.shape[1])
    return found.strays == 0 and same(found.joint(toy.p_KV), wanted)


CHAINS = {"standard": accept_chain, "block": laws.accept_block}


def of_chain(rule: str, toy: laws.Toy, gamma: int) -> law_outcomes.Outcomes:
    drafts = laws.draft_lists(toy, tuple(range(-1, gamma - 1)), laws.Choice.WITH)
    return law_outcomes.chain_outcomes(CHAINS[rule], toy, drafts)


@pytest.mark.parametrize("case", ENUMERATION["chain"], ids=lambda c: f"{c['rule']}-{c['gamma']}")
def test_a_chain_emits_the_targets_law(case: Any) -> None:
    found = of_chain(case["rule"], TOY, case["gamma"])
    assert same(found.lengths(), fractions(case["p_accepted"]))
    assert lossless(found, TOY)


@st.composite
def drawn_laws(draw: st.DrawFn) -> Tensor:
    """float64 [5, 4]: rows of small weights, zeros among them."""
    rows = st.lists(st.integers(0, 6), min_size=SIZE, max_size=SIZE).filter(any)
    table = torch.tensor([draw(rows) for _ in range(SIZE + 1)], dtype=torch.float64)
    return table / table.sum(1, keepdim=True)


@settings(max_examples=60, deadline=None)
@given(drawn_laws(), drawn_laws(), st.integers(1, 3))
def test_blocks_accept_at_least_as_much_as_chains(p_KV: Tensor, q_KV: Tensor, gamma: int) -> None:
    counts_T = torch.arange(gamma + 1, dtype=torch.float64)
    chain, block = (
        of_chain(rule, laws.Toy(p_KV, q_KV), gamma).lengths() @ counts_T for rule in CHAINS
    )
    assert chain <= block + 1e-12


SAMPLED = (Rule.WITH_REPLACEMENT, Rule.WITHOUT_REPLACEMENT)
NODES = [c for c in ENUMERATION["node"] if c["rule"] in (*SAMPLED, Rule.TOPK, "target_match")]
TREES = [c for c in ENUMERATION["tree"] if c["rule"] in (*SAMPLED, Rule.TOPK)]


@pytest.mark.parametrize("case", NODES, ids=lambda c: f"{c['rule']}-{c['candidates']}-{c['k']}")
def test_a_node_emits_the_targets_law(case: Any) -> None:
    drafts = laws.draft_lists(TOY, (-1,) * case["k"], CHOICES[case["candidates"]])
    if case["rule"] == "target_match":
        found = law_outcomes.match_outcomes(TOY, drafts)
    else:
        found = law_outcomes.tree_outcomes(Rule(case["rule"]), TOY, drafts)
    assert 1 - found.lengths()[0].item() == pytest.approx(case["acceptance"]["value"], abs=1e-12)
    assert lossless(found, TOY)


@pytest.mark.parametrize("case", TREES, ids=lambda c: c["rule"])
def test_a_tree_of_two_levels_emits_the_targets_law(case: Any) -> None:
    drafts = laws.draft_lists(TOY, (-1, -1, 0, 0, 1, 1), CHOICES[case["candidates"]])
    found = law_outcomes.tree_outcomes(Rule(case["rule"]), TOY, drafts)
    assert same(found.lengths()[:3], fractions(case["p_depth"]))
    assert lossless(found, TOY)


# -- chi-square of real draws: rules pass, planted faults fail ------------------------------------


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
WRONG_DRAWS: dict[str, laws.Step] = {
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
    assert WRONG_DRAWS.keys() == CONTROLS.keys()
    assert all(draws not in FITS[rule] for rule, draws in MISFITS)


@pytest.mark.parametrize("name", WRONG_DRAWS)
def test_a_wrong_algorithm_fails(name: str) -> None:
    assert max(laws.p_values(WRONG_DRAWS[name], laws.reference_toy())[:2]) < ALPHA


@pytest.mark.parametrize("name", WRONG_DRAWS)
def test_a_wrong_algorithm_is_the_one_that_is_meant(name: str) -> None:
    law_V = torch.tensor([float(Fraction(one)) for one in CONTROLS[name]], dtype=torch.float64)
    first_S = laws.sample(WRONG_DRAWS[name], laws.reference_toy(), 1, laws.SAMPLES, 1)[:, 0]
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
    first = torch.arange(len(key)) // laws.BRANCHES * laws.BRANCHES
    return round_keys(key[first], root, depth, rank, role)


TREE_RULES = ("tree with replacement", "tree without replacement", "top-k tree")
JUDGED = [name for name in laws.rounds() if name != "match"]
WRONG_KEYS: list[tuple[Callable[..., Tensor], Sequence[str]]] = [
    (by_position_alone, ("chain", "block", *TREE_RULES)),
    (one_role, TREE_RULES),  # a chain has one final coin a round, at a depth of its own
    (one_r, TREE_RULES),
    (no_round, JUDGED),
    (no_branch, ("chain", "block", *TREE_RULES)),
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
    monkeypatch.setattr(laws, "token_keys", lambda key_S, position_S: key_S)
    assert min(laws.p_values(laws.match_round, laws.reference_toy())) < ALPHA
