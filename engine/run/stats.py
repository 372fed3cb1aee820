"""What an engine counts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

from ...states.manager import BranchStateManager
from ...states.round import RoundSummary


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment.

    submitted, ended: requests; ended by their finish reason. waiting, running: requests that have
    not begun, and that have. branches: decoded side by side. recovered: how often requests were
    run again because an op had raised. preempted: how often branches and requests made way.
    steps, forwards, tokens, drafted, accepted: since the start. slots, peak_slots: of the target's
    pool, in use now and at most, of `capacity`. prefix_asked, prefix_reused: tokens of prompts that
    were looked up among those kept, and found. seconds: since the start.
    """

    submitted: int
    ended: Mapping[str, int]
    waiting: int
    running: int
    branches: int
    recovered: int
    steps: int
    forwards: int
    tokens: int
    drafted: int
    accepted: int
    slots: int
    peak_slots: int
    capacity: int
    prefix_asked: int
    prefix_reused: int
    seconds: float
    preempted: int = 0


@dataclass(slots=True)
class Tally:
    """The counters behind it; they do not grow with what was served."""

    submitted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    began: float = field(default_factory=monotonic)

    def count(self, summary: RoundSummary) -> None:
        """One forward of the target; one without rows was none."""
        if not summary.rows:
            return
        self.forwards += 1
        self.tokens += sum(summary.committed)
        self.drafted += summary.drafted
        self.accepted += sum(max(count, 0) for count in summary.accepted)

    def stats(self, branches: BranchStateManager) -> EngineStats:
        table = branches.table
        kv = branches.kv
        kept = branches.prefixes
        found = (0, 0) if kept is None else (kept.figures.asked, kept.figures.reused)
        return EngineStats(
            self.submitted,
            dict(self.ended),
            len(table.waiting),
            len(table.open),
            len(table.active),
            self.recovered,
            self.steps,
            self.forwards,
            self.tokens,
            self.drafted,
            self.accepted,
            kv.needed_length,
            kv.peak_length,
            kv.slots,
            *found,
            monotonic() - self.began,
            branches.preemption.count,
        )
