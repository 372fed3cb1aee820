"""How far the scores of a drafter can be trusted, learned while running. No torch."""

from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, log

BUCKETS = 24
STEP = 0.25  # a bucket has the nodes within this difference in log-probability
PRIOR = 24.0


def _trials() -> list[float]:
    return [PRIOR] * BUCKETS


def _hits() -> list[float]:
    return [PRIOR * exp(-STEP * (bucket + 0.5)) for bucket in range(BUCKETS)]


@dataclass(slots=True)
class Reliability:
    """By a drafter's log-probability of a node: how many nodes were tried, how many accepted."""

    tried: list[float] = field(default_factory=_trials)
    accepted: list[float] = field(default_factory=_hits)

    @staticmethod
    def bucket(score: float) -> int:
        return min(int(-score / STEP), BUCKETS - 1)

    def count_(self, score: float, accepted: bool) -> None:
        bucket = self.bucket(score)
        self.tried[bucket] += 1
        self.accepted[bucket] += accepted

    @property
    def losses(self) -> list[float]:
        """Minus the log of each bucket's chance, which never falls: a node of a lower score has no
        higher chance."""
        chances = map(float.__truediv__, self.accepted, self.tried)
        return [-log(chance) for chance in accumulate(chances, min)]
