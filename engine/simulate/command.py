"""`specsot simulate`: policies or clusters compared on the same arrivals, without a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ...models.families import decoder_config
from ...models.files import ModelError
from ...states.graph.graph import Graph
from ..errors import UsageError
from ..record.run_folder import SavedRun
from ..record.trace import records_of
from .arrivals import Workload, arrivals
from .cluster import ClusterSetup, ClusterSimulation
from .costs import SHAPES, ModelShape, StepCost, fit, link_of
from .figures import ClusterFigures, ServedFigures, cluster_table, table
from .world import Simulation


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What to simulate: `spec` of the arrivals, and the number of generated ones."""

    spec: str
    count: int
    work: Workload
    policies: Sequence[str]
    seed: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """The figures of one policy; `wall`: real seconds, `planning`: those in the scheduler."""

    served: ServedFigures
    wall: float
    planning: float

    def document(self) -> dict[str, Any]:
        plan = 1e6 * self.planning / max(self.served.steps, 1)
        rate = self.served.requests / self.wall if self.wall else 0.0
        speed = {"wall_seconds": self.wall, "requests_per_wall_second": rate}
        return {**self.served.document(), **speed, "microseconds_per_plan": plan}


def simulate(graph: Graph, cost: StepCost, settings: SimulationSettings) -> dict[str, Simulated]:
    """All policies on the same arrivals."""
    results = {}
    for policy in settings.policies:
        world = Simulation(graph, cost, policy, settings.seed)
        start = perf_counter()
        served = world.run(arrivals(settings.spec, settings.count, settings.work, settings.seed))
        results[policy] = Simulated(served, perf_counter() - start, world.busy)
    return results


def described(results: dict[str, Simulated]) -> str:
    """A table, and the duration of each simulation."""
    lines = [table({name: result.served for name, result in results.items()})]
    for name, result in results.items():
        document = result.document()
        speed = f"{document['requests_per_wall_second']:.0f} requests a second"
        plan = f"{document['microseconds_per_plan']:.0f} us a plan"
        steps = f"{result.served.steps} steps, most waiting {result.served.waited}"
        lines.append(f"{name}: simulated in {result.wall:.1f} s ({speed}, {plan}); {steps}")
    return "\n".join(lines)


def fitted(run: SavedRun, target: Path) -> StepCost:
    """Fit the step costs of a saved run, and save them."""
    cost = fit(list(records_of(run)))
    cost.save(target)
    return cost


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """All combinations to compare: comma-separated numbers and links, and a target's shape."""

    workers: str
    tp: str
    links: str
    shape: str
    together: bool

    def setups(self) -> Iterator[ClusterSetup]:
        """All setups; raises UsageError for an invalid one."""
        shape = shape_of(self.shape)
        for workers in _numbers("--cluster", self.workers):
            for tp in _numbers("--tp", self.tp):
                for link in self.links.split(","):
                    setup = ClusterSetup(workers, tp, link_of(link), shape, self.together)
                    setup.check()
                    yield setup


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """The figures of one cluster; `wall`: real seconds."""

    served: ClusterFigures
    wall: float

    def document(self) -> dict[str, Any]:
        speed = self.served.events / self.wall if self.wall else 0.0
        return {
            **self.served.document(),
            "wall_seconds": self.wall,
            "events_per_wall_second": speed,
        }


def simulate_clusters(
    graph: Graph, cost: StepCost, settings: SimulationSettings, clusters: ClusterSettings
) -> dict[str, SimulatedCluster]:
    """All clusters under one policy on the same arrivals."""
    if len(settings.policies) != 1:
        raise UsageError("--cluster compares clusters under one policy: --policies NAME")
    results = {}
    for setup in list(clusters.setups()):
        world = ClusterSimulation(graph, cost, settings.policies[0], setup, settings.seed)
        start = perf_counter()
        served = world.run(arrivals(settings.spec, settings.count, settings.work, settings.seed))
        results[setup.name] = SimulatedCluster(served, perf_counter() - start)
    return results


def clusters_described(results: dict[str, SimulatedCluster]) -> str:
    """A table, and the duration of each simulation."""
    lines = [cluster_table({name: result.served for name, result in results.items()})]
    for name, result in results.items():
        document = result.document()
        speed = f"{document['events']} events, {document['events_per_wall_second']:.0f} a second"
        lines.append(f"{name}: simulated in {result.wall:.1f} s ({speed})")
    return "\n".join(lines)


def shape_of(text: str) -> ModelShape:
    """A known model, or a checkpoint's folder, in float32.

    Raises:
        UsageError: another text.
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        return ModelShape.of(decoder_config(Path(text)), 4)
    except ModelError as error:
        raise UsageError(f"--shape {text}: {', '.join(SHAPES)}, or a folder: {error}") from None


def _numbers(option: str, text: str) -> Sequence[int]:
    """Comma-separated numbers from 1 on."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UsageError(f"{option} {text}: numbers from 1 on, as in 1,10,100")
    return numbers
