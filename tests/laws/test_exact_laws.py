"""Exact laws, by enumeration and held to vectors: the rules have them, wrong rules do not."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from helpers import law_outcomes
from helpers.laws import (
    Choice,
    Drafts,
    Toy,
    accept_block,
    draft_lists,
    joint,
    leftover_toy,
    random_toys,
    reference_toy,
)
from helpers.vanilla import vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.ops.sampling.settings import Rule
from specsot.ops.verify.rejection import Acceptance, accept_chain, inverse_cdf

ENUMERATION = vectors("enumeration")


@pytest.mark.parametrize("kind", law_outcomes.TOLERANCE, ids=str)
@pytest.mark.parametrize("name", law_outcomes.RULES)
def test_a_rule_emits_the_targets_law(name: str, kind: torch.dtype) -> None:
    toys = [reference_toy(), leftover_toy(), *random_toys(60, 2026)]
    worst, strays = law_outcomes.law_error(law_outcomes.RULES[name], toys, kind)
    assert worst <= law_outcomes.TOLERANCE[kind] and strays == 0


def test_random_toys_have_every_size_and_zeros() -> None:
    toys = random_toys(200, 1)
    assert {toy.size for toy in toys} == {2, 3, 4, 5}
    assert 40 <= sum(bool((toy.p_KV == 0).any() and (toy.q_KV == 0).any()) for toy in toys) <= 80


def unadjusted(p_STV: Tensor, q_SNV: Any, *others: Tensor) -> Acceptance:
    verdict = accept_chain(p_STV, q_SNV, *others)
    p_SV = p_STV[torch.arange(len(p_STV)), verdict.path_ST.sum(1) - 1]
    return replace(verdict, weights_SV=p_SV, bonus_S=inverse_cdf(p_SV, others[-1]))


def unscaled(p_STV: Tensor, q_SNV: Tensor, *others: Tensor) -> Acceptance:
    verdict = accept_block(p_STV, q_SNV, *others)
    row_S, last_S = torch.arange(len(p_STV)), verdict.path_ST.sum(1) - 1
    q_SV = q_SNV[row_S, last_S.clamp(max=q_SNV.shape[1] - 1)]
    left_SV = (p_STV[row_S, last_S] - q_SV).clamp(min=0)
    left_SV = left_SV / left_SV.sum(-1, keepdim=True)
    whole_S1 = (last_S == others[1].sum(1))[:, None]
    return replace(verdict, weights_SV=verdict.weights_SV.where(whole_S1, left_SV))


WRONG = {
    "unadjusted": law_outcomes.of_chains(unadjusted, Choice.WITH),
    "a block's final token from a chain's rest": law_outcomes.of_chains(unscaled, Choice.WITH),
    "argmax under a soft law": law_outcomes.of_chains(accept_chain, Choice.TOP),
    "with-rule on draws without": law_outcomes.of_trees(Rule.WITH_REPLACEMENT, Choice.WITHOUT),
    "without-rule on draws with": law_outcomes.of_trees(Rule.WITHOUT_REPLACEMENT, Choice.WITH),
}


@pytest.mark.parametrize("toy", [reference_toy(), leftover_toy()], ids=["reversed", "leftover"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_has_another_law(name: str, toy: Toy) -> None:
    worst, strays = law_outcomes.law_error(WRONG[name], [toy], torch.float64)
    assert worst > 1e-4 and strays == 0


def test_a_decision_that_is_not_made_at_its_probability_is_seen() -> None:
    def rule(toy: Toy, length: int) -> law_outcomes.Outcomes:
        def accept(every: Drafts, coin_SN: Tensor) -> Acceptance:
            before_ST = every.before()
            p_STV, q_SNV = toy.p_KV[before_ST], toy.q_KV[before_ST[:, :-1]]
            drawn = (every.tokens_SN, every.valid_SN, coin_SN**1.01, torch.zeros(len(coin_SN)))
            return accept_chain(p_STV, q_SNV, *drawn)

        return law_outcomes.outcomes(accept, draft_lists(toy, (-1, 0, 1), Choice.WITH, length))

    assert law_outcomes.law_error(rule, [reference_toy()], torch.float64)[1] > 0


SIZE = 4
TOY = reference_toy()
CHOICES = {"with": Choice.WITH, "without": Choice.WITHOUT, "top": Choice.TOP}


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-12)


def fractions(numbers: list[str]) -> Tensor:
    return torch.tensor([float(Fraction(n)) for n in numbers], dtype=torch.float64)


def lossless(found: law_outcomes.Outcomes, toy: Toy) -> bool:
    wanted = joint(toy.p_KV, found.path_ST.shape[1])
    return found.strays == 0 and same(found.joint(toy.p_KV), wanted)


CHAINS = {"standard": accept_chain, "block": accept_block}


def of_chain(rule: str, toy: Toy, gamma: int) -> law_outcomes.Outcomes:
    drafts = draft_lists(toy, tuple(range(-1, gamma - 1)), Choice.WITH)
    return law_outcomes.chain_outcomes(CHAINS[rule], toy, drafts)


@pytest.mark.parametrize("case", ENUMERATION["chain"], ids=lambda c: f"{c['rule']}-{c['gamma']}")
def test_a_chain_emits_the_targets_law(case: Any) -> None:
    found = of_chain(case["rule"], TOY, case["gamma"])
    assert same(found.lengths(), fractions(case["p_accepted"]))
    assert lossless(found, TOY)


@st.composite
def laws(draw: st.DrawFn) -> Tensor:
    """float64 [5, 4]: rows of small weights, zeros among them."""
    rows = st.lists(st.integers(0, 6), min_size=SIZE, max_size=SIZE).filter(any)
    table = torch.tensor([draw(rows) for _ in range(SIZE + 1)], dtype=torch.float64)
    return table / table.sum(1, keepdim=True)


@settings(max_examples=60, deadline=None)
@given(laws(), laws(), st.integers(1, 3))
def test_blocks_accept_at_least_as_much_as_chains(p_KV: Tensor, q_KV: Tensor, gamma: int) -> None:
    counts_T = torch.arange(gamma + 1, dtype=torch.float64)
    chain, block = (of_chain(rule, Toy(p_KV, q_KV), gamma).lengths() @ counts_T for rule in CHAINS)
    assert chain <= block + 1e-12


SAMPLED = (Rule.WITH_REPLACEMENT, Rule.WITHOUT_REPLACEMENT)
NODES = [c for c in ENUMERATION["node"] if c["rule"] in (*SAMPLED, Rule.TOPK)]
TREES = [c for c in ENUMERATION["tree"] if c["rule"] in (*SAMPLED, Rule.TOPK)]
MATCHES = [c for c in ENUMERATION["node"] if c["rule"] == "target_match"]


@pytest.mark.parametrize("case", NODES, ids=lambda c: f"{c['rule']}-{c['candidates']}-{c['k']}")
def test_a_node_emits_the_targets_law(case: Any) -> None:
    drafts = draft_lists(TOY, (-1,) * case["k"], CHOICES[case["candidates"]])
    found = law_outcomes.tree_outcomes(Rule(case["rule"]), TOY, drafts)
    assert 1 - found.lengths()[0].item() == pytest.approx(case["acceptance"]["value"], abs=1e-12)
    assert lossless(found, TOY)


@pytest.mark.parametrize("case", TREES, ids=lambda c: c["rule"])
def test_a_tree_of_two_levels_emits_the_targets_law(case: Any) -> None:
    drafts = draft_lists(TOY, (-1, -1, 0, 0, 1, 1), CHOICES[case["candidates"]])
    found = law_outcomes.tree_outcomes(Rule(case["rule"]), TOY, drafts)
    assert same(found.lengths()[:3], fractions(case["p_depth"]))
    assert lossless(found, TOY)


@pytest.mark.parametrize("case", MATCHES, ids=lambda c: f"{c['candidates']}-{c['k']}")
def test_target_match_emits_what_the_target_draws(case: Any) -> None:
    drafts = draft_lists(TOY, (-1,) * case["k"], CHOICES[case["candidates"]])
    found = law_outcomes.match_outcomes(TOY, drafts)
    assert 1 - found.lengths()[0].item() == pytest.approx(case["acceptance"]["value"])
    assert lossless(found, TOY)
