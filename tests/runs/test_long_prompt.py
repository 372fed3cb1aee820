"""A long prompt arrives while eight branches decode: no step has more rows than the budget."""

from collections.abc import Callable

import pytest
from helpers.support import FixedBook, Graphs, Tiny, drive, start

from specsot.engine.prepare.inputs import Prompt
from specsot.states.machine import OpRan
from specsot.states.request import Finish

BUDGET, LONG, MANY = 64, 1500, 8


@pytest.mark.parametrize("admission", ["reserved", "optimistic"])
def test_the_others_go_on_in_every_step_and_no_step_is_larger_than_the_budget(
    admission: str, tiny: Callable[..., Tiny], graphs: Graphs
) -> None:
    prompts = {str(n): [9 + n] * 12 for n in range(MANY)} | {"long": [7] * LONG}
    sets = (f"scheduler.max_num_batched_tokens={BUDGET}", f"scheduler.admission={admission}")
    sets += ("layout.kv_slots=3000", f"layout.max_num_branches={MANY + 1}")
    session = graphs.session(
        "autoregressive",
        tiny("llama", max_positions=2048).models,
        FixedBook(prompts),
        budget=60,
        sets=sets,
    )
    rows = list[tuple[int, int]]()

    def see(event: object) -> None:
        if isinstance(event, OpRan) and event.op == "target.forward_":
            batch = run.board["batch"]
            rows.append((sum(len(span.tokens) for span in batch.spans), len(batch.ran)))

    run = start(session, [Prompt(str(n), str(n)) for n in range(MANY)], see)
    table = run.board["branches"].table
    drive(run, check=False, until=lambda run: len(table.active) == MANY)
    run.board["branches"].lifecycle.submit(session.request(Prompt("long", "long")))
    first, begun = table.requests[-1], len(rows)
    drive(run, check=False, until=lambda run: bool(first.branches))
    curve = rows[begun:]
    assert len(curve) >= LONG // (BUDGET - MANY) and max(map(sum, rows)) <= BUDGET
    assert {ran for _, ran in curve} == {MANY}, "everybody who decodes goes on in every step"
    assert max(new for new, _ in curve) == BUDGET - MANY, "and the prompt gets the rest"
    drive(run, check=False)
    assert first.branches[0].finish is Finish.LENGTH
