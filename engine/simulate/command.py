"""`specsot simulate`: policies or clusters compared on the same arrivals, without a model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ...states.graph.graph import Graph
from ..errors import UsageError
from .arrivals import Workload, arrivals
from .cluster import ClusterSetup, ClusterSimulation
from .costs import StepCost, link_of, shape_of
from .world import Simulation

Document = dict[str, Any]  # the figures of one simulation as JSON values


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """What to simulate: `spec` of the arrivals, and the number of generated ones."""

    spec: str
    count: int
    work: Workload
    policies: Sequence[str]
    seed: int

    def serve(self, world: Simulation | ClusterSimulation) -> tuple[Document, float]:
        """The figures of a simulation of the arrivals, and its real duration in seconds."""
        start = perf_counter()
        served = world.run(arrivals(self.spec, self.count, self.work, self.seed))
        wall = perf_counter() - start
        return {**served.document(), "wall_seconds": wall}, max(wall, 1e-9)


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
                    yield ClusterSetup(workers, tp, link_of(link), shape, together=self.together)


def _numbers(option: str, text: str) -> Sequence[int]:
    """Comma-separated numbers from 1 on."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UsageError(f"{option} {text}: numbers from 1 on, as in 1,10,100")
    return numbers


def simulate(graph: Graph, cost: StepCost, settings: SimulationSettings) -> dict[str, Document]:
    """All policies on the same arrivals."""
    results = {}
    for policy in settings.policies:
        world = Simulation(graph, cost, policy, settings.seed)
        document, wall = settings.serve(world)
        document["requests_per_wall_second"] = document["requests"] / wall
        document["microseconds_per_plan"] = 1e6 * world.busy / max(document["steps"], 1)
        results[policy] = document
    return results


def simulate_clusters(
    graph: Graph, cost: StepCost, settings: SimulationSettings, clusters: ClusterSettings
) -> dict[str, Document]:
    """All clusters under one policy on the same arrivals."""
    if len(settings.policies) != 1:
        raise UsageError("--cluster compares clusters under one policy: --policies NAME")
    results = {}
    for setup in list(clusters.setups()):
        world = ClusterSimulation(graph, cost, settings.policies[0], setup, seed=settings.seed)
        document, wall = settings.serve(world)
        document["events_per_wall_second"] = document["events"] / wall
        results[setup.name] = document
    return results


# -- tables ---------------------------------------------------------------------------------------


def described(policies: Mapping[str, Document]) -> str:
    """A line per policy, and the duration of each simulation."""
    head = f"{'policy':16} {'requests':>8} {'tok/s':>8} {'first p50':>10} {'p95':>8} {'p99':>8}"
    lines = [f"{head} {'answer p50':>11} {'p95':>8} {'p99':>8} {'preempted':>9} {'hits':>6}"]
    for name, figures in policies.items():
        first, answer = (figures[f"time_to_{what}"] for what in ("first_token", "answer"))
        lines.append(
            f"{name:16} {figures['requests']:>8} {figures['tokens_per_second']:>8.0f}"
            f" {first['p50']:>10.3f} {first['p95']:>8.3f} {first['p99']:>8.3f}"
            f" {answer['p50']:>11.3f} {answer['p95']:>8.3f} {answer['p99']:>8.3f}"
            f" {figures['preemptions']:>9} {figures['hit_rate']:>6.1%}"
        )
    for name, figures in policies.items():
        speed = f"{figures['requests_per_wall_second']:.0f} requests a second"
        plan = f"{figures['microseconds_per_plan']:.0f} us a plan"
        steps = f"{figures['steps']} steps, most waiting {figures['most_waiting']}"
        wall = f"{figures['wall_seconds']:.1f} s"
        lines.append(f"{name}: simulated in {wall} ({speed}, {plan}); {steps}")
    return "\n".join(lines)


def clusters_described(clusters: Mapping[str, Document]) -> str:
    """A line per cluster, in seconds, regroup and send in milliseconds; and the duration of each
    simulation."""
    head = f"{'cluster':28} {'tok/s':>9} {'first p50':>9} {'p95':>8} {'answer p50':>10} {'p95':>8}"
    lines = [f"{head} {'busy':>5} {'hits':>5} {'regroup':>8} {'sent':>7} {'send':>8}"]
    for name, figures in clusters.items():
        first, answer = (figures[f"time_to_{what}"] for what in ("first_token", "answer"))
        regroup = 1e3 * figures["regroup_seconds"] / max(figures["regroups"], 1)
        send = 1e3 * figures["sent_seconds"] / max(figures["sent"], 1)
        lines.append(
            f"{name:28} {figures['tokens_per_second']:>9.0f} {first['p50']:>9.3f}"
            f" {first['p95']:>8.3f} {answer['p50']:>10.3f} {answer['p95']:>8.3f}"
            f" {figures['busy']:>5.0%} {figures['hit_rate']:>5.0%} {regroup:>8.2f}"
            f" {figures['sent']:>7} {send:>8.2f}"
        )
    for name, figures in clusters.items():
        speed = f"{figures['events']} events, {figures['events_per_wall_second']:.0f} a second"
        lines.append(f"{name}: simulated in {figures['wall_seconds']:.1f} s ({speed})")
    return "\n".join(lines)
