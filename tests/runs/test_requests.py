"""Several requests in one run: each gives the tokens of its own run, whatever the others do."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.support import (
    FULL,
    GRAPHS,
    PLAIN,
    Graphs,
    PlanBook,
    Tiny,
    TokenBook,
    check_lossless,
    drive,
    requests_of,
    run_all,
    start,
    taking_turns,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.machine import Run
from specsot.states.request import Finish, Stage

Make = Callable[..., Tiny]
FIRST, SECOND = "hello", "a second question"


@pytest.fixture
def session(tiny: Make, graphs: Graphs) -> Callable[..., tuple[Session, TokenBook]]:
    """session(graph, share, max_num_branches): its requests differ in prompts and branches."""

    def make(graph: str, share: str = "outline", most: int = 8) -> tuple[Session, TokenBook]:
        book = PlanBook(130, share, ())
        book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
        sets = (f"layout.max_num_branches={most}",)
        return graphs.session(graph, tiny("llama").models, book, budget=12, sets=sets), book

    return make


def own_tokens(session: Session, key: str, text: str) -> list[list[int]]:
    """The tokens of a request that has a run to itself."""
    run = session.start([Prompt(key, text)], lambda event: None)
    return tokens_of(drive(run))[key]


def submit(run: Run, session: Session, key: str, text: str) -> None:
    run.board["branches"].lifecycle.submit(session.request(Prompt(key, text)))


def last_step(session: Session) -> int:
    return run_all(session, [FIRST]).steps


MODES = (("outline", 8), ("prompt", 2), ("outline", 1))


@pytest.mark.parametrize(("graph", "mode"), taking_turns(GRAPHS, MODES))
def test_a_second_request_may_come_at_any_step_and_both_keep_their_tokens(
    graph: str, mode: tuple[str, int], session: Any, tiny: Make
) -> None:
    made, book = session(graph, *mode)
    alone = {"0": own_tokens(made, "0", FIRST), "late": own_tokens(made, "late", SECOND)}
    end = last_step(made) - 5  # `schedule`, `merge`, `schedule`, `idle` and `done` follow
    for step in sorted({1, end // 2, end - 1, end + 2}):  # the last one: in `merge`
        run = drive(start(made, [FIRST]), until=lambda run, step=step: run.steps >= step)
        submit(run, made, "late", SECOND)
        drive(run)
        assert tokens_of(run) == alone, f"submitted after step {step}"
        assert [a.key for a in run.board["answers"]] == ["0", "late"]
    check_lossless(run, book, tiny("llama").reference, graph in PLAIN)


@pytest.mark.parametrize("graph", FULL)
def test_a_second_outline_is_written_while_branches_of_the_first_run(
    graph: str, session: Any
) -> None:
    made, _ = session(graph)
    run = start(made, [FIRST])
    drive(run, until=lambda run: run.state == "parallel_prefill")
    submit(run, made, "late", SECOND)
    both = False
    while not run.finished:
        run.advance()
        stages = {(b.request.key, b.is_root) for b in run.board["branches"].active}
        both = both or {("late", True), ("0", False)} <= stages
    assert both, "the second root branch was meant to run beside the first request's branches"


@pytest.mark.parametrize("graph", ["eagle", "bim_eagle", "batching_eagle", "paged_eagle"])
@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_cancelling_frees_a_requests_rows_and_leaves_the_other_unchanged(
    graph: str, share: str, session: Any
) -> None:
    made, _ = session(graph, share)
    alone = own_tokens(made, "1", SECOND)
    end = run_all(made, [FIRST, SECOND]).steps - 5
    for step in sorted({1, 4, 7, end // 3, end // 2}):
        run = drive(start(made, [FIRST, SECOND]), until=lambda run, step=step: run.steps >= step)
        book, doomed = run.board["branches"], requests_of(run)[0]
        if doomed.finished:
            break
        book.table.cancel("0")
        drive(run, until=lambda run, doomed=doomed: doomed.finished)
        owners = {doomed.prefix_owner, *(b.owner for b in doomed.all_branches())}
        for pool in (run.board["kv"], run.board["kv_draft"]):
            idle = set(book.prefixes.nodes) if book.prefixes is not None else set[int]()
            assert not owners & set(pool.owner.tolist()) - idle, "its rows are given back"
        assert not owners & {s.owner for s in book.drafter.inbox}
        assert not owners & {b.owner for b in book.active}
        written = [list(b.tokens) for b in doomed.all_branches()]
        drive(run)
        assert tokens_of(run)["1"] == alone, f"cancelled after step {step}"
        assert [list(b.tokens) for b in doomed.all_branches()] == written, "it is kept, and ends"
        ends = {b.finish for b in doomed.all_branches()}
        assert Finish.CANCELLED in ends and ends <= {*Finish}
        assert run.board["answers"][0].sections[-1].finish in ("cancelled", "length")


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_cancelled_request_leaves_at_the_next_step_that_commits(graph: str, session: Any) -> None:
    made, _ = session(graph)
    run = drive(start(made, [FIRST, SECOND]), until=lambda run: run.steps >= 4)
    run.board["branches"].table.cancel("1")
    for _ in range(4):
        run.advance()
    assert requests_of(run)[1].finished


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_waiting_request_can_be_cancelled_before_it_got_a_row(graph: str, session: Any) -> None:
    made, _ = session(graph, most=1)
    alone = own_tokens(made, "0", FIRST)
    run = drive(start(made, [FIRST, SECOND]), until=lambda run: run.steps >= 4)
    waits = requests_of(run)[1]
    assert waits.stage is Stage.WAITING
    run.board["branches"].table.cancel("1")
    drive(run)
    assert tokens_of(run) == {"0": alone, "1": [[]]}
    assert waits.branches[0].finish is Finish.CANCELLED
    assert waits.root is None


@pytest.mark.parametrize("graph", GRAPHS)
def test_everybody_may_be_cancelled(graph: str, session: Any) -> None:
    made, _ = session(graph)
    for step in (0, 1, 4):
        run = drive(start(made, [FIRST, SECOND]), until=lambda run, step=step: run.steps >= step)
        for key in ("0", "1"):
            run.board["branches"].table.cancel(key)
        drive(run)
        assert {s.finish for a in run.board["answers"] for s in a.sections} == {"cancelled"}
        assert run.board["kv"].current_length == run.board["kv"].idle_length


@pytest.mark.parametrize("graph", GRAPHS)
def test_one_after_another_is_the_same_as_side_by_side(graph: str, session: Any) -> None:
    """max_num_branches 1: every request and every branch waits for the one before it."""
    most = 0
    made, _ = session(graph, most=1)
    run = start(made, [FIRST, SECOND, "a third one"])
    while not run.finished:
        run.advance()
        most = max(most, len(run.board["branches"].active))
    assert most == 1
    wide, _ = session(graph, most=16)
    assert tokens_of(run) == tokens_of(run_all(wide, [FIRST, SECOND, "a third one"]))


def test_cancelling_a_key_that_is_not_there_or_over_changes_nothing(session: Any) -> None:
    made, _ = session("eagle")
    run = run_all(made, [FIRST])
    before = tokens_of(run)
    run.board["branches"].table.cancel("0")
    run.board["branches"].table.cancel("nobody")
    assert tokens_of(run) == before
    assert requests_of(run)[0].branches[0].finish is Finish.LENGTH
