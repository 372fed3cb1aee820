"""`specsot simulate`: policies compared on arrivals, without a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ...states.graph.graph import Graph
from ..record.run_folder import SavedRun
from ..record.trace import records_of
from .arrivals import Workload, arrivals
from .costs import StepCost, fit
from .figures import Served, table
from .world import Simulation


@dataclass(frozen=True, slots=True)
class Asked:
    """What to simulate: `spec` of arrivals, how many of them where they are made up."""

    spec: str
    count: int
    work: Workload
    policies: Sequence[str]
    seed: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of one policy: `wall` seconds of real time, `planning` of them in the scheduler."""

    served: Served
    wall: float
    planning: float

    def told(self) -> dict[str, Any]:
        plan = 1e6 * self.planning / max(self.served.steps, 1)
        rate = self.served.requests / self.wall if self.wall else 0.0
        speed = {"wall_seconds": self.wall, "requests_per_wall_second": rate}
        return {**self.served.told(), **speed, "microseconds_per_plan": plan}


def simulate(graph: Graph, cost: StepCost, asked: Asked) -> dict[str, Simulated]:
    """All policies on the same arrivals."""
    found = {}
    for policy in asked.policies:
        world = Simulation(graph, cost, policy, asked.seed)
        began = perf_counter()
        served = world.run(arrivals(asked.spec, asked.count, asked.work, asked.seed))
        found[policy] = Simulated(served, perf_counter() - began, world.busy)
    return found


def described(found: dict[str, Simulated]) -> str:
    """A table, and what it took."""
    lines = [table({name: one.served for name, one in found.items()})]
    for name, one in found.items():
        told = one.told()
        speed = f"{told['requests_per_wall_second']:.0f} requests a second"
        plan = f"{told['microseconds_per_plan']:.0f} us a plan"
        steps = f"{one.served.steps} steps, most waiting {one.served.waited}"
        lines.append(f"{name}: simulated in {one.wall:.1f} s ({speed}, {plan}); {steps}")
    return "\n".join(lines)


def fitted(run: SavedRun, target: Path) -> StepCost:
    """The costs of a kept run's steps, saved."""
    cost = fit(list(records_of(run)))
    cost.save(target)
    return cost
