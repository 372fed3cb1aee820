"""Rows run out and the youngest makes way: whoever goes on later writes what it would have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.making_way import (
    GRID,
    OPTIMISTIC,
    SMALL,
    TEXTS,
    LongBook,
    check_forced,
    preemptions,
    session_of,
)
from helpers.support import SEED, Graphs, Tiny, drive, named, pairwise, start, tokens_of

Make = Callable[..., Tiny]
CASES = pairwise(GRID, 21)
COPIED = {"graph": "bim_plain", "layout": "batching", "prefix_cache": "true"}  # rows move out of it
CASES += [case | COPIED for case in CASES[:4]]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_whoever_makes_way_at_any_moment_writes_the_same(
    case: dict[str, Any], tiny: Make, graphs: Graphs
) -> None:
    assert check_forced(case, tiny("llama"), graphs, SEED) > 0


@pytest.mark.parametrize("kind", ("eagle3", "ngram"))
def test_a_pool_barely_larger_than_one_request(kind: str, tiny: Make, graphs: Graphs) -> None:
    """Reserved, nobody is ever interrupted; optimistic, more run side by side, and make way."""
    found, steps = [], []
    case = {"drafter": (kind, 0), "graph": "bim_plain", "layout": "bim", "share": "outline"}
    texts = [replace(one, max_new_tokens=70) for one in TEXTS[:2]]
    for sets in (["layout.kv_slots=2000"], [SMALL], [SMALL, OPTIMISTIC]):
        session = session_of(case | {"temperature": 0.0}, tiny("llama"), graphs, *sets, stops=())
        run = drive(start(session, texts), check=OPTIMISTIC in sets)
        found.append(tokens_of(run))
        steps.append(preemptions(run))
    assert found[0] == found[1] == found[2]
    assert steps[:2] == [0, 0] and steps[2] > 1


@pytest.mark.parametrize(("merge", "makes_way"), [("concat", True), ("attend", False)])
def test_parts_that_stay_until_they_are_combined_are_reserved(
    merge: str, makes_way: bool, tiny: Make, graphs: Graphs
) -> None:
    """Rows that somebody else still reads are nobody's to give away."""
    graph = {"concat": "bim_plain", "attend": "bim_attend_merge"}[merge]
    book = LongBook(130, "outline", ())
    session = graphs.session(
        graph, tiny("llama").models, book, sets=[OPTIMISTIC, "skeleton.grammar=false"]
    )
    assert start(session, []).board["branches"].admission.optimistic is makes_way
