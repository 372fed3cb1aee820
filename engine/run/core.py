"""The step loop: one machine of one graph over one set of pools, and its counters."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ...ops.forward import HostReader
from ...ops.kv.pool import KVCache
from ...states.graph.program import Program
from ...states.machine import Run, Sink
from ...states.manager import BranchStateManager
from ...states.phases.merge import Answer
from ...states.request import Branch, Request
from ...states.round import RoundSummary


class EngineCore(Run):
    """A graph's machine with its blackboard; every run, server, trainer and worker calls `step`.

    Args:
        program: a graph that passed its checks.
        board: the blackboard, as `Session.board` makes it.
        sink: is called with every event of the machine.
    """

    def __init__(self, program: Program, board: Mapping[str, Any], sink: Sink) -> None:
        super().__init__(program, board, sink)
        self._initial = program.graph.initial

    def step(self, before_phase: Callable[[], bool] | None = None) -> bool:
        """One pass from `schedule` to `schedule`: at most one forward of the target.

        Args:
            before_phase: is called before every transition; False ends the step there.

        Returns:
            False once the machine is in a final state, or `before_phase` has ended the step.

        Raises:
            RunError: no transition is open, or the run is over.
            Exception: an error of an op or a guard, with its place in the graph.
        """
        while not self.finished:
            if before_phase is not None and not before_phase():
                return False
            self.advance()
            if self.state == self._initial:
                return not self.finished
        return False

    # -- the blackboard ---------------------------------------------------------------------------

    @property
    def manager(self) -> BranchStateManager:
        """Requests, branches and KV rows between two forwards."""
        manager: BranchStateManager = self.board["branches"]
        return manager

    @property
    def requests(self) -> list[Request]:
        """All requests that the engine holds, in the order of their submission."""
        requests: list[Request] = self.board["branches"].requests
        return requests

    @property
    def branches(self) -> list[Branch]:
        """The running branches, in the order of every [S, ...] tensor."""
        branches: list[Branch] = self.board["branches"].active
        return branches

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers of the last `merge`; empty before it."""
        answers: tuple[Answer, ...] = self.board.get("answers", ())
        return answers

    @property
    def kv(self) -> KVCache:
        """The target's KV pool."""
        kv: KVCache = self.board["kv"]
        return kv

    @property
    def draft_kv(self) -> KVCache | None:
        """The drafter's KV pool; None without one."""
        kv: KVCache | None = self.board["kv_draft"]
        return kv

    @property
    def host(self) -> HostReader:
        """The counter of device-to-host reads."""
        host: HostReader = self.board["host"]
        return host

    @property
    def summary(self) -> RoundSummary | None:
        """What the last forward committed; None before the first one."""
        summary: RoundSummary | None = self.board.get("committed")
        return summary


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine at one moment.

    submitted, ended: requests; ended by finish reason. waiting, running: requests not started, and
    started. branches: running. recovered: recomputations after an error of an op. preempted:
    preemptions of branches and requests. steps, forwards, tokens, drafted, accepted: since the
    start. slots, peak_slots: slots of the target's pool in use, now and at most, of `capacity`.
    prefix_asked, prefix_reused: prompt tokens looked up in the prefix cache, and found there.
    seconds: since the start.
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
class EngineCounters:
    """Counters of an engine; their size does not grow with the requests served."""

    submitted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    recovered: int = 0
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    start_time: float = field(default_factory=monotonic)

    def count(self, summary: RoundSummary) -> None:
        """Count one forward of the target; a summary without rows is not one."""
        if not summary.rows:
            return
        self.forwards += 1
        self.tokens += sum(summary.committed)
        self.drafted += summary.drafted
        self.accepted += sum(max(count, 0) for count in summary.accepted)

    def stats(self, manager: BranchStateManager) -> EngineStats:
        table = manager.table
        prefixes = manager.prefixes
        return EngineStats(
            submitted=self.submitted,
            ended=dict(self.ended),
            waiting=len(table.waiting),
            running=len(table.open),
            branches=len(table.active),
            recovered=self.recovered,
            steps=self.steps,
            forwards=self.forwards,
            tokens=self.tokens,
            drafted=self.drafted,
            accepted=self.accepted,
            slots=manager.kv.needed_length,
            peak_slots=manager.kv.peak_length,
            capacity=manager.kv.slots,
            prefix_asked=0 if prefixes is None else prefixes.figures.asked,
            prefix_reused=0 if prefixes is None else prefixes.figures.reused,
            seconds=monotonic() - self.start_time,
            preempted=manager.lifecycle.preemptions,
        )
