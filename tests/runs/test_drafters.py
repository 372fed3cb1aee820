"""Every drafter, in both layouts: the tokens are the target's own, and something is accepted.

Here runs a part of the grid in which any two settings meet.
"""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.drafters import KINDS, SETTINGS, drafting
from helpers.support import (
    PLAIN,
    SEED,
    Graphs,
    Tiny,
    accepted_of,
    check_lossless,
    memory_of,
    named,
    outline_of,
    pairwise,
    run_all,
    tokens_of,
)

from specsot.engine.prepare.files import graph_names, open_source
from specsot.engine.prepare.inputs import Prompt

Make = Callable[..., Tiny]
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {}, "mistral": {"window": 17}}
QUESTIONS = (Prompt("0", "hello"), Prompt("1", "a second question", max_new_tokens=7))
# Without a drafter, as their docs say, or with a block that the others do not have.
OTHERS = (
    *("autoregressive", "bim_plain", "batching_plain", "paged_plain", "beam"),
    *("blend_eagle", "bim_blend_eagle", "bim_blend_merge", "bim_attend_merge"),
)
# The algorithm as published accepts by rejection; the second drafter stands in its own block.
MORE = {"speculative": ("sampling",), "bim_two_drafters": ("skeleton",)}
CHOICES = tuple((kind, number) for kind in KINDS for number in range(len(SETTINGS[kind])))
WHOLE: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "drafter": CHOICES,
    "layout": ("bim", "batching", "paged"),
    "blocks": (1, 16, 64),
    "attention": ("auto", "dense", "grouped", "cascade"),
    "parts": (1, 2, 3, 4, 5, 6, 7, 8),
    "order": ("fcfs", "longest_first", "shortest_first"),
    "share": ("outline", "prompt"),
    "max_num_branches": (1, 3, 8),
    "requests": (1, 2),
    "stops": ((2,), ()),
}


def sets_of(case: dict[str, Any]) -> list[str]:
    kind, number = case["drafter"]
    sets = [f"drafter.kind={kind}", *SETTINGS[kind][number], *memory_of(case)]
    return [*sets, *(f"layout.{key}={case[key]}" for key in ("max_num_branches", "order"))]


def check_case(case: dict[str, Any], tiny: Make, graphs: Graphs) -> None:
    """One run of the grid, held to the reference."""
    made = tiny(case["family"], **FAMILIES[case["family"]])
    book = made.book(case["share"], case["stops"])
    session = graphs.session(
        "bim_plain",
        drafting(made, case["drafter"][0]),
        book,
        outline=outline_of(case["parts"]),
        budget=12,
        sets=sets_of(case),
    )
    run = run_all(session, QUESTIONS[: case["requests"]])
    check_lossless(run, book, made.reference, plain=False)
    assert run.board["kv"].needed_length == 0, "a finished run holds no rows"


@pytest.mark.parametrize("case", pairwise(WHOLE, SEED), ids=named)
def test_every_drafter_is_lossless_in_both_layouts(
    case: dict[str, Any], tiny: Make, graphs: Graphs
) -> None:
    check_case(case, tiny, graphs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", PLAIN[:1])
def test_one_plain_answer_is_lossless_too(
    kind: str, graph: str, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("qwen3")
    book = made.book(stop_ids=())
    for sets in SETTINGS[kind]:
        session = graphs.session(
            graph, drafting(made, kind), book, budget=20, sets=(f"drafter.kind={kind}", *sets)
        )
        check_lossless(run_all(session, QUESTIONS), book, made.reference, plain=True)


@pytest.mark.parametrize(("kind", "number"), CHOICES)
def test_both_layouts_accept_the_same_in_every_round(
    kind: str, number: int, tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    book, found = made.book(stop_ids=()), []
    for layout in ("bim", "batching", "paged"):
        session = graphs.session(
            "bim_plain",
            drafting(made, kind),
            book,
            outline=outline_of(5),
            budget=25,
            sets=(
                f"drafter.kind={kind}",
                *SETTINGS[kind][number],
                f"layout.kind={layout}",
                "layout.max_num_branches=3",
            ),
        )
        run = run_all(session, QUESTIONS[:1])
        found.append((tokens_of(run), accepted_of(run)))
    assert found[0] == found[1]
    rounds = [count for each in found[0][1].values() for branch in each for count in branch]
    assert sum(rounds) > 0, "nothing was ever accepted: nothing was tested"


@pytest.mark.parametrize("twin", ["eagle", "bim_eagle", "batching_eagle", "paged_eagle"])
def test_graphs_of_other_drafters_differ_in_nothing_else(twin: str, graphs: Graphs) -> None:
    """One word of a family: `bim_ngram` is `bim_eagle` but for its name and its drafter."""
    layout = twin.rpartition("eagle")[0]
    family = [n for n in graph_names() if _layout_of(n) == layout and n not in OTHERS]
    assert family
    for name in family:
        one, other = (open_source(n).data for n in (twin, name))
        assert one.keys() == other.keys()
        unlike = {k for k in one if one[k] != other[k]}
        assert unlike <= {"name", "doc", "drafter", *MORE.get(name, ())}, name


def _layout_of(name: str) -> str:
    return next((p for p in ("bim_", "batching_", "paged_") if name.startswith(p)), "")
