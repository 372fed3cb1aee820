"""What a simulation, or a run of the same arrivals, tells: rates, and quantiles in little room."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FINEST = 1e-4  # seconds below which all are alike
STEP = math.log(1.01)  # a bucket's width: quantiles are exact to one percent
SHOWN = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class Quantiles:
    """Durations in buckets: as much room for a million of them as for a few."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        self.counts[round(math.log(max(seconds, FINEST)) / STEP)] += 1

    def at(self, share: float) -> float:
        """The duration that this share of them is not longer than; 0.0 without any."""
        left = share * self.counts.total()
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return math.exp(bucket * STEP)
        return 0.0

    def told(self) -> dict[str, float]:
        return {f"p{round(100 * share)}": self.at(share) for share in SHOWN}


@dataclass(slots=True)
class Served:
    """What was served: figures of one policy.

    seconds: from the start to the last answer, on the clock of the run. first: to a request's first
    token; whole: to its whole answer. waited: most requests that waited at a time.
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

    def told(self) -> dict[str, Any]:
        """All of it under documented names."""
        return {
            "requests": self.requests,
            "refused": self.refused,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "time_to_first_token": self.first.told(),
            "time_to_answer": self.whole.told(),
            "preemptions": self.preemptions,
            "hit_rate": self.hit_rate,
            "most_waiting": self.waited,
            "steps": self.steps,
            "forwards": self.forwards,
            "rows": self.rows,
        }


def table(found: Mapping[str, Served]) -> str:
    """A line per policy."""
    head = f"{'policy':16} {'requests':>8} {'tok/s':>8} {'first p50':>10} {'p95':>8} {'p99':>8}"
    head += f" {'answer p50':>11} {'p95':>8} {'p99':>8} {'preempted':>9} {'hits':>6}"
    lines = [head]
    for name, one in found.items():
        first = one.first.told()
        whole = one.whole.told()
        speed = one.tokens / one.seconds if one.seconds else 0.0
        line = f"{name:16} {one.requests:>8} {speed:>8.0f}"
        for width, part in ((10, first), (11, whole)):
            line += f" {part['p50']:>{width}.3f} {part['p95']:>8.3f} {part['p99']:>8.3f}"
        lines.append(f"{line} {one.preemptions:>9} {one.hit_rate:>6.1%}")
    return "\n".join(lines)
