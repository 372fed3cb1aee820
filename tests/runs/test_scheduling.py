"""What starts next, what makes way, and prompts that are read in chunks; never another token.
A simulation decides as a run does."""

import json
from typing import Any

import pytest
from helpers.drafters import drafting, settings_of
from helpers.support import (
    FIXED,
    FULL,
    GOLDEN,
    FixedBook,
    Make,
    PlanBook,
    Tiny,
    branches_of,
    drive,
    graphs,
    outline_of,
    outline_with,
    requests_of,
    start,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.recorder import action_of
from specsot.engine.run.core import EngineCore
from specsot.engine.simulate.costs import StepCost
from specsot.engine.simulate.world import Arrival, Simulation
from specsot.states.machine import OpRan
from specsot.states.request import Finish
from specsot.states.scheduler import MIN_CHUNK, Inbox, StepPlan
from specsot.states.text.outline import Outline

LENGTHS = (40, 90, 40, 10, 75, 90)
STARTS = {
    "fcfs": [0, 1, 2, 3, 4, 5],
    "longest_first": [1, 5, 4, 0, 2, 3],  # equal ones in reading order
    "shortest_first": [3, 0, 2, 4, 1, 5],
}
ONE_DEVICE = [
    case
    for case in json.loads((GOLDEN / "specsot" / "scheduler.json").read_text())
    if len(case["compute"]) == 1
]


def started(run: EngineCore) -> list[int]:
    order: list[int] = []

    def note(run: EngineCore) -> bool:
        book = run.manager
        order.extend(b.index for b in book.active if not b.is_root and b.index not in order)
        return False

    drive(run, until=note)
    assert all(b.ended for b in branches_of(run))
    return order


def run_of(graph: str, outline: Outline, made: Tiny, **layout: Any) -> EngineCore:
    sets = [f"layout.{key}={value}" for key, value in layout.items()]
    book = made.book(stop_ids=())
    return start(graphs.session(graph, made.models, book, outline=outline, sets=sets), ["hello"])


@pytest.mark.parametrize("graph", FULL)
@pytest.mark.parametrize("most", [1, 2, 3])
def test_branches_start_in_the_order_asked_for_and_no_token_changes(
    graph: str, most: int, made: Tiny
) -> None:
    found = []
    for order, expected in STARTS.items():
        run = run_of(graph, outline_with(LENGTHS), made, max_num_branches=most, order=order)
        assert started(run) == expected, order
        found.append(tokens_of(run))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("graph", ["bim_plain", "batching_plain"])
def test_a_branch_that_is_not_ready_lets_others_go_first(graph: str, made: Tiny) -> None:
    outline = outline_with((20, 90, 50, 10, 5), {2: (4,)})
    run = run_of(graph, outline, made, max_num_branches=1, order="longest_first")
    assert started(run) == [2, 0, 3, 1, 4]


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
@pytest.mark.parametrize("case", ONE_DEVICE, ids=lambda case: f"{case['predicted']}")
def test_one_device_starts_the_schedulers_batches(
    layout: str, case: dict[str, Any], made: Tiny
) -> None:
    predicted, batches = case["predicted"], case["lpt"]["0"]["batches"]
    most = {"max_num_branches": case["max_parallel"], "order": "longest_first"}
    run = run_of(f"{layout}_plain", outline_with(predicted), made, **most)
    drive(run, until=lambda run: run.state == "parallel_prefill")
    assert [b.index for b in run.branches] == batches[0]
    assert started(run) == [index for batch in batches for index in batch]
    last = len(predicted) - 1
    back = run_of(f"{layout}_plain", outline_with(predicted[::-1]), made, **most)
    assert [last - index for index in started(back)] == case["lpt"]["0"]["assigned"]


OPTIMISTIC, SMALL = "scheduler.admission=optimistic", "layout.kv_slots=320"


class LongBook(PlanBook):
    """Prompts long enough to be cached."""

    text = "PLAN\n1|5|-|-|One\n2|4|-|1|Two\n3|5|-|-|Three\n4|3|-|-|Four\nEND"

    def ids(self, text: str, low: int, high: int) -> list[int]:
        more = 70 if text.startswith("prefix") else 0
        return super().ids(text, low + more, high + more)


@pytest.mark.parametrize("kind", ("eagle3", "ngram"))
def test_a_pool_barely_larger_than_one_request(kind: str, made: Tiny) -> None:
    found, preemptions = [], []
    prompts = [
        Prompt(str(n), f"question {n}", max_new_tokens=70, cache_salt="ab"[n]) for n in range(2)
    ]
    for more in (("layout.kv_slots=2000",), (SMALL,), (SMALL, OPTIMISTIC)):
        sets = (*settings_of(kind, 0), "layout.max_num_branches=4", *more)
        book = LongBook(130, "outline", ())
        models = drafting(made, kind)
        session = graphs.session("bim_plain", models, book, sets=sets)
        run = drive(start(session, prompts), check=OPTIMISTIC in sets)
        found.append(tokens_of(run))
        preemptions.append(run.manager.lifecycle.preemptions)
    assert found[0] == found[1] == found[2]
    assert preemptions[:2] == [0, 0] and preemptions[2] > 1


@pytest.mark.parametrize(("merge", "makes_way"), [("concat", True), ("attend", False)])
def test_parts_that_stay_until_they_are_combined_are_reserved(
    merge: str, makes_way: bool, made: Tiny
) -> None:
    graph = {"concat": "bim_plain", "attend": "bim_attend_merge"}[merge]
    sets = [OPTIMISTIC, "skeleton.grammar=false"]
    book = LongBook(130, "outline", ())
    session = graphs.session(graph, made.models, book, sets=sets)
    assert start(session, []).manager.admission.optimistic is makes_way


BUDGET, LONG, MANY = 64, 1500, 8


@pytest.mark.parametrize(
    ("layout", "admission"),
    [("bim", "reserved"), ("bim", "optimistic"), ("batching", "reserved"), ("paged", "reserved")],
)
def test_others_go_on_in_every_step_and_no_step_is_larger_than_the_budget(
    layout: str, admission: str, tiny: Make
) -> None:
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


def test_trees_that_take_all_rows_leave_some_for_prompts(made: Tiny) -> None:
    chunks = []
    sets = (*FIXED, "layout.max_num_branches=4", "scheduler.max_num_batched_tokens=1")
    run = start(graphs.session("eagle", made.models, made.book(), sets=sets), [*"abcd"])
    while not run.finished:
        drive(run, until=lambda run, steps=run.steps: run.steps > steps)
        if run.state == "schedule":
            chunks += [count for _, count in run.board["step"].chunks]
    assert chunks and max(chunks) == MIN_CHUNK


@pytest.mark.parametrize("graph", FULL)
def test_one_long_branch_does_not_starve_the_others(graph: str, made: Tiny) -> None:
    ended = list[int]()
    sets = ("layout.max_num_branches=2",)
    session = graphs.session(
        graph, made.models, made.book(stop_ids=()), outline=outline_of(5), budget=60, sets=sets
    )
    run = drive(start(session, ["hello"]), until=lambda run: run.state == "parallel_prefill")
    for branch in branches_of(run)[1:]:
        branch.budget = 6

    def note(run: EngineCore) -> bool:
        ended.extend(b.index for b in branches_of(run) if b.finish and b.index not in ended)
        return False

    note(drive(run, until=note))
    assert len(ended) == 5 and ended[-1] == 0, "the long one ends last"
    assert [len(b.tokens) for b in branches_of(run)] == [60, 6, 6, 6, 6]


# -- a simulation decides as a run does -----------------------------------------------------------


def told(steps: list[StepPlan]) -> list[tuple[Any, ...]]:
    return [
        (
            action_of(one),
            len(one.starting),
            len(one.requests),
            len(one.chunks),
            one.running,
            one.waiting,
        )
        for one in steps
        if action_of(one) not in ("answer", "rest")
    ]


def watch(manager: Any) -> list[StepPlan]:
    steps, plan = list[StepPlan](), manager.scheduler.plan_

    def plan_(*, serves: bool) -> StepPlan:
        steps.append(plan(serves=serves))
        return steps[-1]

    manager.scheduler.plan_ = plan_
    return steps


@pytest.mark.parametrize("admission", ["reserved", "optimistic"])
@pytest.mark.parametrize("policy", ["fcfs", "max_throughput"])
def test_its_steps_are_those_of_a_run(policy: str, admission: str, made: Tiny) -> None:
    prompts = {f"q{n}": [7 + n] * (6 + 13 * n % 40) for n in range(9)}
    sets = ["limits.max_new_tokens=20", "layout.kv_slots=95", "layout.max_num_branches=6"]
    sets += [f"scheduler.policy={policy}", f"scheduler.admission={admission}"]
    sets.append("scheduler.max_num_batched_tokens=16")
    session = graphs.session("autoregressive", made.models, FixedBook(prompts),
                             budget=None, sets=sets)  # fmt: skip
    run = start(session, [Prompt(name, name) for name in prompts])
    real = watch(run.manager)
    drive(run, check=False)
    assert all(len(r.branches[0].tokens) == 20 for r in requests_of(run))
    world = Simulation(session.program.graph, StepCost(), policy)
    world._inbox = Inbox()
    mine = watch(world.manager)
    served = world.run(Arrival(0.0, len(ids), (20,)) for ids in prompts.values())
    assert told(mine) == told(real) and served.tokens == 180
    assert served.preemptions == run.manager.lifecycle.preemptions
    assert bool(served.preemptions) == (admission == "optimistic")
