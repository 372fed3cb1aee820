"""Token trees: the golden EAGLE-2 post-processing, ancestors, and sets that stay connected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.types import Candidates, ancestors, rerank

GOLDEN = Path(__file__).parents[1] / "golden" / "specsot" / "tree_postprocess.json"


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
    kept = rerank(candidates_of(case), nodes)
    assert kept.tokens_SC.tolist() == [case["draft_tokens"][1:]]
    assert kept.depths_SC.tolist() == [case["tree_depths"][1:]]
    assert ancestors(kept.parents_SC, levels).int().tolist() == [case["tree_visible"]]
    assert _paths(kept.parents_SC[0].tolist()) == _padded(case["retrieve_indices"])


def _paths(parents: list[int]) -> set[tuple[int, ...]]:
    inner = {parent + 1 for parent in parents}
    paths = set()
    for leaf in range(1, len(parents) + 1):
        if leaf not in inner:
            path = [leaf]
            while path[-1]:
                path.append(parents[path[-1] - 1] + 1)
            paths.add(tuple(reversed(path)))
    return paths


def _padded(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(node for node in row if node >= 0) for row in rows}


@st.composite
def created(draw: st.DrawFn) -> tuple[list[int], list[int], list[float]]:
    """(parents, depths, scores) of a tree in creation order; a child may score as its parent."""
    count = draw(st.integers(1, 24))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    losses = [draw(st.sampled_from([0.0, 0.0, 0.25, 1.0, 1e-9, 3.5])) for _ in range(count)]
    depths: list[int] = []
    scores: list[float] = []
    for parent, loss in zip(parents, losses, strict=True):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        scores.append((0.0 if parent < 0 else scores[parent]) - loss)
    return parents, depths, scores


@settings(max_examples=80, deadline=None)
@given(st.lists(created(), min_size=1, max_size=3), st.integers(1, 24))
def test_reranking_keeps_the_best_set_connected_under_exact_ties(
    trees: list[tuple[list[int], list[int], list[float]]], nodes: int
) -> None:
    count = min(len(parents) for parents, _, _ in trees)  # every tree of a batch has as many
    trees = [(p[:count], d[:count], s[:count]) for p, d, s in trees]
    nodes = min(nodes, count)
    parents_SC, depths_SC, scores_SC = (torch.tensor(part) for part in zip(*trees, strict=True))
    number_SC = torch.arange(count).expand(len(trees), -1)
    kept = rerank(Candidates(number_SC, parents_SC, depths_SC, scores_SC.float()), nodes)
    for tree, (parents, _, _) in enumerate(trees):
        chosen = kept.tokens_SC[tree].tolist()
        exact = scores_SC[tree].float().tolist()
        best = sorted(range(count), key=lambda n, exact=exact: (-exact[n], n))[:nodes]
        assert chosen == sorted(best), "the best nodes, parents before children, creation order"
        for node, parent in enumerate(kept.parents_SC[tree].tolist()):
            assert parent < node
            assert parents[chosen[node]] == (-1 if parent < 0 else chosen[parent])
            above = 0 if parent < 0 else int(kept.depths_SC[tree, parent])
            assert int(kept.depths_SC[tree, node]) == above + 1


@settings(max_examples=60, deadline=None)
@given(st.lists(created(), min_size=1, max_size=3), st.integers(0, 3))
def test_ancestors_are_those_of_a_naive_walk(
    trees: list[tuple[list[int], list[int], list[float]]], spare: int
) -> None:
    count = min(len(parents) for parents, _, _ in trees)
    levels = max(max(depths[:count]) for _, depths, _ in trees) + spare
    found = ancestors(torch.tensor([parents[:count] for parents, _, _ in trees]), levels)
    for tree, (parents, _, _) in enumerate(trees):
        for node in range(count + 1):
            walk = {node}
            while node:
                node = parents[node - 1] + 1
                walk.add(node)
            assert set(torch.nonzero(found[tree, max(walk)]).flatten().tolist()) == walk


def test_a_tree_without_nodes_is_its_root() -> None:
    assert ancestors(torch.zeros(2, 0, dtype=torch.int64), 0).tolist() == [[[True]], [[True]]]
