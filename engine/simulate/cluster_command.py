"""`specsot simulate --cluster`: clusters compared on the same arrivals, without a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ...models.families import decoder_config
from ...models.files import ModelError
from ...states.graph.graph import Graph
from ..errors import UsageError
from .arrivals import arrivals
from .cluster import ClusterSimulation
from .cluster_figures import ClusterServed, cluster_table
from .cluster_parts import ClusterSetup
from .command import Asked
from .costs import StepCost
from .links import SHAPES, ModelShape, link_of


@dataclass(frozen=True, slots=True)
class ClustersAsked:
    """What to compare, each with each: numbers and links with commas, and `shape_of` a target."""

    workers: str
    tp: str
    links: str
    shape: str
    together: bool

    def setups(self) -> Iterator[ClusterSetup]:
        """All of them; raises UsageError for what cannot be."""
        shape = shape_of(self.shape)
        for workers in _numbers("--cluster", self.workers):
            for tp in _numbers("--tp", self.tp):
                for link in self.links.split(","):
                    setup = ClusterSetup(workers, tp, link_of(link), shape, self.together)
                    setup.check()
                    yield setup


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """What came of one cluster, in `wall` seconds of real time."""

    served: ClusterServed
    wall: float

    def told(self) -> dict[str, Any]:
        speed = self.served.events / self.wall if self.wall else 0.0
        return {**self.served.told(), "wall_seconds": self.wall, "events_per_wall_second": speed}


def simulate_clusters(
    graph: Graph, cost: StepCost, asked: Asked, clusters: ClustersAsked
) -> dict[str, SimulatedCluster]:
    """All clusters under one policy on the same arrivals."""
    if len(asked.policies) != 1:
        raise UsageError("--cluster compares clusters under one policy: --policies NAME")
    found = {}
    for setup in list(clusters.setups()):
        world = ClusterSimulation(graph, cost, asked.policies[0], setup, asked.seed)
        began = perf_counter()
        served = world.run(arrivals(asked.spec, asked.count, asked.work, asked.seed))
        found[setup.name] = SimulatedCluster(served, perf_counter() - began)
    return found


def clusters_described(found: dict[str, SimulatedCluster]) -> str:
    """A table, and what it took."""
    lines = [cluster_table({name: one.served for name, one in found.items()})]
    for name, one in found.items():
        told = one.told()
        speed = f"{told['events']} events, {told['events_per_wall_second']:.0f} a second"
        lines.append(f"{name}: simulated in {one.wall:.1f} s ({speed})")
    return "\n".join(lines)


def shape_of(text: str) -> ModelShape:
    """A known model, or a checkpoint's folder, in float32.

    Raises:
        UsageError: it is neither.
    """
    if text in SHAPES:
        return SHAPES[text]
    try:
        return ModelShape.of(decoder_config(Path(text)), 4)
    except ModelError as error:
        raise UsageError(f"--shape {text}: {', '.join(SHAPES)}, or a folder: {error}") from None


def _numbers(option: str, text: str) -> Sequence[int]:
    """Numbers with commas between them, from 1 on."""
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UsageError(f"{option} {text}: numbers from 1 on, as in 1,10,100")
    return found
