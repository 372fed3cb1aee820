"""Token trees: golden EAGLE-2 trees, ancestors, nodes that branches share, and their rows."""

import json
from dataclasses import replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.proposals import share
from specsot.ops.types import Candidates, PackedTrees, Proposal, ancestors, packed_places, rerank

Tree = list[tuple[int, int, float]]  # (token, parent, score) of each node, the padding left out
LOSSES = (0.0, 0.0, 0.25, 1.0, 1e-9, 3.5, float("inf"))


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Tree], int]:
    trees: list[Tree] = []
    for _ in range(draw(st.integers(1, 5))):
        tree: Tree = []
        for node in range(draw(st.integers(0, 9))):
            parent = draw(st.integers(-1, node - 1))
            above = tree[parent][2] if parent >= 0 else 0.0
            tree.append((draw(st.integers(0, 30)), parent, above - draw(st.sampled_from(LOSSES))))
        trees.append(tree)
    return trees, max(map(len, trees)) + draw(st.integers(0, 2))


def proposal_of(trees: list[Tree], nodes: int) -> Proposal:
    shape = len(trees), nodes
    tokens, parents = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
    depths, valid = torch.ones(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    scores = torch.full(shape, -torch.inf)
    for row, tree in enumerate(trees):
        for node, (token, parent, score) in enumerate(tree):
            tokens[row, node], parents[row, node], scores[row, node] = token, parent, score
            depths[row, node] = 1 if parent < 0 else depths[row, parent] + 1
            valid[row, node] = True
    return Proposal(tokens, parents, depths, valid, scores, nodes)


def best_first(trees: list[Tree], most: int) -> set[tuple[int, int]]:
    """(tree, node) of the nodes that a search over all trees at once takes first.

    A node can be taken when its parent was; of equals the earlier tree's, then the earlier node."""
    heap = [
        (-float(np.float32(score)), tree, node)
        for tree, drafted in enumerate(trees)
        for node, (_, parent, score) in enumerate(drafted)
        if parent < 0
    ]
    heapify(heap)
    taken: set[tuple[int, int]] = set()
    while heap and len(taken) < most:
        _, tree, node = heappop(heap)
        taken.add((tree, node))
        for child, (_, parent, score) in enumerate(trees[tree]):
            if parent == node:
                heappush(heap, (-float(np.float32(score)), tree, child))
    return taken


def paths(proposal: Proposal, tree: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    columns = (proposal.tokens_SN, proposal.parents_SN, proposal.depths_SN, proposal.valid_SN)
    rows = zip(*(column[tree].tolist() for column in columns), strict=True)
    for token, parent, depth, valid in rows:
        if not valid:
            found.append(())
            continue
        assert parent < len(found) and (parent < 0 or found[parent]), "its parent was kept too"
        found.append((*(found[parent] if parent >= 0 else ()), token))
        assert len(found[-1]) == depth
    return found


@given(forests(), st.integers(1, 50))
@settings(max_examples=300, deadline=None)
def test_the_best_nodes_over_all_trees_are_kept(made: tuple[list[Tree], int], most: int) -> None:
    trees, nodes = made
    proposal = proposal_of(trees, nodes)
    kept, wanted = share(proposal, most), best_first(trees, most)
    assert kept.shared == min(most, len(trees) * nodes)
    assert int(kept.valid_SN.sum()) == len(wanted) == min(most, sum(map(len, trees)))
    for tree in range(len(trees)):
        whole = paths(proposal, tree)
        expected = [whole[node] for node in range(nodes) if (tree, node) in wanted]
        assert [path for path in paths(kept, tree) if path] == expected
        scores = [trees[tree][node][2] for node in range(nodes) if (tree, node) in wanted]
        assert kept.scores_SN[tree][kept.valid_SN[tree]].tolist() == pytest.approx(scores)
    assert kept.tokens_SN.shape[1] == min(nodes, most), "no tree has more than all together"
    assert (kept.valid_SN.int().diff(dim=1) <= 0).all(), "padding is at the end"
    padding = ~kept.valid_SN
    assert (kept.parents_SN[padding] == -1).all() and (kept.depths_SN[padding] == 1).all()
    assert (kept.scores_SN[padding] == -torch.inf).all()


def test_nothing_is_shared_where_nobody_asks_or_nobody_drafts() -> None:
    proposal = proposal_of([[(1, -1, -1.0)]], 1)
    assert proposal.shared is None
    for trees in ([[], []], []):
        assert share(proposal_of(trees, 0), 5).shared == 0


def test_drafts_that_were_drawn_are_not_ranked() -> None:
    proposal = replace(proposal_of([[(1, -1, -1.0)]], 1), draft_probs_STV=torch.ones(1, 2, 4) / 4)
    with pytest.raises(ValueError, match="drawn drafts"):
        share(proposal, 1)


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5), st.data())
@settings(max_examples=100, deadline=None)
def test_every_valid_node_has_a_row_of_its_own(
    valid: list[list[bool]], data: st.DataObject
) -> None:
    valid_SN = torch.tensor(valid)
    count, trees = int(valid_SN.sum()), len(valid)
    spare = data.draw(st.integers(0, 20 - count if trees == 5 else 3))
    forest = PackedTrees.of(valid_SN, count + spare)
    assert len(forest.tree_R) == len(forest.rows) == trees + count + spare
    nodes = [
        (tree, node) for tree, row in enumerate(valid) for node, is_in in enumerate(row) if is_in
    ]
    owned = list(zip(forest.tree_R.tolist(), forest.node_R.tolist(), strict=True))
    roots = [(tree, 0) for tree in range(trees)]
    assert owned == [*roots, *((tree, node + 1) for tree, node in nodes), *[(-1, -1)] * spare]
    for row, (tree, node) in enumerate(owned[: trees + count]):
        assert forest.nodes_ST[tree, node] == row
    without = torch.nn.functional.pad(~valid_SN, (1, 0))
    own_root_ST = torch.arange(trees)[:, None].expand_as(without)
    assert (forest.nodes_ST[without] == own_root_ST[without]).all()
    has_ST = torch.nn.functional.pad(valid_SN, (1, 0), value=True)
    assert packed_places(has_ST.numpy()).tolist() == forest.nodes_ST.tolist()


