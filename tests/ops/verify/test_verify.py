"""Acceptance: the path that the target confirms, against a naive walk down each tree."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.ops.attention.metadata import Visibility
from specsot.ops.forward import compile_plan
from specsot.ops.layer_plan import LayerStatus
from specsot.ops.types import Proposal, Rows, ancestors
from specsot.ops.verify.verify import BEST, accept, best, root

VOCAB = 5
ROOT = 3  # the token at the root of every tree here


@dataclass
class Tree:
    """parents (-1: the root), tokens, valid of the drafted nodes; says[n]: the target at node n."""

    parents: list[int]
    tokens: list[int]
    valid: list[bool]
    says: list[int]


def proposal_of(trees: list[Tree]) -> Proposal:
    depths = []
    for tree in trees:
        own: list[int] = []
        for parent in tree.parents:
            own.append(1 if parent < 0 else own[parent] + 1)
        depths.append(own)
    shape = (len(trees), len(trees[0].tokens))
    return Proposal(
        torch.tensor([t.tokens for t in trees], dtype=torch.int64).view(shape),
        torch.tensor([t.parents for t in trees], dtype=torch.int64).view(shape),
        torch.tensor(depths, dtype=torch.int64).view(shape),
        torch.tensor([t.valid for t in trees], dtype=torch.bool).view(shape),
        torch.zeros(shape),
        max((d for own in depths for d in own), default=0),
    )


def rows_of(proposal: Proposal, tips: int = 0, bound: tuple[int, ...] = ()) -> Rows:
    """The trees' rows, and behind them `tips` prefill rows, each of which draws."""
    root_S1 = torch.full((proposal.tokens_SN.shape[0], 1), ROOT)
    tokens = torch.cat([root_S1, proposal.tokens_SN], 1).view(-1)
    count = len(tokens) + tips
    whole = torch.cat([tokens, torch.zeros(tips, dtype=torch.int64)])[None]
    index = torch.arange(count)[None]
    return Rows(
        whole,
        index,
        index,
        Visibility(np.zeros(1, np.int32), np.zeros((1, 1), np.int32), ((0,),)),
        np.zeros(count, np.int32),
        (),
        np.arange(count - tips, count, dtype=np.int32),
        torch.arange(count - tips).view(-1, proposal.tokens_SN.shape[1] + 1),
        ancestors(proposal.parents_SN, proposal.levels),
        torch.arange(count - tips, count),
        bound_trees=bound,
    )


def logits_of(trees: list[Tree]) -> Tensor:
    says = torch.tensor([token for tree in trees for token in tree.says])
    return torch.nn.functional.one_hot(says, VOCAB).float() + torch.rand(len(says), VOCAB) * 0.5


def naive(tree: Tree) -> list[int]:
    path = [0]
    while True:
        here, says = path[-1], tree.says[path[-1]]
        fits = [
            n + 1
            for n, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
            if parent + 1 == here and token == says and tree.valid[n]
        ]
        if not fits:
            return path
        path.append(fits[0])


@st.composite
def forests(draw: st.DrawFn) -> list[Tree]:
    count = draw(st.integers(0, 12))
    return [_tree(draw, count) for _ in range(draw(st.integers(1, 4)))]


