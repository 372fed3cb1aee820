"""What answering prompts costs: figures of one run, and their sums over several."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..record.metrics import Meter, state_figures


@dataclass
class PoolUse:
    """A KV pool: what it held at most, and what was moved inside it, by cause."""

    peak_slots: int = 0
    peak_bytes: int = 0
    allocated_bytes: int = 0
    moved_bytes: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, pool: Any) -> "PoolUse":
        peak = pool.peak_length
        ledger = pool.ledger
        size = pool.slots * pool.slot_bytes
        return cls(peak, peak * pool.slot_bytes, size, ledger.bytes, ledger.moves)

    def add(self, other: "PoolUse") -> None:
        """Count another run as well."""
        self.peak_slots = max(self.peak_slots, other.peak_slots)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.allocated_bytes = max(self.allocated_bytes, other.allocated_bytes)
        self.moved_bytes.update(other.moved_bytes)
        self.moves.update(other.moves)


@dataclass
class Moments:
    """Sums over runs of nanoseconds from a run's start, and what else only single runs tell.

    decoded: tokens behind each run's first one.
    """

    first_token: int = 0
    last_token: int = 0
    decoded: int = 0
    host_reads: int = 0

    @classmethod
    def of(cls, meter: Meter, host_reads: int = 0) -> "Moments":
        """Of a run with one request."""
        marks = next(iter(meter.marks.values()), None)
        if marks is None or marks.first_token is None or marks.last_token is None:
            return cls(host_reads=host_reads)
        return cls(marks.first_token, marks.last_token, max(meter.tokens - 1, 0), host_reads)

    def add(self, other: "Moments") -> None:
        """Count another run as well."""
        self.first_token += other.first_token
        self.last_token += other.last_token
        self.decoded += other.decoded
        self.host_reads += other.host_reads


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one run or of several; pools: the `target`'s, and the `drafter`'s if any."""

    meter: Meter
    pools: Mapping[str, PoolUse]
    moments: Moments = field(default_factory=Moments)

    def document(self) -> dict[str, Any]:
        """The figures under their documented names (docs/metrics.md)."""
        meter = self.meter
        pools = {name: vars(use) for name, use in self.pools.items()}
        return {
            "tau_step": meter.tau_step,
            "target_forwards": meter.forwards,
            "branch_rounds": meter.branch_rounds,
            "tokens": meter.tokens,
            "seconds": meter.seconds,
            "tokens_per_second": meter.tokens_per_second,
            "query_rows": meter.rows,
            "padding_rows": meter.padding,
            "padding_waste": meter.padding_waste,
            "states": state_figures(meter),
            "kv": {name: pools.get(name) for name in ("target", "drafter")},
        }


def total(costs: Sequence[Cost]) -> Cost:
    """Sums over runs of the same graph; of what pools held the largest."""
    meter = Meter()
    pools = {name: PoolUse() for name in costs[0].pools}
    moments = Moments()
    for cost in costs:
        meter.add(cost.meter)
        moments.add(cost.moments)
        for name, use in cost.pools.items():
            pools[name].add(use)
    return Cost(meter, pools, moments)
