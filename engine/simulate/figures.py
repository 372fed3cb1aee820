"""Figures of a simulation, or of a run of the same arrivals: rates and quantiles."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIN_SECONDS = 1e-4  # shorter durations share a bucket
BUCKET_WIDTH = math.log(1.01)  # quantiles are exact to one percent
SHARES = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class Quantiles:
    """Quantiles of durations in logarithmic buckets, in constant memory."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        self.counts[round(math.log(max(seconds, MIN_SECONDS)) / BUCKET_WIDTH)] += 1

    def at(self, share: float) -> float:
        """The quantile of a share of the durations; 0.0 without any."""
        remaining = share * self.counts.total()
        for bucket in sorted(self.counts):
            remaining -= self.counts[bucket]
            if remaining <= 0:
                return math.exp(bucket * BUCKET_WIDTH)
        return 0.0

    def document(self) -> dict[str, float]:
        return {f"p{round(100 * share)}": self.at(share) for share in SHARES}


@dataclass(slots=True)
class ServedFigures:
    """The figures of one policy.

    seconds: from the start to the last answer, on the clock of the run. first: to a request's first
    token; whole: to its whole answer. waited: the largest number of waiting requests.
    """

    requests: int = 0
    refused: int = 0
    tokens: int = 0
    steps: int = 0
    forwards: int = 0
    rows: int = 0
    preemptions: int = 0
    waited: int = 0
    hit_rate: float = 0.0
    seconds: float = 0.0
    first: Quantiles = field(default_factory=Quantiles)
    whole: Quantiles = field(default_factory=Quantiles)

    def document(self) -> dict[str, Any]:
        """All figures under documented names."""
        return {
            "requests": self.requests,
            "refused": self.refused,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "time_to_first_token": self.first.document(),
            "time_to_answer": self.whole.document(),
            "preemptions": self.preemptions,
            "hit_rate": self.hit_rate,
            "most_waiting": self.waited,
            "steps": self.steps,
            "forwards": self.forwards,
            "rows": self.rows,
        }


def table(policies: Mapping[str, ServedFigures]) -> str:
    """A line per policy."""
    head = f"{'policy':16} {'requests':>8} {'tok/s':>8} {'first p50':>10} {'p95':>8} {'p99':>8}"
    head += f" {'answer p50':>11} {'p95':>8} {'p99':>8} {'preempted':>9} {'hits':>6}"
    lines = [head]
    for name, figures in policies.items():
        first = figures.first.document()
        whole = figures.whole.document()
        speed = figures.tokens / figures.seconds if figures.seconds else 0.0
        line = f"{name:16} {figures.requests:>8} {speed:>8.0f}"
        for width, part in ((10, first), (11, whole)):
            line += f" {part['p50']:>{width}.3f} {part['p95']:>8.3f} {part['p99']:>8.3f}"
        lines.append(f"{line} {figures.preemptions:>9} {figures.hit_rate:>6.1%}")
    return "\n".join(lines)


@dataclass(slots=True)
class ClusterFigures:
    """Figures of one cluster.

    seconds: on its own clock; worked: sum over the workers. regroups: gathers of a prefix after its
    outline, with their bytes and seconds; sent: prefixes sent to a worker outside the group.
    events: simulated ones; planned: number of events ever in the heap, for their order.
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
        """Count prefixes gathered by all members of a group."""
        self.regroups += count
        self.regroup_bytes += size
        self.regroup_seconds += seconds

    def note_sent(self, count: int, size: int, seconds: float) -> None:
        """Count prefixes sent to workers outside the group."""
        self.sent += count
        self.sent_bytes += size
        self.sent_seconds += seconds

    def document(self) -> dict[str, Any]:
        """All figures under documented names."""
        total = self.workers * self.seconds
        return {
            "workers": self.workers,
            "requests": self.requests,
            "refused": self.refused,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "time_to_first_token": self.first.document(),
            "time_to_answer": self.whole.document(),
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


def cluster_table(clusters: Mapping[str, ClusterFigures]) -> str:
    """A line per cluster, in seconds; regroup and send in milliseconds."""
    head = f"{'cluster':28} {'tok/s':>9} {'first p50':>9} {'p95':>8} {'answer p50':>10} {'p95':>8}"
    lines = [f"{head} {'busy':>5} {'hits':>5} {'regroup':>8} {'sent':>7} {'send':>8}"]
    for name, figures in clusters.items():
        first = figures.first.document()
        whole = figures.whole.document()
        document = figures.document()
        regroup = 1e3 * figures.regroup_seconds / max(figures.regroups, 1)
        send = 1e3 * figures.sent_seconds / max(figures.sent, 1)
        lines.append(
            f"{name:28} {document['tokens_per_second']:>9.0f}"
            f" {first['p50']:>9.3f} {first['p95']:>8.3f} {whole['p50']:>10.3f} {whole['p95']:>8.3f}"
            f" {document['busy']:>5.0%} {figures.hit_rate:>5.0%} {regroup:>8.2f}"
            f" {figures.sent:>7} {send:>8.2f}"
        )
    return "\n".join(lines)
