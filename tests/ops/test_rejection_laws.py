"""Rejection sampling is exact: laws by enumeration, with no random number in sight.

Forcing each node's coin to 0 or 1 makes it accepted or rejected, and the verdict says with what
probability each would have happened; so the sum over all drafts and all patterns of coins is the
law of what is emitted.
"""

from fractions import Fraction
from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vectors import vectors

from specsot.ops.rejection import TreeRule, Verdict, accept_block, accept_chain, accept_tree

SIZE = 4
ENUMERATION = vectors("enumeration")
SAMPLED = (TreeRule.WITH_REPLACEMENT, TreeRule.WITHOUT_REPLACEMENT)


def law(name: str) -> Tensor:
    """float64 [5, 4] of the Markov model: row -1 (the last one) stands right after the prompt."""
    table = ENUMERATION["model"][name]
    rows = [[float(Fraction(x)) for x in table[str(key)]] for key in (0, 1, 2, 3, -1)]
    return torch.tensor(rows, dtype=torch.float64)


TARGET, DRAFT = law("target"), law("draft")


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-12)


def fractions(numbers: list[str]) -> Tensor:
    return torch.tensor([float(Fraction(n)) for n in numbers], dtype=torch.float64)


def with_coins(drafts: Tensor, weight_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every draft under every pattern of coins: 0 accepts, 1 rejects."""
    nodes = drafts.shape[1]
    coins = torch.tensor(list(product((0.0, 1.0), repeat=nodes)), dtype=torch.float64)
    tokens_SN = drafts.repeat_interleave(len(coins), 0)
    return tokens_SN, weight_S.repeat_interleave(len(coins)), coins.repeat(len(drafts), 1)


def happens(verdict: Verdict, coin_SN: Tensor) -> Tensor:
    """Probability of each pattern of coins; nodes that were never tried have either one."""
    chance_SN = torch.where(coin_SN == 0, verdict.chance_SN, 1 - verdict.chance_SN)
    return chance_SN.where(~verdict.chance_SN.isnan(), 0.5).prod(1)


def emitted(path_SN: Tensor, tokens_SN: Tensor) -> Tensor:
    """int64 [S, N]: accepted tokens in front, -1 behind them."""
    order = (~path_SN).int().sort(dim=1, stable=True).indices
    return tokens_SN.where(path_SN, -1).gather(1, order)


def first_two(verdict: Verdict, tokens_SN: Tensor, weight_S: Tensor, p_KV: Tensor) -> Tensor:
    """[V, V]: law of the first two tokens; the target goes on where a round emits only one."""
    sure = emitted(verdict.path_ST[:, 1:], tokens_SN)
    sure = torch.cat([sure, torch.full_like(sure[:, :1], -1)], 1)
    law_VV = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    none_S, one_S = sure[:, 0] < 0, (sure[:, 0] >= 0) & (sure[:, 1] < 0)
    law_VV += (weight_S[none_S] @ verdict.weights_SV[none_S])[:, None] * p_KV[:SIZE]
    law_VV.index_add_(0, sure[one_S, 0], weight_S[one_S, None] * verdict.weights_SV[one_S])
    more = sure[~none_S & ~one_S]
    weights = weight_S[~none_S & ~one_S]
    return law_VV.index_put((more[:, 0], more[:, 1]), weights, accumulate=True)


# --- chains --------------------------------------------------------------------------------------


def chain_laws(
    rule: Any, p_KV: Tensor, q_KV: Tensor | None, drafts: Tensor, weight_S: Tensor
) -> tuple[Tensor, Tensor]:
    """(law of the accepted count, law of the first two tokens)."""
    tokens_SN, weight_S, coin_SN = with_coins(drafts, weight_S)
    before_ST = torch.cat([torch.full_like(tokens_SN[:, :1], -1), tokens_SN], 1)
    q_SNV = None if q_KV is None else q_KV[before_ST[:, :-1]]
    valid_SN = torch.ones_like(tokens_SN, dtype=torch.bool)
    zero_S = torch.zeros(len(tokens_SN))
    verdict = rule(p_KV[before_ST], q_SNV, tokens_SN, valid_SN, coin_SN, zero_S)
    weight_S = weight_S * happens(verdict, coin_SN)
    count = torch.zeros(drafts.shape[1] + 1, dtype=torch.float64)
    count.index_add_(0, verdict.path_ST.sum(1) - 1, weight_S)
    return count, first_two(verdict, tokens_SN, weight_S, p_KV)


def drawn_chains(q_KV: Tensor, gamma: int) -> tuple[Tensor, Tensor]:
    """Every chain of drafts, and how likely the drafter is to draw it."""
    drafts = torch.tensor(list(product(range(SIZE), repeat=gamma)))
    before = torch.cat([torch.full_like(drafts[:, :1], -1), drafts[:, :-1]], 1)
    return drafts, q_KV[before, drafts].prod(1)


RULES = {"standard": accept_chain, "block": accept_block}
GOAL = TARGET[-1][:, None] * TARGET[:SIZE]


@pytest.mark.parametrize("case", ENUMERATION["chain"], ids=lambda c: f"{c['rule']}-{c['gamma']}")
def test_a_chain_emits_the_targets_law(case: Any) -> None:
    drafts, weight_S = drawn_chains(DRAFT, case["gamma"])
    count, law_VV = chain_laws(RULES[case["rule"]], TARGET, DRAFT, drafts, weight_S)
    assert same(count, fractions(case["p_accepted"]))
    assert same(law_VV, GOAL)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("draft", [(3, 0, 2), (0, 2, 1), (1, 1, 1)])
def test_drafts_that_were_not_drawn_leave_the_targets_law(
    rule: Any, draft: tuple[int, ...]
) -> None:
    one = torch.ones(1, dtype=torch.float64)
    _, law_VV = chain_laws(rule, TARGET, None, torch.tensor([draft]), one)
    assert same(law_VV, GOAL)


@st.composite
def laws(draw: st.DrawFn) -> Tensor:
    """float64 [5, 4]: rows of small weights, zeros among them."""
    rows = st.lists(st.integers(0, 6), min_size=SIZE, max_size=SIZE).filter(any)
    table = torch.tensor([draw(rows) for _ in range(SIZE + 1)], dtype=torch.float64)
    return table / table.sum(1, keepdim=True)


@settings(max_examples=100, deadline=None)
@given(laws(), laws(), st.sampled_from(list(RULES)), st.integers(1, 3))
def test_any_chain_emits_the_targets_law(p_KV: Tensor, q_KV: Tensor, rule: str, gamma: int) -> None:
    drafts, weight_S = drawn_chains(q_KV, gamma)
    _, law_VV = chain_laws(RULES[rule], p_KV, q_KV, drafts, weight_S)
    assert same(law_VV, p_KV[-1][:, None] * p_KV[:SIZE])


@settings(max_examples=60, deadline=None)
@given(laws(), laws(), st.integers(1, 3))
def test_blocks_accept_at_least_as_much_as_chains(p_KV: Tensor, q_KV: Tensor, gamma: int) -> None:
    drafts, weight_S = drawn_chains(q_KV, gamma)
    means = [
        chain_laws(rule, p_KV, q_KV, drafts, weight_S)[0] @ torch.arange(gamma + 1.0).double()
        for rule in (accept_chain, accept_block)
    ]
    assert means[0] <= means[1] + 1e-12


@settings(max_examples=60, deadline=None)
@given(laws(), laws(), st.floats(0, 1, exclude_max=True), st.integers(0, SIZE - 1))
def test_a_draft_is_accepted_exactly_below_its_chance(
    p_KV: Tensor, q_KV: Tensor, r: float, token: int
) -> None:
    """The probabilities that the laws are weighed with are those of the decisions."""
    verdict = accept_chain(
        p_KV[None, :2],
        q_KV[None, :1],
        torch.tensor([[token]]),
        torch.tensor([[True]]),
        torch.tensor([[r]], dtype=torch.float64),
        torch.zeros(1),
    )
    chance = verdict.chance_SN.item()
    if abs(r - chance) > 1e-12:
        assert verdict.path_ST[0, 1].item() == (r < chance)


# --- nodes and trees -----------------------------------------------------------------------------


def candidates(q_V: Tensor, kind: str, k: int) -> tuple[Tensor, Tensor]:
    """Every list of k candidates under a way of choosing them, and its probability."""
    if kind == "top":
        return q_V.sort(descending=True, stable=True).indices[None, :k], torch.ones(1).double()
    lists = list(product(range(SIZE), repeat=k) if kind == "with" else permutations(range(SIZE), k))
    weights = []
    for one in lists:
        weight, mass = 1.0, 1.0
        for token in one:
            weight *= float(q_V[token]) / mass
            mass -= float(q_V[token]) if kind == "without" else 0.0
        weights.append(weight)
    return torch.tensor(lists), torch.tensor(weights, dtype=torch.float64)


def tree_laws(
    rule: TreeRule, parents: tuple[int, ...], drafts: Tensor, weight_S: Tensor, q_KV: Tensor
) -> tuple[Tensor, Tensor]:
    """(law of the accepted depth, law of the first two tokens)."""
    tokens_SN, weight_S, coin_SN = with_coins(drafts, weight_S)
    before_ST = torch.cat([torch.full_like(tokens_SN[:, :1], -1), tokens_SN], 1)
    verdict = accept_tree(
        TARGET[before_ST],
        q_KV[before_ST] if rule in SAMPLED else None,
        tokens_SN,
        torch.tensor(parents).expand(tokens_SN.shape),
        torch.ones_like(tokens_SN, dtype=torch.bool),
        coin_SN,
        torch.zeros(before_ST.shape),
        rule,
    )
    weight_S = weight_S * happens(verdict, coin_SN)
    depth = torch.zeros(3, dtype=torch.float64)
    depth.index_add_(0, verdict.path_ST.sum(1) - 1, weight_S)
    return depth, first_two(verdict, tokens_SN, weight_S, TARGET)


NODES = [c for c in ENUMERATION["node"] if c["rule"] in (*SAMPLED, TreeRule.DISTINCT)]


@pytest.mark.parametrize("case", NODES, ids=lambda c: f"{c['rule']}-{c['candidates']}-{c['k']}")
def test_a_node_emits_the_targets_law(case: Any) -> None:
    drafts, weight_S = candidates(DRAFT[-1], case["candidates"], case["k"])
    parents = (-1,) * case["k"]
    depth, law_VV = tree_laws(TreeRule(case["rule"]), parents, drafts, weight_S, DRAFT)
    assert 1 - depth[0].item() == pytest.approx(case["acceptance"]["value"], abs=1e-12)
    assert same(law_VV, GOAL)


TREES = [c for c in ENUMERATION["tree"] if c["rule"] in (*SAMPLED, TreeRule.DISTINCT)]


@pytest.mark.parametrize("case", TREES, ids=lambda c: c["rule"])
def test_a_tree_of_two_levels_emits_the_targets_law(case: Any) -> None:
    drafts, weights = [], []
    for first, weight in zip(*candidates(DRAFT[-1], case["candidates"], 2), strict=True):
        below = [candidates(DRAFT[token], case["candidates"], 2) for token in first.tolist()]
        for left, right in product(*(zip(*one, strict=True) for one in below)):
            drafts.append(torch.cat([first, left[0], right[0]]))
            weights.append(weight * left[1] * right[1])
    parents = (-1, -1, 0, 0, 1, 1)
    drafts_SN, weight_S = torch.stack(drafts), torch.stack(weights)
    depth, law_VV = tree_laws(TreeRule(case["rule"]), parents, drafts_SN, weight_S, DRAFT)
    assert same(depth, fractions(case["p_depth"]))
    assert same(law_VV, GOAL)


MATCHES = [c for c in ENUMERATION["node"] if c["rule"] == TreeRule.TARGET_MATCH]


@pytest.mark.parametrize("case", MATCHES, ids=lambda c: f"{c['candidates']}-{c['k']}")
def test_target_match_emits_what_the_target_draws(case: Any) -> None:
    lists, weight_S = candidates(DRAFT[-1], case["candidates"], case["k"])
    p_V = TARGET[-1]
    u_S = (p_V.cumsum(0) - p_V / 2).repeat(len(lists))  # a number for each id it can draw
    tokens_SN = lists.repeat_interleave(SIZE, 0)
    weight_S = (weight_S[:, None] * p_V).flatten()
    rows, k = tokens_SN.shape
    verdict = accept_tree(
        p_V.expand(rows, k + 1, -1),
        None,
        tokens_SN,
        torch.full_like(tokens_SN, -1),
        torch.ones_like(tokens_SN, dtype=torch.bool),
        torch.zeros(rows, k),
        u_S[:, None].expand(rows, k + 1),
        TreeRule.TARGET_MATCH,
    )
    taken_SN = verdict.path_ST[:, 1:]
    assert weight_S[taken_SN.any(1)].sum().item() == pytest.approx(case["acceptance"]["value"])
    first_S = torch.cat([emitted(taken_SN, tokens_SN)[:, :1], verdict.bonus_S[:, None]], 1)
    first_S = torch.where(first_S[:, 0] < 0, first_S[:, 1], first_S[:, 0])
    assert first_S.tolist() == list(range(SIZE)) * len(lists)


# --- the laws would show a wrong pairing ---------------------------------------------------------

CONTROLS = {case["name"]: fractions(case["output"]) for case in ENUMERATION["negative_controls"]}


@pytest.mark.parametrize(
    "name, rule, kind",
    [
        ("with_rule_on_without_samples_k2", TreeRule.WITH_REPLACEMENT, "without"),
        ("without_rule_on_with_samples_k2", TreeRule.WITHOUT_REPLACEMENT, "with"),
    ],
)
def test_a_rule_on_the_wrong_candidates_is_biased(name: str, rule: TreeRule, kind: str) -> None:
    drafts, weight_S = candidates(DRAFT[-1], kind, 2)
    _, law_VV = tree_laws(rule, (-1, -1), drafts, weight_S, DRAFT)
    assert same(law_VV.sum(1), CONTROLS[name])


def test_a_draft_by_argmax_under_a_soft_law_is_biased() -> None:
    drafts, one = DRAFT[-1].argmax().view(1, 1), torch.ones(1, dtype=torch.float64)
    _, law_VV = chain_laws(accept_chain, TARGET, DRAFT, drafts, one)
    assert same(law_VV.sum(1), CONTROLS["argmax_draft_softmax_q"])
