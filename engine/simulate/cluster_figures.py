"""What a simulated cluster tells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .figures import Quantiles
from .world import Simulation


@dataclass(slots=True)
class ClusterServed:
    """Figures of one cluster.

    seconds: on its own clock; worked: of all workers together. regroups: gathers of a prefix after
    its outline, with all their bytes and seconds; sent: prefixes that went to a worker outside.
    events: that were simulated; planned: counts those in the heap, for their order.
    """

    workers: int
    requests: int = 0
    refused: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    worked: float = 0.0
    regroups: int = 0
    regroup_bytes: int = 0
    regroup_seconds: float = 0.0
    sent: int = 0
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    preemptions: int = 0
    hit_rate: float = 0.0
    events: int = 0
    planned: int = 0
    first: Quantiles = field(default_factory=Quantiles)
    whole: Quantiles = field(default_factory=Quantiles)

    def note_regroups(self, count: int, size: int, seconds: float) -> None:
        """Prefixes that all members of a group have from now on."""
        self.regroups += count
        self.regroup_bytes += size
        self.regroup_seconds += seconds

    def note_sent(self, count: int, size: int, seconds: float) -> None:
        """Prefixes that went to workers outside."""
        self.sent += count
        self.sent_bytes += size
        self.sent_seconds += seconds

    def of(
        self, seconds: float, workers: Sequence[Simulation], groups: Sequence[Simulation]
    ) -> "ClusterServed":
        """With what its workers have done until then."""
        ran = [*workers, *groups]
        self.seconds = seconds
        for one in ran:
            self.refused += one.served.refused
            self.tokens += one.served.tokens
            self.steps += one.served.steps
            self.preemptions += one.manager.preemption.count
        trees = [one.manager.prefixes.figures for one in ran if one.manager.prefixes is not None]
        self.hit_rate = sum(f.reused for f in trees) / max(sum(f.asked for f in trees), 1)
        return self

    def told(self) -> dict[str, Any]:
        """All of it under documented names."""
        total = self.workers * self.seconds
        return {
            "workers": self.workers,
            "requests": self.requests,
            "refused": self.refused,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "time_to_first_token": self.first.told(),
            "time_to_answer": self.whole.told(),
            "busy": self.worked / total if total else 0.0,
            "hit_rate": self.hit_rate,
            "preemptions": self.preemptions,
            "regroups": self.regroups,
            "regroup_bytes": self.regroup_bytes,
            "regroup_seconds": self.regroup_seconds,
            "sent": self.sent,
            "sent_bytes": self.sent_bytes,
            "sent_seconds": self.sent_seconds,
            "steps": self.steps,
            "events": self.events,
        }


def cluster_table(found: Mapping[str, ClusterServed]) -> str:
    """A line per cluster; seconds, but for regroup and send: milliseconds each."""
    head = f"{'cluster':28} {'tok/s':>9} {'first p50':>9} {'p95':>8} {'answer p50':>10} {'p95':>8}"
    lines = [f"{head} {'busy':>5} {'hits':>5} {'regroup':>8} {'sent':>7} {'send':>8}"]
    for name, one in found.items():
        first = one.first.told()
        whole = one.whole.told()
        told = one.told()
        regroup = 1e3 * one.regroup_seconds / max(one.regroups, 1)
        send = 1e3 * one.sent_seconds / max(one.sent, 1)
        lines.append(
            f"{name:28} {told['tokens_per_second']:>9.0f}"
            f" {first['p50']:>9.3f} {first['p95']:>8.3f} {whole['p50']:>10.3f} {whole['p95']:>8.3f}"
            f" {told['busy']:>5.0%} {one.hit_rate:>5.0%} {regroup:>8.2f} {one.sent:>7} {send:>8.2f}"
        )
    return "\n".join(lines)