def _tree(draw: st.DrawFn, count: int) -> Tree:
    """Siblings have different tokens; padding may have the token that the target says."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(count):
        parent = draw(st.sampled_from([p for p in range(-1, node) if parents.count(p) < VOCAB]))
        taken = [t for p, t in zip(parents, tokens, strict=True) if p == parent]
        tokens.append(draw(st.sampled_from([t for t in range(VOCAB) if t not in taken])))
        parents.append(parent)
    valid = draw(st.lists(st.booleans() | st.just(True), min_size=count, max_size=count))
    says = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count + 1, max_size=count + 1))
    for node, parent in enumerate(parents):
        valid[node] = valid[node] and (parent < 0 or valid[parent])
        if draw(st.booleans()) and node % 2 == 0:
            says[parent + 1] = tokens[node]
    return Tree(parents, tokens, valid, says)


@settings(max_examples=120, deadline=None)
@given(forests(), st.integers(0, 2))
def test_the_accepted_path_is_that_of_a_naive_walk(trees: list[Tree], tips: int) -> None:
    proposal = proposal_of(trees)
    rows = rows_of(proposal, tips)
    behind = torch.rand(tips, VOCAB)  # the newcomers' logits are none of the trees' business
    found = accept(rows, torch.cat([logits_of(trees), behind]), proposal)
    for index, tree in enumerate(trees):
        path = naive(tree)
        assert torch.nonzero(found.path_ST[index]).flatten().tolist() == path
        assert int(found.bonus_S[index]) == tree.says[path[-1]]
        assert found.drawn_ST[index].tolist() == tree.says
        shown = [t if ok else -1 for t, ok in zip(tree.tokens, tree.valid, strict=True)]
        assert found.tokens_ST[index].tolist() == [ROOT, *shown]
        assert found.parents_ST[index].tolist() == [0, *(parent + 1 for parent in tree.parents)]


def test_of_two_equal_siblings_the_one_with_the_longer_path_is_accepted() -> None:
    for tree, path in (
        (Tree([-1, -1, 1], [4, 4, 2], [True] * 3, [4, 2, 2, 0]), [0, 2, 3]),
        (Tree([-1, -1], [4, 4], [True] * 2, [4, 2, 2]), [0, 1]),
    ):
        proposal = proposal_of([tree])
        found = accept(rows_of(proposal), logits_of([tree]), proposal)
        assert torch.nonzero(found.path_ST[0]).flatten().tolist() == path


def test_of_equal_scores_the_smallest_id_is_drawn() -> None:
    proposal = proposal_of([Tree([-1], [1], [True], [0, 0])])
    scores = torch.zeros(2, VOCAB)
    scores[0, 1] = scores[0, 4] = 7.0
    assert accept(rows_of(proposal), scores, proposal).drawn_ST.tolist() == [[1, 0]]


def test_trees_under_a_grammar_bring_their_best_tokens_and_whole_scores() -> None:
    trees = [Tree([-1], [1], [True], [0, 1]), Tree([-1], [2], [True], [2, 3])]
    proposal, scores = proposal_of(trees), torch.rand(4, 100)
    found = accept(rows_of(proposal, bound=(1,)), scores, proposal)
    assert found.bound.best_GC.shape == (2, BEST)
    assert torch.equal(found.bound.scores_GV, scores[2:])
    assert found.bound.whole(1).argmax() == scores[3].argmax()
    naive = sorted(range(100), key=lambda token: -float(scores[3, token]))[: BEST - 1]
    assert found.bound.best_GC[1].tolist() == [*naive, -1]
    assert accept(rows_of(proposal), scores, proposal).bound.best_GC.shape == (0, BEST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_tokens_are_in_the_order_of_their_scores_and_then_of_their_ids(
    dtype: torch.dtype,
) -> None:
    draw = torch.Generator().manual_seed(3)
    steps = torch.randint(-9, 9, (6, 300), generator=draw).to(dtype) * 1.5
    steps[0, :80] = -0.0
    fine = torch.randn(4, 300, generator=draw, dtype=dtype) * 100
    short = torch.randint(-2, 2, (3, 9), generator=draw).to(dtype)
    for scores in (steps, fine, torch.zeros(2, 300, dtype=dtype), short):
        for row, found in zip(scores.tolist(), best(scores).tolist(), strict=True):
            naive = sorted(range(len(row)), key=lambda token, row=row: (-row[token], token))[:BEST]
            cut = row[naive[-1]] if len(row) > BEST else -1e9
            assert found == [token if row[token] > cut else -1 for token in naive]
    assert (best(fine) >= 0).sum(-1).tolist() == [BEST - 1] * 4


def test_first_tokens_are_drawn_at_the_prefill_tips_alone() -> None:
    proposal = proposal_of([Tree([-1], [1], [True], [0, 1])])
    rows = rows_of(proposal, tips=2)
    scores = torch.eye(VOCAB)[[0, 1, 4, 2]]
    assert root(rows, scores).drawn_R.tolist() == [4, 2]


def test_the_layer_plan_says_whether_trees_are_verified() -> None:
    model = SimpleNamespace(num_layers=3)
    trees = rows_of(proposal_of([Tree([-1], [1], [True], [0, 1])]))
    roots = rows_of(proposal_of([Tree([], [], [], [0])]))
    prefill = replace(trees, nodes_ST=trees.nodes_ST[:0], ancestors_STT=trees.ancestors_STT[:0])
    plans = [compile_plan(model, rows) for rows in (trees, roots, prefill)]
    assert plans == [(LayerStatus.DECODE,) * 3] * 2 + [(LayerStatus.FULL,) * 3]
