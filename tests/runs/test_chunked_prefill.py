"""`max_num_batched_tokens`: long prompts are read in chunks, and no forward has more rows."""

import pytest
from helpers.support import (
    FIXED,
    FixedBook,
    Graphs,
    Make,
    PlanBook,
    Tiny,
    drive,
    requests_of,
    start,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.trace import action_of
from specsot.engine.run.session import Session
from specsot.states.machine import OpRan
from specsot.states.request import Finish, Stage
from specsot.states.scheduler import MIN_CHUNK

TEXTS = [Prompt(str(n), f"question {n}", max_new_tokens=5 + n * 5 % 11) for n in range(4)]
BUDGET, LONG, MANY = 64, 1500, 8


def session_of(graph: str, made: Tiny, graphs: Graphs, most: int, *sets: str) -> Session:
    book = PlanBook(130, "outline", ())
    book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
    sets = (*sets, "layout.max_num_branches=4", f"scheduler.max_num_batched_tokens={most}")
    return graphs.session(graph, made.models, book, sets=sets)


@pytest.mark.parametrize(
    ("layout", "admission"),
    [("bim", "reserved"), ("bim", "optimistic"), ("batching", "reserved"), ("paged", "reserved")],
)
def test_others_go_on_in_every_step_and_no_step_is_larger_than_the_budget(
    layout: str, admission: str, tiny: Make, graphs: Graphs
) -> None:
    """A long prompt arrives while eight branches decode."""
    prompts = {str(n): [9 + n] * 12 for n in range(MANY)} | {"long": [7] * LONG}
    sets = (f"scheduler.max_num_batched_tokens={BUDGET}", f"scheduler.admission={admission}")
    sets += ("layout.kv_slots=3000", f"layout.max_num_branches={MANY + 1}", f"layout.kind={layout}")
    models = tiny("llama", max_positions=2048).models
    session = graphs.session("autoregressive", models, FixedBook(prompts), budget=60, sets=sets)
    rows, seen = list[tuple[int, int]](), set()

    def see(event: object) -> None:
        if isinstance(event, OpRan) and event.op == "target.forward_":
            batch = run.board["batch"]
            rows.append((sum(len(span.tokens) for span in batch.spans), len(batch.ran)))
        if isinstance(event, OpRan) and "step" in event.results:
            seen.add((action_of(run.board["step"]), bool(run.board["step"].chunks)))

    run = start(session, [Prompt(str(n), str(n)) for n in range(MANY)], see)
    drive(run, check=False, until=lambda run: len(run.branches) == MANY)
    run.manager.lifecycle.submit(session.request(Prompt("long", "long")))
    first, start_row = run.requests[-1], len(rows)
    drive(run, check=False, until=lambda run: bool(first.branches))
    curve = rows[start_row:]
    assert len(curve) >= LONG // (BUDGET - MANY) and max(map(sum, rows)) <= BUDGET
    assert {ran for _, ran in curve} == {MANY}, "all that decode go on in every step"
    assert max(new for new, _ in curve) == BUDGET - MANY, "and the prompt gets the rest"
    drive(run, check=False)
    assert first.branches[0].finish is Finish.LENGTH and ("round", True) in seen


def test_trees_that_take_all_rows_leave_some_for_prompts(tiny: Make, graphs: Graphs) -> None:
    run, chunks = start(session_of("eagle", tiny("llama"), graphs, 1, *FIXED), TEXTS), []
    while not run.finished:
        drive(run, until=lambda run, steps=run.steps: run.steps > steps)
        if run.state == "schedule":
            chunks += [count for _, count in run.board["step"].chunks]
    assert chunks and max(chunks) == MIN_CHUNK


@pytest.mark.parametrize("graph", ["eagle", "bim_eagle", "batching_eagle", "paged_eagle"])
def test_a_request_that_is_cancelled_while_it_is_read_gives_everything_back(
    graph: str, tiny: Make, graphs: Graphs
) -> None:
    session = session_of(graph, tiny("llama"), graphs, 5)
    expected = tokens_of(drive(start(session, TEXTS)))
    run = start(session, TEXTS)
    drive(run, until=lambda run: any(r.stage is Stage.PREFILL for r in requests_of(run)))
    doomed = next(r for r in requests_of(run) if r.stage is Stage.PREFILL)
    run.manager.table.cancel(doomed.key)
    drive(run)
    assert [b.finish for b in doomed.branches] == [Finish.CANCELLED]
    assert tokens_of(run) | {doomed.key: []} == expected | {doomed.key: []}


def test_beams_are_searched_behind_chunks(tiny: Make, graphs: Graphs) -> None:
    made, found = tiny("llama"), []
    for most in ("layout.order=fcfs", "scheduler.max_num_batched_tokens=11"):
        sets = ("layout.max_num_branches=3", most)
        session = graphs.session("beam", made.models, made.book(), sets=sets)
        found.append(tokens_of(drive(start(session, TEXTS), check=False)))
    assert found[0] == found[1]
