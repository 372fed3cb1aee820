"""Token Recycling: what a table keeps, what it learns, and the trees of its candidates."""

from itertools import product
from math import exp, isclose

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.ngram import HostTree
from specsot.ops.draft.recycle import COMMON, LEAST, RecycleTable, best, recycled_tree
from specsot.ops.verify.verify import filler_ids

ROWS = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.dictionaries(st.integers(0, 3), st.integers(1, 9), min_size=1, max_size=3),
        st.booleans(),
    ),
    max_size=12,
)


def paths(tree: HostTree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert tree.depths == tuple(map(len, found)) and len({*found}) == len(found)
    return dict(zip(found, tree.scores, strict=True))


def test_candidates_are_the_best_tokens_that_have_a_chance() -> None:
    scores_RV = torch.tensor([[0.0, 2.0, 1.0, -1.0], [-torch.inf, -torch.inf, 5.0, -torch.inf]])
    ids = filler_ids(scores_RV, 2)[:, :2]
    assert ids[0].tolist() == [1, 2]
    assert sorted(ids[1].tolist()) == [-1, 2]


def following(table: RecycleTable, *context: int) -> dict[int, float]:
    return table.following(context, 1.0)


def test_the_last_row_has_half_of_a_context_and_shorter_contexts_the_rest() -> None:
    table = RecycleTable(most=100, width=8)
    table.put_((1, 2), {7: 0.75, 8: 0.25})
    assert following(table, 2) == pytest.approx({7: 0.375 + 0.5 * 0.0075, 8: 0.125})
    table.put_((3, 2), {9: 1.0})
    assert following(table, 2) == pytest.approx({9: 0.5 + 0.25 * 0.01, 7: 0.1875, 8: 0.0625})
    assert following(table, 1, 2) == pytest.approx({7: 0.46875, 9: 0.25, 8: 0.15625})
    assert following(table, 5, 2) == following(table, 2)
    assert following(table, 5, 5) == pytest.approx({9: 0.01, 7: 0.007425, 8: 0.002475})


def test_chances_never_exceed_one_however_often_a_context_returns() -> None:
    table = RecycleTable(most=100, width=8)
    for _ in range(3000):
        table.put_((1, 2), {7: 1.0, 8: 0.0})
    assert following(table, 1, 2) == pytest.approx({7: 1.0})
    assert recycled_tree(table, (1, 2), nodes=4, levels=1).tokens == (7,)


def test_a_rejected_row_is_of_its_contexts_but_not_common() -> None:
    table = RecycleTable(most=100, width=8)
    table.put_((1, 2), {7: 1.0}, accepted=False)
    assert following(table, 1, 2) == pytest.approx({7: 0.75})
    assert following(table, 5, 2) == pytest.approx({7: 0.5}) and not following(table, 5, 5)


def test_a_new_context_has_the_mean_of_rows_after_other_tokens() -> None:
    table = RecycleTable(most=100, width=8)
    table.put_((3, 2), {9: 1.0}, accepted=False)
    table.guess_((1, 2), [])
    assert (1, 2) not in table.known
    table.guess_((1, 2), [(0.6, {7: 1.0}), (0.2, {7: 0.5, 8: 0.5})])
    assert following(table, 1, 2) == pytest.approx({7: 0.4375, 9: 0.25, 8: 0.0625})
    assert following(table, 5, 2) == pytest.approx({9: 0.5}), "a guess is of its own context only"
    table.guess_((1, 2), [(1.0, {5: 1.0})])
    assert 5 not in following(table, 1, 2), "it is not new"


def test_the_oldest_contexts_and_the_least_candidates_are_forgotten() -> None:
    table = RecycleTable(most=3, width=2)
    for token in range(5):
        table.put_((token, token + 1), {6: 0.6, 7: 0.4})
    assert list(table.known) == [(), (5,), (4, 5)] and list(table.known[5,].chances) == [6, 7]
    table.put_((4, 5), {8: 1.0})
    assert list(table.known[5,].chances) == [8, 6], "best first"
    for token in range(99):
        table.put_((4, 5), {token: 1.0})
    assert len(table.known[()].chances) == COMMON


def test_a_text_gives_its_own_tokens() -> None:
    table = RecycleTable(most=100, width=8)
    table.read_([1, 2, 3, 2, 5])
    assert next(iter(following(table, 1, 2))) == 3 and next(iter(following(table, 3, 2))) == 5
    assert table.known[2,].chances == pytest.approx({5: 0.5, 3: 0.25})


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, 9), st.integers(0, 3), st.sets(st.just(0)))
def test_trees_are_the_most_probable_paths(
    rows: list[tuple[tuple[int, int], dict[int, int], bool]],
    nodes: int,
    levels: int,
    stops: set[int],
) -> None:
    table = RecycleTable(most=100, width=8)
    for context, weights, accepted in rows:
        total = sum(weights.values())
        chances = {token: weight / total for token, weight in weights.items()}
        table.put_(context, best(chances), accepted=accepted)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(1, levels + 1):
        for path in product(range(4), repeat=depth):
            if path[:-1] in known and path[-1] not in stops:
                after = table.following((1, 2, *path[:-1])[-2:], known[path[:-1]])
                if path[-1] in after:
                    known[path] = after[path[-1]]
                    assert LEAST <= known[path] <= known[path[:-1]] + 1e-9
    del known[()]
    tree = paths(recycled_tree(table, (1, 2), nodes=nodes, levels=levels, stop_ids=stops))
    assert all(isclose(exp(score), known[path]) for path, score in tree.items())
    expected = sorted(known.values(), reverse=True)[:nodes]
    found = sorted(map(exp, tree.values()), reverse=True)
    assert all(map(isclose, found, expected)) and len(tree) == len(expected)
