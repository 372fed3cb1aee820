"""What an answer cost, and the sum over prompts. Names and definitions: docs/metrics.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..record.metrics import Meter, ratio, state_figures


@dataclass(frozen=True, slots=True)
class PoolUse:
    """A KV pool: what it held at most, and what was moved inside it, by cause."""

    peak_slots: int
    peak_bytes: int
    moved_bytes: Mapping[str, float]
    moves: Mapping[str, float]

    @property
    def moved(self) -> float:
        """Bytes moved, all causes."""
        return sum(self.moved_bytes.values())


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
    visits: Mapping[str, float]
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
            "states": state_figures(self.visits, self.milliseconds),
            "kv": {
                "target": asdict(self.target),
                "drafter": None if self.drafter is None else asdict(self.drafter),
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
        meter.milliseconds,
        _use(kv),
        None if kv_draft is None else _use(kv_draft),
    )


def _use(pool: Any) -> PoolUse:
    peak, ledger = pool.peak_length, pool.ledger
    return PoolUse(peak, peak * pool.slot_bytes, dict(ledger.bytes), dict(ledger.moves))


def total(costs: Sequence[Cost]) -> Cost:
    """Sums over runs of the same graph; of what pools held the largest."""
    drafters = [cost.drafter for cost in costs if cost.drafter is not None]
    return Cost(
        sum(c.tokens for c in costs),
        sum(c.target_forwards for c in costs),
        sum(c.committed for c in costs),
        sum(c.branch_rounds for c in costs),
        sum(c.rows for c in costs),
        sum(c.padding for c in costs),
        sum(c.seconds for c in costs),
        _added(c.visits for c in costs),
        _added(c.milliseconds for c in costs),
        _total_use([cost.target for cost in costs]),
        _total_use(drafters) if drafters else None,
    )


def _total_use(uses: Sequence[PoolUse]) -> PoolUse:
    return PoolUse(
        max(use.peak_slots for use in uses),
        max(use.peak_bytes for use in uses),
        _added(use.moved_bytes for use in uses),
        _added(use.moves for use in uses),
    )


def _added(tables: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by key."""
    sums: dict[str, float] = {}
    for table in tables:
        for key, value in table.items():
            sums[key] = sums.get(key, 0) + value
    return sums
