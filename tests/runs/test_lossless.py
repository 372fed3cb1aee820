"""Lossless: every branch's tokens are the ones transformers decodes behind the same token ids.

Random models of four families, whose likely tokens are few so that drafts are accepted; every
graph, 1 to 8 branches with and without dependencies, both ways of sharing, few and many branches
at once, one request and two. Here runs a part of the grid in which any two settings meet; the
whole grid is tests/full/test_lossless_grid.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.support import (
    FULL,
    PAGED,
    PLAIN,
    SEED,
    Graphs,
    Tiny,
    accepted_of,
    check_lossless,
    contexts,
    named,
    outline_of,
    pairwise,
    requests_of,
    run_all,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.states.request import Finish

FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"window": 17}}
# With budgets that differ, branches end at different times and others join a running round.
QUESTIONS = (Prompt("0", "hello"), Prompt("1", "a second question", max_new_tokens=7))
WHOLE: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "graph": (*FULL, *PAGED),
    "parts": (0, 1, 2, 3, 4, 5, 6, 7, 8),  # 0: the model writes the outline itself
    "deps": ("none", "chain", "fan"),
    "share": ("outline", "prompt"),
    "max_num_branches": (1, 2, 8),
    "order": ("fcfs", "longest_first", "shortest_first"),
    "requests": (1, 2),
    "stops": ((2,), ()),  # with an end, some branches stop early
    "nodes": ("{1: 10, 2: 6, 4: 3}", "1", "7"),
    "attention": ("dense", "grouped", "cascade"),
}
SINGLE: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "graph": PLAIN,
    "layout": ("bim", "batching", "paged"),
    "max_num_branches": (1, 2, 8),
    "requests": (1, 2),
    "stops": ((2,), ()),  # with an end, some branches stop early
    "nodes": ("{1: 10, 2: 6}", "1", "9"),
    "attention": ("dense", "grouped", "cascade"),
}


def dependencies(kind: str, parts: int) -> dict[int, tuple[int, ...]]:
    """chain: 3 needs 2, 2 needs 1; fan: the last part needs all that are odd."""
    if kind == "chain":
        return {i: (i - 1,) for i in range(2, min(parts, 4) + 1)}
    return {parts: tuple(range(1, parts, 2))} if kind == "fan" and parts > 1 else {}


def check_case(case: dict[str, Any], tiny: Callable[..., Tiny], graphs: Graphs) -> None:
    """One run of the grid, held to the reference."""
    made = tiny(case["family"], **FAMILIES[case["family"]])
    book = made.book(case.get("share", "outline"), case["stops"])
    sets = [f"layout.{key}={case[key]}" for key in ("max_num_branches", "order") if key in case]
    sets += [f"layout.kind={case['layout']}"] if "layout" in case else []
    sets.append(f"attention={case['attention']}")
    if "eagle" in case["graph"]:
        sets.append(f"drafter.num_draft_tokens={case['nodes']}")
    parts = case.get("parts", 0)
    outline = outline_of(parts, dependencies(case["deps"], parts)) if parts else None
    session = graphs.session(case["graph"], made.models, book, outline=outline, sets=sets)
    run = run_all(session, QUESTIONS[: case["requests"]])
    check_lossless(run, book, made.reference, case["graph"] in PLAIN)
    for request in requests_of(run):
        assert len(request.branches) == max(parts, 1)
    board = run.board
    assert board["kv"].needed_length == 0, "a finished run holds no rows"
    assert board["kv_draft"] is None or board["kv_draft"].needed_length == 0


@pytest.mark.parametrize("case", pairwise(WHOLE, SEED), ids=named)
def test_every_branch_and_every_outline_is_the_targets_own(
    case: dict[str, Any], tiny: Callable[..., Tiny], graphs: Graphs
) -> None:
    check_case(case, tiny, graphs)


@pytest.mark.parametrize("case", pairwise(SINGLE, SEED), ids=named)
def test_every_plain_answer_is_the_targets_own(
    case: dict[str, Any], tiny: Callable[..., Tiny], graphs: Graphs
) -> None:
    check_case(case, tiny, graphs)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_accepted_and_refused_so_that_something_is_tested(
    family: str, tiny: Callable[..., Tiny], graphs: Graphs
) -> None:
    """With models that never agree, or always, trees and commits would be tested in vain."""
    made = tiny(family, **FAMILIES[family])
    book = made.book(stop_ids=())
    session = graphs.session("bim_eagle", made.models, book, outline=outline_of(4), budget=30)
    rounds = [a for r in accepted_of(run_all(session, QUESTIONS)).values() for b in r for a in b]
    assert 0.2 < sum(rounds) / len(rounds) < 2.5, rounds
    assert {0, 1, 2} <= set(rounds)


@pytest.mark.parametrize("graph", [*PLAIN, *FULL])
def test_generate_of_transformers_itself_writes_the_same(
    graph: str, tiny: Callable[..., Tiny], graphs: Graphs
) -> None:
    for family, settings in FAMILIES.items():
        made = tiny(family, **settings)
        book = made.book("prompt" if family == "qwen3" else "outline")
        outline = outline_of(2, {2: (1,)})
        session = graphs.session(graph, made.models, book, outline=outline, budget=14)
        run = run_all(session, QUESTIONS[:1])
        for branch, context in contexts(requests_of(run)[0], book, graph in PLAIN):
            written = made.reference.generate(context, book.stop_ids, branch.budget)
            assert written[: len(branch.tokens)] == branch.tokens
            stopped = branch.finish is Finish.STOP
            assert (written[-1] in book.stop_ids) == stopped
            assert len(written) == len(branch.tokens) + stopped


@pytest.mark.parametrize("graph", [*PLAIN, *FULL])
def test_float64_is_lossless_too(graph: str, tiny: Callable[..., Tiny], graphs: Graphs) -> None:
    made = tiny("qwen3", "float64")
    book = made.book()
    session = graphs.session(graph, made.models, book, outline=outline_of(3), budget=12)
    run = run_all(session, QUESTIONS[:1])
    assert str(run.board["kv"].data.dtype) == "torch.float64"
    check_lossless(run, book, made.reference, graph in PLAIN)
    assert tokens_of(run)


@pytest.mark.parametrize("window", [4, 9])
def test_a_sliding_window_counts_true_positions_in_one_sequence_of_branches(
    window: int, tiny: Callable[..., Tiny], graphs: Graphs
) -> None:
    """Mistral's window, smaller than prompts and answers: slots would count all branches."""
    made = tiny("mistral", window=window)
    for share in ("outline", "prompt"):
        book = made.book(share, stop_ids=())
        session = graphs.session("bim_eagle", made.models, book, outline=outline_of(3), budget=25)
        run = run_all(session, QUESTIONS)
        check_lossless(run, book, made.reference, plain=False)
