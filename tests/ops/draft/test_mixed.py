"""Mixed trees: the union of several drafters' trees, and how reliable each drafter is."""

from math import exp, isclose, nan

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.mixed import calibrated, ends, learn_, mix
from specsot.ops.draft.ngram import HostTree
from specsot.ops.draft.proposals import pack
from specsot.ops.draft.reliability import BUCKETS, STEP, Reliability
from specsot.ops.types import Proposal

CPU = torch.device("cpu")
PATHS = st.dictionaries(
    st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), st.floats(-5, -0.1), max_size=7
)
Scores = dict[tuple[int, ...], float]


def tree_of(scores: Scores) -> HostTree:
    """The paths whose own starts are all there; no node scores above its parent."""
    known: dict[tuple[int, ...], int] = {(): -1}
    nodes = []
    losses = {(): 0.0}
    for path in sorted(scores, key=len):
        if path[:-1] in known:
            known[path] = len(nodes)
            losses[path] = min(scores[path], losses[path[:-1]])
            nodes.append((path[-1], known[path[:-1]], len(path), losses[path]))
    return HostTree(*zip(*nodes, strict=True)) if nodes else HostTree()


def paths(proposal: Proposal, tree: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    rows = (proposal.tokens_SN, proposal.parents_SN, proposal.depths_SN, proposal.valid_SN)
    for token, parent, depth, valid in zip(*(row[tree].tolist() for row in rows), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token) if valid else ())
        assert len(found[-1]) == depth or not valid
    return [path for path in found if path]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(PATHS, PATHS), min_size=1, max_size=3), st.integers(1, 9))
def test_the_most_probable_nodes_of_all_sources_make_one_tree(
    pairs: list[tuple[Scores, Scores]], nodes: int
) -> None:
    trees = [[tree_of(scores) for scores in pair] for pair in pairs]
    sources = [pack([pair[n] for pair in trees], CPU) for n in range(2)]
    linear = torch.from_numpy(-STEP * np.arange(BUCKETS + 1, dtype=np.float32))
    mixed = mix(sources, [linear, linear], nodes)
    for tree, pair in enumerate(trees):
        best: Scores = {}
        for source in pair:
            one = pack([source], CPU)
            for path, score in zip(paths(one, 0), source.scores, strict=True):
                best[path] = max(best.get(path, -torch.inf), score)
        found = paths(mixed, tree)
        assert len({*found}) == len(found) == min(nodes, len(best))
        cut = sorted(best.values(), reverse=True)[: len(found)]
        assert all(
            isclose(a, b, abs_tol=1e-5)
            for a, b in zip(sorted((best[path] for path in found), reverse=True), cut, strict=True)
        )


def test_side_outputs_say_which_source_gave_which_score() -> None:
    first = pack([HostTree((5, 6), (-1, 0), (1, 2), (-0.5, -1.0))], CPU)
    second = pack([HostTree((5, 7), (-1, 0), (1, 2), (-0.25, -2.0))], CPU)
    log_K = ends(Reliability(), CPU)
    mixed = mix([first, second], [log_K, log_K], 3)
    assert mixed.tokens_SN.tolist() == [[5, 6, 7]] and mixed.parents_SN.tolist() == [[-1, 0, 0]]
    assert mixed.side_outputs_SC is not None
    sides_C = mixed.side_outputs_SC[0].numpy()
    assert sides_C[:6].tolist() == [5, 6, 7, -1, 0, 0]
    scores = sides_C[6:].view(np.float64)
    np.testing.assert_array_equal(scores, [-0.5, -1.0, nan, -0.25, nan, -2.0])
    sources = [Reliability(), Reliability()]
    learn_(sources, sides_C, [9, 5, 7, 6], [0, 0, 1, 1], [0, 1, 2])  # in another order
    bucket = [int(-score / STEP) for score in (-0.5, -1.0, -0.25, -2.0)]
    fresh = Reliability()
    assert sources[0].accepted[bucket[0]] == fresh.accepted[bucket[0]] + 1
    assert sources[0].accepted[bucket[1]] == fresh.accepted[bucket[1]]
    assert sources[0].tried[bucket[1]] == fresh.tried[bucket[1]] + 1
    assert sources[1].accepted[bucket[3]] == fresh.accepted[bucket[3]] + 1
    assert sum(sources[1].tried) - sum(fresh.tried) == 2


def test_a_tree_that_a_grammar_replaced_teaches_nothing() -> None:
    sides_C = np.concatenate([[5, 6, -1, 0], np.array([-0.5, -1.0]).view(np.int64)])
    source = Reliability()
    learn_([source], sides_C, [9, 7, -1], [0, 0, 0], [0, 1])
    assert source == Reliability()


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_reliability_becomes_the_share_of_accepted_nodes(share: float) -> None:
    source = Reliability()
    draws = np.random.default_rng(0).random(20_000) < share
    for draw in draws:
        source.count_(-1.1, draw)
    log_K = ends(source, CPU)
    at = calibrated(torch.tensor([[-STEP * 5]]), log_K).item()  # the end of its bucket
    assert exp(at) == pytest.approx(min(share, exp(-STEP * 3.5)), abs=0.02)
    assert (ends(source, CPU).diff() <= 0).all()


def test_no_score_rises_by_rounding() -> None:
    source = Reliability()
    source.accepted = [tried / 3 for tried in source.tried]
    scores_SN = -torch.rand(1, 10_000).sort(descending=False).values * BUCKETS * STEP
    assert (calibrated(scores_SN, ends(source, CPU)).diff() <= 0).all()


def test_lower_scores_than_any_bucket_keep_their_order() -> None:
    log_K = ends(Reliability(), CPU)
    far = calibrated(torch.tensor([[-20.0, -30.0, -torch.inf]]), log_K)[0].tolist()
    assert far[0] > far[1] > far[2] == -torch.inf
