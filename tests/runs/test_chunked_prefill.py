"""`max_num_batched_tokens`: long prompts are read in chunks with running ones; same tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.drafters import drafting
from helpers.support import (
    FIXED,
    GRAPHS,
    PLAIN,
    Graphs,
    PlanBook,
    Tiny,
    check_lossless,
    drive,
    requests_of,
    start,
    taking_turns,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.trace import action_of
from specsot.engine.run.session import Session
from specsot.states.machine import OpRan, Run
from specsot.states.request import Finish, Stage
from specsot.states.scheduler import MIN_CHUNK

Make = Callable[..., Tiny]
TEXTS = [Prompt(str(n), f"question {n}", max_new_tokens=5 + n * 5 % 11) for n in range(4)]


def session_of(
    graph: str, made: Tiny, graphs: Graphs, most: int | None, share: str = "outline", *sets: str
) -> tuple[Session, PlanBook]:
    book = PlanBook(130, share, ())
    book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
    sets = (*sets, "layout.max_num_branches=4")
    if most is not None:
        sets = (*sets, f"scheduler.max_num_batched_tokens={most}")
    return graphs.session(graph, made.models, book, sets=sets), book


@pytest.mark.parametrize(("graph", "share"), taking_turns(GRAPHS, ("outline", "prompt")), ids=str)
def test_chunks_of_any_size_give_the_same_tokens(
    graph: str, share: str, tiny: Make, graphs: Graphs
) -> None:
    found = []
    for most in (None, 3, 17, 64):
        session, book = session_of(graph, tiny("llama"), graphs, most, share)
        run = drive(start(session, TEXTS))
        found.append(tokens_of(run))
        for pool in run.board["branches"].pools:
            assert pool.needed_length == 0
    assert found[0] == found[1] == found[2] == found[3]
    check_lossless(run, book, tiny("llama").reference, graph in PLAIN)


@pytest.mark.parametrize("kind", ["eagle3", "vanilla", "ngram", "dflash"])
@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_every_drafter_reads_chunks(kind: str, layout: str, tiny: Make, graphs: Graphs) -> None:
    made, found = tiny("qwen3"), []
    for most in ("", "scheduler.max_num_batched_tokens=9"):
        sets = (f"drafter.kind={kind}", f"layout.kind={layout}", "layout.max_num_branches=3", most)
        session = graphs.session(
            "autoregressive", drafting(made, kind), made.book(), sets=tuple(filter(None, sets))
        )
        run = drive(start(session, TEXTS))
        found.append((tokens_of(run), taus(run)))
    assert found[0] == found[1], "nor is any draft another one"


def taus(run: Run) -> list[Any]:
    return [list(b.accepted) for r in requests_of(run) for b in r.branches]


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_no_forward_has_more_rows_than_its_budget(layout: str, tiny: Make, graphs: Graphs) -> None:
    """A long prompt arrives while others decode: they go on in every step."""
    most, rows, seen = 24, [], set()
    session, _ = session_of("autoregressive", tiny("llama"), graphs, most, "outline",
                            f"layout.kind={layout}")  # fmt: skip
    plain = session.prompts.plain
    session.prompts.plain = lambda q, d=None: plain(q) + [7] * 300 if "long" in q else plain(q)

    def see(event: object) -> None:
        if isinstance(event, OpRan) and event.op == "target.forward_":
            batch = run.board["batch"]
            rows.append(sum(len(span.tokens) for span in batch.spans) + len(batch.ran))
        if isinstance(event, OpRan) and "step" in event.results:
            seen.add((action_of(run.board["step"]), bool(run.board["step"].chunks)))

    run = session.start([Prompt(str(n), f"short {n}", max_new_tokens=40) for n in range(2)], see)
    while run.steps < 30:
        run.advance()
    before = {b.name: len(b.tokens) for b in run.board["branches"].active}
    run.board["branches"].lifecycle.submit(session.request(Prompt("long", "long")))
    first = run.board["branches"].requests[-1]
    forwards = len(rows)
    while first.stage is not Stage.RUNNING:
        run.advance()
    steps = len(rows) - forwards
    assert steps >= 300 // most and max(rows) <= most
    for branch in run.board["branches"].active:
        if branch.name in before:
            assert len(branch.tokens) - before[branch.name] >= steps - 1
    drive(run)
    assert ("round", True) in seen and {b.finish for b in first.branches} == {Finish.LENGTH}


def test_trees_that_take_all_rows_leave_some_for_prompts(tiny: Make, graphs: Graphs) -> None:
    session, _ = session_of("eagle", tiny("llama"), graphs, 1, "outline", *FIXED)
    run, chunks = start(session, TEXTS), []
    while not run.finished:
        drive(run, until=lambda run, steps=run.steps: run.steps > steps)
        if run.state == "schedule":
            chunks += [count for _, count in run.board["step"].chunks]
    assert chunks and max(chunks) == MIN_CHUNK


@pytest.mark.parametrize("graph", ["eagle", "bim_eagle", "batching_eagle", "paged_eagle"])
def test_a_request_that_is_cancelled_while_it_is_read_gives_everything_back(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    session, _ = session_of(graph, tiny("llama"), graphs, 5)
    wanted = tokens_of(drive(start(session, TEXTS)))
    run = start(session, TEXTS)
    drive(run, until=lambda run: any(r.stage is Stage.PREFILL for r in requests_of(run)))
    doomed = next(r for r in requests_of(run) if r.stage is Stage.PREFILL)
    run.board["branches"].table.cancel(doomed.key)
    drive(run)
    assert [b.finish for b in doomed.branches] == [Finish.CANCELLED]
    assert {k: v for k, v in tokens_of(run).items() if k != doomed.key} == {
        k: v for k, v in wanted.items() if k != doomed.key
    }


def test_beams_are_searched_behind_chunks(tiny: Make, graphs: Graphs) -> None:
    made, found = tiny("llama"), []
    for most in ("layout.order=fcfs", "scheduler.max_num_batched_tokens=11"):
        session = graphs.session(
            "beam", made.models, made.book(), sets=("layout.max_num_branches=3", most)
        )
        found.append(tokens_of(drive(start(session, TEXTS), check=False)))
    assert found[0] == found[1]
