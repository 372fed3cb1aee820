"""The step loop: one machine of one graph over one set of pools."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from ...ops.forward import HostReader
from ...states.graph.graph import Program
from ...states.machine import Run, Sink
from ...states.manager import BranchStateManager
from ...states.phases.merge import Answer
from ...states.request import Branch, Request
from ...states.round import RoundSummary


class EngineCore(Run):
    """A graph's machine with the blackboard of `Session.board`; every run, server, trainer and
    worker calls `step`."""

    def __init__(self, program: Program, board: Mapping[str, Any], sink: Sink) -> None:
        super().__init__(program, board, sink)
        self._initial = program.graph.initial

    def step(self, before_phase: Callable[[], bool] | None = None) -> bool:
        """One pass from `schedule` to `schedule`: at most one forward of the target; raises what
        `advance` raises. before_phase: is called before every transition; False ends the step
        there. Returns False once the machine is in a final state, or `before_phase` has ended the
        step."""
        while not self.finished:
            if before_phase is not None and not before_phase():
                return False
            self.advance()
            if self.state == self._initial:
                return not self.finished
        return False

    @property
    def manager(self) -> BranchStateManager:
        return cast(BranchStateManager, self.board["branches"])

    @property
    def requests(self) -> list[Request]:
        return self.manager.requests

    @property
    def branches(self) -> list[Branch]:
        """The running branches, in the order of every [S, ...] tensor."""
        return self.manager.active

    @property
    def answers(self) -> tuple[Answer, ...]:
        return cast(tuple[Answer, ...], self.board["answers"])

    @property
    def summary(self) -> RoundSummary:
        return cast(RoundSummary, self.board["committed"])

    @property
    def host(self) -> HostReader:
        return cast(HostReader, self.board["host"])
