"""Requests that come late and that are cancelled: what changes at once, and what others see of it.

That others keep their tokens, at any moment, is an axis of tests/runs/test_axes.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.support import (
    FULL,
    GRAPHS,
    Graphs,
    Make,
    PlanBook,
    drive,
    requests_of,
    run_all,
    start,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.request import Finish, Stage

FIRST, SECOND = "hello", "a second question"


@pytest.fixture
def session(tiny: Make, graphs: Graphs) -> Callable[..., Session]:
    """session(graph, share, max_num_branches): its requests differ in prompts and branches."""

    def make(graph: str, share: str = "outline", most: int = 8) -> Session:
        book = PlanBook(130, share, ())
        book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
        sets = (f"layout.max_num_branches={most}",)
        return graphs.session(graph, tiny("llama").models, book, budget=12, sets=sets)

    return make


@pytest.mark.parametrize("graph", FULL)
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


@pytest.mark.parametrize("graph", ["eagle", "bim_eagle", "batching_eagle", "paged_eagle"])
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_cancelling_frees_a_requests_rows_and_leaves_the_other_unchanged(
    graph: str, share: str, session: Any
) -> None:
    made = session(graph, share)
    alone = tokens_of(run_all(made, [Prompt("1", SECOND)]))["1"]
    end = run_all(made, [FIRST, SECOND]).steps - 5
    for step in sorted({1, 4, 7, end // 3, end // 2}):
        run = drive(start(made, [FIRST, SECOND]), until=lambda run, step=step: run.steps >= step)
        doomed = requests_of(run)[0]
        if doomed.finished:
            break
        run.manager.table.cancel("0")
        drive(run, until=lambda run, doomed=doomed: doomed.finished)
        owners = {doomed.prefix_owner, *(b.owner for b in doomed.all_branches())}
        cache = run.manager.prefixes
        idle = set(cache.nodes) if cache is not None else set[int]()
        for pool in run.manager.pools:
            assert not owners & set(pool.owner.tolist()) - idle, "its rows are given back"
        assert not owners & {s.owner for s in run.manager.drafter.inbox}
        assert not owners & {b.owner for b in run.branches}
        written = [list(b.tokens) for b in doomed.all_branches()]
        drive(run)
        assert tokens_of(run)["1"] == alone, f"cancelled after step {step}"
        assert [list(b.tokens) for b in doomed.all_branches()] == written, "it is kept, and ends"
        assert Finish.CANCELLED in {b.finish for b in doomed.all_branches()}
        assert run.answers[0].sections[-1].finish in ("cancelled", "length")


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_cancelled_request_leaves_at_the_next_step_that_commits(graph: str, session: Any) -> None:
    run = drive(start(session(graph), [FIRST, SECOND]), until=lambda run: run.steps >= 4)
    run.manager.table.cancel("1")
    for _ in range(4):
        run.advance()
    assert requests_of(run)[1].finished


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_waiting_request_can_be_cancelled_before_it_got_a_row(graph: str, session: Any) -> None:
    made = session(graph, most=1)
    alone = tokens_of(run_all(made, [FIRST]))["0"]
    run = drive(start(made, [FIRST, SECOND]), until=lambda run: run.steps >= 4)
    waits = requests_of(run)[1]
    assert waits.stage is Stage.WAITING
    run.manager.table.cancel("1")
    drive(run)
    assert tokens_of(run) == {"0": alone, "1": [[]]}
    assert waits.branches[0].finish is Finish.CANCELLED and waits.root is None


@pytest.mark.parametrize("graph", GRAPHS)
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
    run = run_all(session("eagle"), [FIRST])
    before = tokens_of(run)
    run.manager.table.cancel("0")
    run.manager.table.cancel("unknown")
    assert tokens_of(run) == before
    assert requests_of(run)[0].branches[0].finish is Finish.LENGTH
