"""A simulation decides as a run does."""

from typing import Any

import pytest
from helpers.support import FixedBook, Graphs, Make, drive, requests_of, start

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.recorder import action_of
from specsot.engine.simulate.costs import StepCost
from specsot.engine.simulate.world import Arrival, Simulation
from specsot.states.scheduler import Inbox, StepPlan


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
def test_its_steps_are_those_of_a_run(
    policy: str, admission: str, tiny: Make, graphs: Graphs
) -> None:
    prompts = {f"q{n}": [7 + n] * (6 + 13 * n % 40) for n in range(9)}
    sets = ["limits.max_new_tokens=20", "layout.kv_slots=95", "layout.max_num_branches=6"]
    sets += [f"scheduler.policy={policy}", f"scheduler.admission={admission}"]
    sets.append("scheduler.max_num_batched_tokens=16")
    session = graphs.session("autoregressive", tiny("llama").models, FixedBook(prompts),
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
