"""Token Recycling: what a table keeps, what it learns, and the trees of its candidates."""

from itertools import product
from math import exp, isclose

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.ngram import HostTree
from specsot.ops.draft.recycle import READ, Known, RecycleTable, recycled_tree
from specsot.ops.draft.reliability import Reliability
from specsot.ops.verify.verify import filler_ids

CANDIDATES = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True).map(tuple),
    max_size=12,
)


def paths(tree: HostTree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert tree.depths == tuple(map(len, found)) and len({*found}) == len(found)
    return dict(zip(found, tree.scores, strict=True))


def known(*tokens: int) -> Known:
    return tokens, tuple(range(2, 2 + len(tokens)))


def test_candidates_are_the_best_tokens_that_have_a_chance() -> None:
    scores_RV = torch.tensor([[0.0, 2.0, 1.0, -1.0], [-torch.inf, -torch.inf, 5.0, -torch.inf]])
    ids = filler_ids(scores_RV, 2)[:, :2]
    assert ids[0].tolist() == [1, 2]
    assert sorted(ids[1].tolist()) == [-1, 2]


def test_a_longer_context_comes_first_and_the_last_writer_stays() -> None:
    table = RecycleTable(most=100)
    table.put_((1, 2), known(7, 8))
    table.put_((3, 2), known(9, 4))
    assert table.find((1, 2)) == (2, known(7, 8))
    assert table.find((5, 2)) == (1, known(9, 4)), "written last after 2"
    assert table.find((2, 5)) == (0, ((), ()))


def test_a_rejected_row_replaces_the_shorter_context_only() -> None:
    table = RecycleTable(most=100)
    table.put_((1, 2), known(7, 8))
    table.put_((1, 2), known(9), accepted=False)
    table.put_((3, 2), known(4), accepted=False)
    assert table.find((1, 2)) == (2, known(7, 8))
    assert table.find((3, 2)) == (2, known(4)) and table.find((5, 2)) == (1, known(4))


def test_the_oldest_contexts_are_forgotten() -> None:
    table = RecycleTable(most=3)
    for token in range(5):
        table.put_((token, token + 1), known(0))
    assert list(table.known) == [(3, 4), (5,), (4, 5)] and not table.find((0, 1))[0]


def test_a_text_gives_its_own_tokens_first() -> None:
    table = RecycleTable(most=100)
    table.put_((1, 2), known(7, 8))
    table.read_([1, 2, 3, 2, 5], width=2)
    assert table.find((1, 2)) == (2, ((3, 7), (READ, 2)))
    assert table.find((3, 2)) == (2, ((5, 3), (READ, READ))), "before, the candidates of 2 alone"


def test_a_candidates_chance_is_how_often_those_of_its_probability_were_right() -> None:
    table = RecycleTable(most=100)
    table.put_((1, 2), known(7, 8))
    for token in [7] * 6000 + [8] * 3000 + [9] * 1000:
        table.count_((1, 2), token)
    losses = table.reliabilities[1].losses
    assert isclose(exp(-losses[2]), 0.6, abs_tol=0.01)
    assert isclose(exp(-losses[3]), 0.3, abs_tol=0.01)
    table.count_((4, 4), 1)
    assert table.reliabilities[0] == Reliability(), "no context, no trial"


@settings(max_examples=60, deadline=None)
@given(CANDIDATES, st.integers(0, 9), st.integers(0, 3), st.sets(st.just(0)))
def test_trees_are_the_most_probable_paths(
    found: dict[tuple[int, int], tuple[int, ...]], nodes: int, levels: int, stops: set[int]
) -> None:
    table = RecycleTable(most=100)
    for context, candidates in found.items():
        table.put_(context, known(*candidates))
    chances: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(1, levels + 1):
        for path in product(range(4), repeat=depth):
            size, (tokens, buckets) = table.find((1, 2, *path[:-1])[-2:])
            if path[:-1] in chances and path[-1] in tokens and path[-1] not in stops:
                bucket = buckets[tokens.index(path[-1])]
                chances[path] = chances[path[:-1]] - table.reliabilities[size - 1].losses[bucket]
    del chances[()]
    tree = paths(recycled_tree(table, (1, 2), nodes=nodes, levels=levels, stop_ids=stops))
    assert all(isclose(score, chances[path]) for path, score in tree.items())
    best = sorted(chances.values(), reverse=True)[:nodes]
    assert all(map(isclose, sorted(tree.values(), reverse=True), best)) and len(tree) == len(best)
