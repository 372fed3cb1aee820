"""Combined answers that are cancelled, or with exactly enough room for them, or one slot less."""

from functools import partial
from typing import Any

import pytest
from helpers.folds import REUSED, combined_of, session
from helpers.support import FIXED, Graphs, Make, Tiny, drive, outline_of, run_all, start, tokens_of

from specsot.engine.events import finish_of
from specsot.engine.record.report import uncombined
from specsot.states.request import Finish, Stage

TEXTS = ("hello", "another question", "a third")
LAYOUTS = pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
GRAPHS = pytest.mark.parametrize("graph", ["bim_blend_merge", "bim_attend_merge"])


@pytest.fixture
def made(tiny: Make) -> Tiny:
    return tiny("llama", context=2.0)


def sets_of(graph: str, layout: str) -> tuple[str, ...]:
    return (*(REUSED if "blend" in graph else ()), f"layout.kind={layout}")


@GRAPHS
@LAYOUTS
@pytest.mark.parametrize("at", ["parts", "waits", "runs"])
def test_a_cancelled_request_leaves_its_parts_and_no_row(
    at: str, layout: str, graph: str, made: Tiny, graphs: Graphs
) -> None:
    sets = sets_of(graph, layout)
    opened = session(graphs, made, *sets, outline=outline_of(3), budget=20, graph=graph)
    others = tokens_of(run_all(opened, TEXTS))
    run = start(opened, TEXTS)
    first = run.requests[0]
    stage = Stage.WAITING if at == "waits" else Stage.RUNNING

    def holds(run: Any) -> bool:
        if at == "parts":
            return any(branch.ended for branch in first.branches)
        return any(branch.combines and branch.stage is stage for branch in first.branches)

    drive(run, until=holds)
    run.manager.table.cancel("0")
    drive(run)
    if not run.answers[0].combined:
        assert at == "parts" or combined_of(first).finish is Finish.CANCELLED
    assert {k: tokens_of(run)[k] for k in "12"} == {k: others[k] for k in "12"}
    answer = run.answers[0]
    assert answer.sections[0].text in answer.text, "its parts are what it has"
    assert finish_of(answer) == "cancelled" and run.manager.kv.needed_length == 0


@GRAPHS
@LAYOUTS
@pytest.mark.parametrize("nodes", [0, 6])
def test_what_just_fits_is_combined_and_with_one_slot_less_the_parts_stand_alone(
    nodes: int, layout: str, graph: str, made: Tiny, graphs: Graphs
) -> None:
    folds, budget = "blend" in graph, 60 if "blend" in graph else 20
    drafter = ("drafter.kind=eagle3", *FIXED) if nodes else ("drafter.kind=none",)
    # As many branches side by side as take less room than the combined answer.
    sets = (*sets_of(graph, layout), *drafter, "layout.max_num_branches=1")
    opened = partial(session, graphs, made, outline=outline_of(4), budget=budget, graph=graph)
    wide = run_all(opened(*sets), ["hello"])
    (request,) = wide.requests
    parts = 0 if folds else sum(branch.num_tokens for branch in request.parts)
    rows = parts + len(combined_of(request).prompt) + budget
    needed = request.prefix_length + rows + nodes + 1
    for capacity in (needed, needed - 1):
        run = run_all(opened(*sets, f"layout.kv_slots={capacity}"), ["hello"])
        (one,), answers = run.requests, run.answers
        if capacity == needed:
            assert tokens_of(run) == tokens_of(wide) and not uncombined(answers)
            continue
        note = f"needs {needed} slots, the pool has {capacity}"
        assert combined_of(one).finish is Finish.REFUSED and combined_of(one).note == note
        assert tokens_of(run)["0"][:-1] == tokens_of(wide)["0"][:-1]
        assert uncombined(answers) == [f"request 0: the parts are not combined: {note}"]
        assert finish_of(answers[0]) == "length"
        assert all(section.text in answers[0].text for section in answers[0].sections)