def test_values_find_their_rows_and_back() -> None:
    forest = PackedTrees.of(torch.tensor([[True, False], [True, True]]), 4)
    by_node = torch.tensor([[10, 11, 12], [20, 21, 22]])
    assert forest.pick(by_node, -7).tolist() == [10, 20, 11, 21, 22, -7]
    logits_RV = torch.tensor([[10.0], [20.0], [11.0], [21.0], [22.0], [0.0], [99.0]])
    assert forest.spread(logits_RV)[:, 0].tolist() == [10, 11, 10, 20, 21, 22, 99]


@given(forests(), st.integers(1, 50))
@settings(max_examples=100, deadline=None)
def test_a_row_sees_its_own_ancestors_and_no_other_tree(
    made: tuple[list[Tree], int], most: int
) -> None:
    kept = share(proposal_of(*made), most)
    assert kept.shared is not None
    forest = PackedTrees.of(kept.valid_SN, kept.shared)
    above_STT = ancestors(kept.parents_SN, kept.levels)
    sees_RR = forest.visible(above_STT)
    for row, (tree, node) in enumerate(zip(forest.tree_R, forest.node_R, strict=True)):
        for other, (its, one) in enumerate(zip(forest.tree_R, forest.node_R, strict=True)):
            related = tree == its >= 0 and bool(above_STT[tree, node, one])
            assert sees_RR[row, other] == (related or row == other)


GOLDEN = Path(__file__).parents[2] / "golden" / "specsot" / "tree_postprocess.json"


def candidates_of(case: Any) -> Candidates:
    width = case["top_k"]
    tokens, scores = list(case["level0_tokens"]), list(case["level0_scores"])
    parents, depths = [-1] * width, [1] * width
    frontier = list(range(width))
    for depth, level in enumerate(case["levels"], 2):
        created = len(tokens)
        tokens += [token for row in level["tokens"] for token in row]
        scores += [score for row in level["cum_scores"] for score in row]
        parents += [parent for parent in frontier for _ in range(width)]
        depths += [depth] * width**2
        frontier = [created + pick for pick in level["selected_flat"]]
    return Candidates(*(torch.tensor([part]) for part in (tokens, parents, depths, scores)))


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()))
def test_reranking_keeps_the_golden_trees(case: Any) -> None:
    nodes, levels = case["total_tokens_without_root"], len(case["levels"]) + 1
    kept = rerank([candidates_of(case)], nodes)
    assert kept.tokens_SC.tolist() == [case["draft_tokens"][1:]]
    assert kept.depths_SC.tolist() == [case["tree_depths"][1:]]
    assert ancestors(kept.parents_SC, levels).int().tolist() == [case["tree_visible"]]


@settings(max_examples=80, deadline=None)
@given(forests(), st.integers(1, 24))
def test_reranking_keeps_the_best_set_connected_under_exact_ties(
    made: tuple[list[Tree], int], nodes: int
) -> None:
    count = min(map(len, made[0]))  # every tree of a batch has as many
    trees = [tree[:count] for tree in made[0]]
    nodes = min(nodes, count)
    drafted = proposal_of(trees, count)
    number_SC = torch.arange(count).expand(len(trees), -1)
    created = (number_SC, drafted.parents_SN, drafted.depths_SN, drafted.scores_SN)
    kept = rerank([Candidates(*created)], nodes)
    for tree, scores in enumerate(drafted.scores_SN.tolist()):
        chosen = kept.tokens_SC[tree].tolist()
        best = sorted(range(count), key=lambda n, scores=scores: (-scores[n], n))[:nodes]
        assert chosen == sorted(best), "the best nodes, parents before children, creation order"
        for node, parent in enumerate(kept.parents_SC[tree].tolist()):
            above = trees[tree][chosen[node]][1]
            assert parent < node and above == (-1 if parent < 0 else chosen[parent])
            depth = 0 if parent < 0 else int(kept.depths_SC[tree, parent])
            assert int(kept.depths_SC[tree, node]) == depth + 1


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(0, 3))
def test_ancestors_are_those_of_a_naive_walk(made: tuple[list[Tree], int], spare: int) -> None:
    drafted = proposal_of(*made)
    seen_STT = ancestors(drafted.parents_SN, made[1] + spare)
    for tree, parents in enumerate(drafted.parents_SN.tolist()):
        for node in range(len(parents) + 1):
            walk = {node}
            while min(walk):
                walk.add(parents[min(walk) - 1] + 1)
            assert set(torch.nonzero(seen_STT[tree, node]).flatten().tolist()) == walk
