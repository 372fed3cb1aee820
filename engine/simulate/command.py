"""`specsot simulate`: policies or clusters compared on the same arrivals, without a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from ...states.graph.graph import Graph
from ..errors import UsageError
from .cluster import ClusterSetup, ClusterSimulation
from .costs import StepCost, link_of, shape_of
from .world import Arrival, Simulation

Document = dict[str, Any]  # the figures of one simulation as JSON values
Source = Callable[[], Iterator[Arrival]]  # the same arrivals at each call


def simulate(
    graph: Graph,
    cost: StepCost,
    policies: Sequence[str],
    source: Source,
    *,
    setups: Sequence[ClusterSetup] = (),
    seed: int,
) -> dict[str, Document]:
    """All policies on the same arrivals, or all clusters under one policy; with real durations."""
    if setups and len(policies) != 1:
        raise UsageError("--cluster compares clusters under one policy: --policies NAME")
    results = {}
    for setup in setups:
        cluster = ClusterSimulation(graph, cost, policies[0], setup, seed=seed)
        results[setup.name] = _served(cluster, source, "events")
    for policy in () if setups else policies:
        world = Simulation(graph, cost, policy, seed)
        document = results[policy] = _served(world, source, "requests")
        document["microseconds_per_plan"] = 1e6 * world.busy / max(document["steps"], 1)
    return results


def _served(world: Simulation | ClusterSimulation, source: Source, unit: str) -> Document:
    start = perf_counter()
    served = world.run(source())
    wall = perf_counter() - start
    document = {**served.document(), "wall_seconds": wall}
    return {**document, f"{unit}_per_wall_second": document[unit] / max(wall, 1e-9)}


def cluster_setups(
    workers: str, tp: str, links: str, *, shape: str, together: bool
) -> list[ClusterSetup]:
    """All combinations of comma-separated numbers and links; raises UsageError."""
    model = shape_of(shape)
    return [
        ClusterSetup(count, ranks, link_of(link), model, together=together)
        for count in _numbers("--cluster", workers)
        for ranks in _numbers("--tp", tp)
        for link in links.split(",")
    ]


def _numbers(option: str, text: str) -> Sequence[int]:
    """Comma-separated numbers from 1 on."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UsageError(f"{option} {text}: numbers from 1 on, as in 1,10,100")
    return numbers


def described(policies: Mapping[str, Document]) -> str:
    """A line per policy, and the duration of each simulation."""
    head = f"{'policy':16} {'requests':>8} {'tok/s':>8} {'first p50':>10} {'p95':>8} {'p99':>8}"
    lines = [f"{head} {'answer p50':>11} {'p95':>8} {'p99':>8} {'preempted':>9} {'hits':>6}"]
    ends = []
    for name, figures in policies.items():
        first, answer = (figures[f"time_to_{what}"] for what in ("first_token", "answer"))
        lines.append(
            f"{name:16} {figures['requests']:>8} {figures['tokens_per_second']:>8.0f}"
            f" {first['p50']:>10.3f} {first['p95']:>8.3f} {first['p99']:>8.3f}"
            f" {answer['p50']:>11.3f} {answer['p95']:>8.3f} {answer['p99']:>8.3f}"
            f" {figures['preemptions']:>9} {figures['hit_rate']:>6.1%}"
        )
        ends.append(
            f"{name}: simulated in {figures['wall_seconds']:.1f} s"
            f" ({figures['requests_per_wall_second']:.0f} requests a second,"
            f" {figures['microseconds_per_plan']:.0f} us a plan);"
            f" {figures['steps']} steps, most waiting {figures['most_waiting']}"
        )
    return "\n".join([*lines, *ends])


def clusters_described(clusters: Mapping[str, Document]) -> str:
    """A line per cluster, in seconds, regroup and send in ms; the duration of each simulation."""
    head = f"{'cluster':28} {'tok/s':>9} {'first p50':>9} {'p95':>8} {'answer p50':>10} {'p95':>8}"
    lines = [f"{head} {'busy':>5} {'hits':>5} {'regroup':>8} {'sent':>7} {'send':>8}"]
    ends = []
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
        speed = f"{figures['events']} events, {figures['events_per_wall_second']:.0f} a second"
        ends.append(f"{name}: simulated in {figures['wall_seconds']:.1f} s ({speed})")
    return "\n".join([*lines, *ends])
