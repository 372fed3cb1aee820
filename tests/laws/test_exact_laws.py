"""Exact laws: the rules have them, wrong rules do not."""

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from helpers.law_outcomes import (
    RULES,
    TOLERANCE,
    TREE,
    Outcomes,
    law_error,
    of_chains,
    of_trees,
    outcomes,
)
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
from torch import Tensor

from specsot.ops.sampling.settings import Rule
from specsot.ops.verify.rejection import Acceptance, accept_chain, inverse_cdf

ENUMERATION = vectors("enumeration")


@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_emits_the_targets_law(name: str, kind: torch.dtype) -> None:
    error = law_error(RULES[name], [reference_toy(), leftover_toy(), *random_toys(200, 2026)], kind)
    assert error.worst <= TOLERANCE[kind] and error.strays == 0


def test_the_reference_toy_is_that_of_the_vectors() -> None:
    toy = reference_toy()
    for found_KV, name in ((toy.p_KV, "target"), (toy.q_KV, "draft")):
        table = ENUMERATION["model"][name]
        wanted = [[float(Fraction(x)) for x in table[str(key)]] for key in (0, 1, 2, 3, -1)]
        assert torch.allclose(found_KV, torch.tensor(wanted).double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("toy", [reference_toy(), leftover_toy(), *random_toys(40, 1)])
def test_toys_are_laws(toy: Toy) -> None:
    for law_KV in (toy.p_KV, toy.q_KV):
        assert law_KV.shape == (toy.size + 1, toy.size) and (law_KV >= 0).all()
        assert torch.allclose(law_KV.sum(1), torch.ones(toy.size + 1).double())


def test_random_toys_have_every_size_and_zeros() -> None:
    toys = random_toys(200, 1)
    assert {toy.size for toy in toys} == {2, 3, 4, 5}
    assert 40 <= sum(bool((toy.p_KV == 0).any() and (toy.q_KV == 0).any()) for toy in toys) <= 80


def test_a_joint_law_is_the_product_along_the_text() -> None:
    toy = reference_toy()
    for place, (a, b, c) in enumerate(product(range(4), repeat=3)):
        wanted = toy.p_KV[-1, a] * toy.p_KV[a, b] * toy.p_KV[b, c]
        assert joint(toy.p_KV, 3)[place].item() == pytest.approx(wanted.item())


def test_where_the_drafter_has_nothing_more_no_node_is_valid() -> None:
    sure_KV = torch.eye(3).double()[[1, 2, 0, 1]]
    drafts = draft_lists(Toy(sure_KV, sure_KV), TREE, Choice.WITHOUT)
    assert drafts.tokens_SN[:, [0, 2]].tolist() == [[1, 2]]
    assert drafts.valid_SN.tolist() == [[True, False, True, False]]
    assert drafts.chance_S.tolist() == [1.0]


# --- wrong rules ---------------------------------------------------------------------------------


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
    "unadjusted": of_chains(unadjusted, Choice.WITH),
    "a block's final token from a chain's rest": of_chains(unscaled, Choice.WITH),
    "argmax under a soft law": of_chains(accept_chain, Choice.TOP),
    "with-rule on draws without": of_trees(Rule.WITH_REPLACEMENT, Choice.WITHOUT),
    "without-rule on draws with": of_trees(Rule.WITHOUT_REPLACEMENT, Choice.WITH),
}


@pytest.mark.parametrize("toy", [reference_toy(), leftover_toy()], ids=["reversed", "leftover"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_has_another_law(name: str, toy: Toy) -> None:
    error = law_error(WRONG[name], [toy], torch.float64)
    assert error.worst > 1e-4 and error.strays == 0


def test_a_decision_that_is_not_made_at_its_probability_is_seen() -> None:
    def rule(toy: Toy, length: int) -> Outcomes:
        def accept(every: Drafts, coin_SN: Tensor) -> Acceptance:
            before_ST = every.before()
            p_STV, q_SNV = toy.p_KV[before_ST], toy.q_KV[before_ST[:, :-1]]
            drawn = (every.tokens_SN, every.valid_SN, coin_SN**1.01, torch.zeros(len(coin_SN)))
            return accept_chain(p_STV, q_SNV, *drawn)

        return outcomes(accept, draft_lists(toy, (-1, 0, 1), Choice.WITH, length))

    assert law_error(rule, [reference_toy()], torch.float64).strays > 0
