"""Requests that come late, are cancelled, or are many: what changes at once, and what is left.

That others keep their tokens, at any moment, is an axis of tests/runs/test_axes.py."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers import folds, support
from helpers.drafters import drafting, settings_of
from helpers.many import check, serve, short, sizes
from helpers.support import TokenBook, drive, start

from specsot.engine.models import Models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.request import Finish, Stage

FIRST, SECOND = "hello", "a second question"


@pytest.fixture
def session(made: support.Tiny) -> Callable[..., Session]:
    """session(graph, share, most branches, rows of a chunk); prompts and parts of several sizes."""

    def make(graph: str, share: str = "outline", most: int = 8, chunk: int = 1024) -> Session:
        book = support.PlanBook(130, share, ())
        book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
        sets = (f"layout.max_num_branches={most}", f"scheduler.max_num_batched_tokens={chunk}")
        return support.graphs.session(graph, made.models, book, budget=12, sets=sets)

    return make


@pytest.mark.parametrize("graph", support.FULL)
def test_a_second_outline_is_written_while_branches_of_the_first_run(
    graph: str, session: Any
) -> None:
    made = session(graph)
    run = drive(start(made, [FIRST]), until=lambda run: run.state == "parallel_prefill")
    run.manager.lifecycle.submit(made.request(Prompt("late", SECOND)))
    both = False
    while not run.finished:
        run.advance()
        stages = {(b.request.key, b.is_root) for b in run.branches}
        both = both or {("late", True), ("0", False)} <= stages
    assert both, "the second root branch was meant to run beside the first request's branches"
    assert [answer.key for answer in run.answers] == ["0", "late"]


@pytest.mark.parametrize("graph", [*support.GRAPHS, "paged_eagle"])
@pytest.mark.parametrize(("share", "chunk"), [("outline", 1024), ("prompt", 1024), ("outline", 5)])
def test_a_cancelled_request_ends_at_once_and_leaves_the_other_unchanged(
    share: str, chunk: int, graph: str, session: Any
) -> None:
    """What rows it had is given back at its end: `drive` compares pools and requests."""
    made = session(graph, share, chunk=chunk)
    alone = support.tokens_of(support.run_all(made, [Prompt("1", SECOND)]))["1"]
    end = support.run_all(made, [FIRST, SECOND]).steps - 5
    for step in sorted({1, 4, 7, end // 3, end // 2}):
        run = drive(start(made, [FIRST, SECOND]), until=lambda run, step=step: run.steps >= step)
        doomed = support.requests_of(run)[0]
        if doomed.finished:
            break
        run.manager.table.cancel("0")
        drive(run, until=lambda run, doomed=doomed: doomed.finished)
        assert run.steps <= step + 5, "at the next step that commits"
        written = [list(b.tokens) for b in doomed.all_branches()]
        drive(run)
        assert support.tokens_of(run)["1"] == alone, f"cancelled after step {step}"
        assert [list(b.tokens) for b in doomed.all_branches()] == written, "it is kept, and ends"
        assert Finish.CANCELLED in {b.finish for b in doomed.all_branches()}
        assert run.answers[0].sections[-1].finish in ("cancelled", "length")


@pytest.mark.parametrize("graph", support.GRAPHS)
def test_a_waiting_request_can_be_cancelled_before_it_got_a_row(graph: str, session: Any) -> None:
    made = session(graph, most=1)
    alone = support.tokens_of(support.run_all(made, [FIRST]))["0"]
    run = drive(start(made, [FIRST, SECOND]), until=lambda run: run.steps >= 4)
    waits = support.requests_of(run)[1]
    assert waits.stage is Stage.WAITING
    run.manager.table.cancel("1")
    drive(run)
    assert support.tokens_of(run) == {"0": alone, "1": [[]]}
    assert waits.branches[0].finish is Finish.CANCELLED and waits.root is None


@pytest.mark.parametrize("graph", support.GRAPHS)
def test_all_requests_may_be_cancelled(graph: str, session: Any) -> None:
    made = session(graph)
    for step in (0, 1, 4):
        run = drive(start(made, [FIRST, SECOND]), until=lambda run, step=step: run.steps >= step)
        for key in ("0", "1"):
            run.manager.table.cancel(key)
        drive(run)
        assert {s.finish for a in run.answers for s in a.sections} == {"cancelled"}
        assert run.manager.kv.current_length == run.manager.kv.idle_length


def test_cancelling_a_key_that_is_unknown_or_over_changes_nothing(session: Any) -> None:
    run = support.run_all(session("eagle"), [FIRST])
    before = support.tokens_of(run)
    run.manager.table.cancel("0")
    run.manager.table.cancel("unknown")
    assert support.tokens_of(run) == before
    assert support.requests_of(run)[0].branches[0].finish is Finish.LENGTH


TEXTS = [f"text {number}" for number in range(40)]


@pytest.mark.parametrize("layout", ["bim", "batching"])
def test_a_thousand_short_requests(layout: str, small: Models) -> None:
    check(serve(short(layout, small), TEXTS, 25), 1000)


KINDS = [("eagle3", 0), ("eagle3", 1), ("dflash", 0), ("vanilla", 1), ("ngram", 0), ("ngram", 1)]


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_drafters_forget_whom_they_drafted_for(kind: str, number: int, made: support.Tiny) -> None:
    session = support.graphs.session(
        "bim_plain",
        drafting(made, kind),
        made.book(stop_ids=()),
        outline=support.outline_of(3, {3: (1,)}),
        budget=5,
        sets=(*settings_of(kind, number), "scheduler.prefix_cache=false"),
    )
    check(serve(session, TEXTS[:4], 5), 20)


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_that_were_kept_to_be_combined_are_forgotten(parts: int, made: support.Tiny) -> None:
    outline = support.outline_of(parts)
    session = folds.session(support.graphs, made, *folds.REUSED, outline=outline, budget=4)
    check(serve(session, TEXTS[:3], 5), 15)


def test_beams_are_forgotten(small: Models) -> None:
    program = open_graph("beam", ("layout.kv_slots=2000", "beam.num_beams=3"), support.graphs.table)
    session = Session(program, small, max_new_tokens=4, prompts=TokenBook(130, "outline", ()))
    check(serve(session, TEXTS[:4], 5), 20)


def test_whatever_an_object_holds_is_seen(small: Models) -> None:
    manager = short("bim", small).board()["branches"]
    before = sizes(manager)
    manager.kv.regions[5] = None
    manager.samplers._counts[5] = None
    manager.table.segments.add()
    found = {path.split(".", 1)[1]: more for path, more in (sizes(manager) - before).items()}
    assert found == {"regions": 1, "_counts": 1, "segments.parent": 1, "segments.home": 1}
