"""The step loop: one machine of one graph over one set of pools, and the counters of an engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...ops.forward import HostReader
from ...states.graph.program import Program
from ...states.machine import Run, Sink
from ...states.manager import BranchStateManager
from ...states.phases.merge import Answer
from ...states.request import Branch, Request
from ...states.round import RoundSummary


class EngineCore(Run):
    """A graph's machine with the blackboard of `Session.board`; every run, server, trainer and
    worker calls `step`. Arguments as for `Run`."""

    def __init__(self, program: Program, board: Mapping[str, Any], sink: Sink) -> None:
        super().__init__(program, board, sink)
        self._initial = program.graph.initial

    def step(self, before_phase: Callable[[], bool] | None = None) -> bool:
        """One pass from `schedule` to `schedule`: at most one forward of the target; raises what
        `advance` raises.

        before_phase: is called before every transition; False ends the step there.
        Returns False once the machine is in a final state, or `before_phase` has ended the step.
        """
        while not self.finished:
            if before_phase is not None and not before_phase():
                return False
            self.advance()
            if self.state == self._initial:
                return not self.finished
        return False

    @property
    def manager(self) -> BranchStateManager:
        """Requests, branches and KV rows between two forwards."""
        manager: BranchStateManager = self.board["branches"]
        return manager

    @property
    def requests(self) -> list[Request]:
        """All requests that the engine holds, in the order of their submission."""
        return self.manager.requests

    @property
    def branches(self) -> list[Branch]:
        """The running branches, in the order of every [S, ...] tensor."""
        return self.manager.active

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers of the requests that ended, after the state `merge`."""
        answers: tuple[Answer, ...] = self.board["answers"]
        return answers

    @property
    def summary(self) -> RoundSummary:
        """What the last forward committed, until the next one."""
        summary: RoundSummary = self.board["committed"]
        return summary

    @property
    def host(self) -> HostReader:
        """Reads the device and counts the reads."""
        host: HostReader = self.board["host"]
        return host


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters of an engine since its start, and its figures at one moment.

    submitted, ended: requests; ended by finish reason. waiting, running: requests not started, and
    started. branches: running. recovered: recomputations after an error of an op. preempted:
    preemptions of branches and requests. tokens, drafted, accepted: of all forwards. slots,
    peak_slots: slots of the target's pool in use, now and at most, of `capacity`. prefix_asked,
    prefix_reused: prompt tokens looked up in the prefix cache, and found there. seconds: since the
    start.
    """

    submitted: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    running: int = 0
    branches: int = 0
    recovered: int = 0
    steps: int = 0
    forwards: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    slots: int = 0
    peak_slots: int = 0
    capacity: int = 0
    prefix_asked: int = 0
    prefix_reused: int = 0
    seconds: float = 0.0
    preempted: int = 0

    def count(self, summary: RoundSummary) -> None:
        """Count one forward of the target; a summary without rows is not one."""
        if not summary.rows:
            return
        self.forwards += 1
        self.tokens += sum(summary.committed)
        self.drafted += summary.drafted
        self.accepted += sum(max(count, 0) for count in summary.accepted)

    def at(self, manager: BranchStateManager, seconds: float) -> "EngineStats":
        """A copy with the figures of this moment."""
        table = manager.table
        prefixes = manager.prefixes
        return replace(
            self,
            ended=dict(self.ended),
            waiting=len(table.waiting),
            running=len(table.open),
            branches=len(table.active),
            slots=manager.kv.needed_length,
            peak_slots=manager.kv.peak_length,
            capacity=manager.kv.slots,
            prefix_asked=0 if prefixes is None else prefixes.figures.asked,
            prefix_reused=0 if prefixes is None else prefixes.figures.reused,
            seconds=seconds,
            preempted=manager.lifecycle.preemptions,
        )
