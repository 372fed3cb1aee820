"""What an answer cost, and the sum over prompts. Names and definitions: docs/metrics.md."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..record.metrics import Meter, state_figures


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


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one run or of several; drafter: None for graphs whose drafter has no pool."""

    meter: Meter
    target: PoolUse
    drafter: PoolUse | None

    def document(self) -> dict[str, Any]:
        """The figures under their documented names."""
        meter = self.meter
        pools = {"target": asdict(self.target), "drafter": self.drafter and asdict(self.drafter)}
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
            "kv": pools,
        }


def cost_of(meter: Meter, kv: Any, kv_draft: Any) -> Cost:
    """A finished run's figures; kv, kv_draft: its pools (ops.kv.KVCache), kv_draft may be None."""
    return Cost(meter, _use(kv), None if kv_draft is None else _use(kv_draft))


def _use(pool: Any) -> PoolUse:
    peak, ledger = pool.peak_length, pool.ledger
    return PoolUse(peak, peak * pool.slot_bytes, dict(ledger.bytes), dict(ledger.moves))


def total(costs: Sequence[Cost]) -> Cost:
    """Sums over runs of the same graph; of what pools held the largest."""
    meter = Meter()
    for cost in costs:
        meter.add(cost.meter)
    targets = [cost.target for cost in costs]
    drafters = [cost.drafter for cost in costs if cost.drafter is not None]
    return Cost(meter, _over(targets), _over(drafters) if drafters else None)


def _over(uses: Sequence[PoolUse]) -> PoolUse:
    moved: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    for use in uses:
        moved.update(use.moved_bytes)
        moves.update(use.moves)
    slots, size = max(u.peak_slots for u in uses), max(u.peak_bytes for u in uses)
    return PoolUse(slots, size, dict(moved), dict(moves))
