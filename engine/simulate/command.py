"""`specsot simulate`: policies or clusters compared on the same arrivals, without a model."""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from ..errors import UsageError
from ..shell import aligned
from .cluster import ClusterSetup, ClusterSimulation
from .costs import LINKS, SHAPES
from .world import Arrival, Simulation

Document = dict[str, Any]  # the figures of one simulation as JSON values


def served_by(world: Simulation | ClusterSimulation, arrivals: Iterator[Arrival]) -> Document:
    """The figures of a simulation, with real durations."""
    start = perf_counter()
    document = world.run(arrivals).document()
    wall = perf_counter() - start
    unit = "requests" if isinstance(world, Simulation) else "events"
    document |= {"wall_seconds": wall, f"{unit}_per_wall_second": document[unit] / max(wall, 1e-9)}
    if isinstance(world, Simulation):
        document["microseconds_per_plan"] = 1e6 * world.busy / max(document["steps"], 1)
        return document
    regroups, sent = (max(document[name], 1) for name in ("regroups", "sent"))
    document["milliseconds_per_regroup"] = 1e3 * document["regroup_seconds"] / regroups
    document["milliseconds_per_send"] = 1e3 * document["sent_seconds"] / sent
    return document


def setups(workers: str, tp: str, links: str, *, shape: str, together: bool) -> list[ClusterSetup]:
    """All combinations of comma-separated numbers and links; raises UsageError."""
    names = links.split(",")
    if not LINKS.keys() >= set(names):
        raise UsageError(f"--link {links}: {', '.join(LINKS)}; several with commas")
    return [
        ClusterSetup(count, ranks, LINKS[link], SHAPES[shape], together=together)
        for count in _numbers("--cluster", workers)
        for ranks in _numbers("--tp", tp)
        for link in names
    ]


def _numbers(option: str, text: str) -> Sequence[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UsageError(f"{option} {text}: numbers from 1 on, as in 1,10,100")
    return numbers


# Tables of policies and of clusters: heading and cell of each column, in seconds or ms.
POLICIES = {
    "policy": "{name}",
    "requests": "{requests}",
    "tok/s": "{tokens_per_second:.0f}",
    "first p50": "{time_to_first_token[p50]:.3f}",
    "first p95": "{time_to_first_token[p95]:.3f}",
    "first p99": "{time_to_first_token[p99]:.3f}",
    "answer p50": "{time_to_answer[p50]:.3f}",
    "answer p95": "{time_to_answer[p95]:.3f}",
    "answer p99": "{time_to_answer[p99]:.3f}",
    "preempted": "{preemptions}",
    "hits": "{hit_rate:.1%}",
}
POLICY_COST = (
    "{name}: simulated in {wall_seconds:.1f} s ({requests_per_wall_second:.0f} requests a second,"
    " {microseconds_per_plan:.0f} us a plan); {steps} steps, most waiting {most_waiting}"
)
CLUSTERS = {
    "cluster": "{name}",
    "tok/s": "{tokens_per_second:.0f}",
    "first p50": "{time_to_first_token[p50]:.3f}",
    "first p95": "{time_to_first_token[p95]:.3f}",
    "answer p50": "{time_to_answer[p50]:.3f}",
    "answer p95": "{time_to_answer[p95]:.3f}",
    "busy": "{busy:.0%}",
    "hits": "{hit_rate:.0%}",
    "regroup": "{milliseconds_per_regroup:.2f}",
    "sent": "{sent}",
    "send": "{milliseconds_per_send:.2f}",
}
CLUSTER_COST = (
    "{name}: simulated in {wall_seconds:.1f} s"
    " ({events} events, {events_per_wall_second:.0f} a second)"
)


def table(results: Mapping[str, Document], columns: Mapping[str, str], cost: str) -> Iterator[str]:
    """A line for each policy or cluster, and the cost of each simulation."""
    named = [{"name": name, **figures} for name, figures in results.items()]
    cells = [tuple(cell.format_map(one) for cell in columns.values()) for one in named]
    yield from aligned([tuple(columns), *cells])
    yield from map(cost.format_map, named)
