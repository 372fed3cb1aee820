"""What an answer cost, and the sum over prompts. Names and definitions: docs/metrics.md."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..record.metrics import Meter, pool_figures, ratio


@dataclass(frozen=True, slots=True)
class PoolUse:
    """A KV pool: what it held at most, and what was moved inside it, by cause."""

    peak_slots: int
    peak_bytes: int
    moved_bytes: Mapping[str, int]
    moves: Mapping[str, int]

    @property
    def moved(self) -> int:
        """Bytes moved, all causes."""
        return sum(self.moved_bytes.values())

    def document(self) -> dict[str, Any]:
        return {
            "peak_slots": self.peak_slots,
            "peak_bytes": self.peak_bytes,
            "moved_bytes": dict(self.moved_bytes),
            "moves": dict(self.moves),
        }


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one run or of several.

    committed, branch_rounds: tau_step is their quotient; rows, padding: query rows of target
    forwards; visits, milliseconds: by state; drafter: None for graphs whose drafter has no pool.
    """

    tokens: int
    target_forwards: int
    committed: int
    branch_rounds: int
    rows: int
    padding: int
    seconds: float
    visits: Mapping[str, int]
    milliseconds: Mapping[str, float]
    target: PoolUse
    drafter: PoolUse | None

    @property
    def tau_step(self) -> float:
        return ratio(self.committed, self.branch_rounds)

    @property
    def padding_waste(self) -> float:
        return ratio(self.padding, self.rows)

    def document(self) -> dict[str, Any]:
        """The figures under their documented names."""
        return {
            "tau_step": self.tau_step,
            "target_forwards": self.target_forwards,
            "branch_rounds": self.branch_rounds,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": ratio(self.tokens, self.seconds),
            "query_rows": self.rows,
            "padding_rows": self.padding,
            "padding_waste": self.padding_waste,
            "states": {
                state: {
                    "visits": visits,
                    "milliseconds": self.milliseconds[state],
                    "milliseconds_per_visit": ratio(self.milliseconds[state], visits),
                }
                for state, visits in self.visits.items()
            },
            "kv": {
                "target": self.target.document(),
                "drafter": None if self.drafter is None else self.drafter.document(),
            },
        }


def cost_of(meter: Meter, kv: Any, kv_draft: Any) -> Cost:
    """A finished run's figures; kv, kv_draft: its pools (ops.kv.KVCache), kv_draft may be None."""
    return Cost(
        meter.tokens,
        meter.forwards,
        meter.steps.committed,
        meter.steps.branch_rounds,
        meter.rows,
        meter.padding,
        meter.seconds,
        dict(meter.visits),
        {state: meter.nanos[state] / 1e6 for state in meter.visits},
        _use(kv),
        None if kv_draft is None else _use(kv_draft),
    )


def _use(pool: Any) -> PoolUse:
    found = pool_figures(pool)
    return PoolUse(found["peak_slots"], found["peak_bytes"], found["moved_bytes"], found["moves"])


def total(costs: Sequence[Cost]) -> Cost:
    """Sums over runs of the same graph; of what pools held the largest."""
    visits: Counter[str] = Counter()
    milliseconds: dict[str, float] = {}
    for cost in costs:
        visits.update(cost.visits)
        for state, spent in cost.milliseconds.items():
            milliseconds[state] = milliseconds.get(state, 0.0) + spent
    drafters = [cost.drafter for cost in costs if cost.drafter is not None]
    return Cost(
        sum(c.tokens for c in costs),
        sum(c.target_forwards for c in costs),
        sum(c.committed for c in costs),
        sum(c.branch_rounds for c in costs),
        sum(c.rows for c in costs),
        sum(c.padding for c in costs),
        sum(c.seconds for c in costs),
        visits,
        milliseconds,
        _over([cost.target for cost in costs]),
        _over(drafters) if drafters else None,
    )


def _over(uses: Sequence[PoolUse]) -> PoolUse:
    moved: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    for use in uses:
        moved.update(use.moved_bytes)
        moves.update(use.moves)
    slots, size = max(u.peak_slots for u in uses), max(u.peak_bytes for u in uses)
    return PoolUse(slots, size, moved, moves)
