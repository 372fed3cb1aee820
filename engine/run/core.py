"""The step loop: one machine of one graph over one set of pools, and what ends it."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from time import monotonic, perf_counter_ns, sleep
from types import FrameType
from typing import Self, cast

from ...states.machine import Run
from ...states.manager import BranchStateManager
from ...states.phases.merge import Answer
from ...states.request import Branch, Request
from ..errors import Code
from ..record.recorder import Recorder
from ..signals import NAMES, give_back, handling

POLL_SECONDS = 0.05  # of the stop signal and the viewer during a delay


class EngineCore(Run):
    """A graph's machine with the blackboard of `Session.board`; every run, server, trainer and
    worker calls `step`."""

    def step(self, before_phase: Callable[[], bool] | None = None) -> bool:
        """One pass from `schedule` to `schedule`: at most one forward of the target; raises what
        `advance` raises. before_phase: is called before every transition; False ends the step
        there. Returns False once the machine is in a final state, or `before_phase` has ended the
        step."""
        while not self.finished:
            if before_phase is not None and not before_phase():
                return False
            self.advance()
            if self.state == self.initial:
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


Pause = Callable[[EngineCore], bool]


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    RUNNING = "running"
    FAILED = "failed"
    LIMIT = "limit"  # limits.max_rounds
    INTERRUPTED = "interrupted"
    TERMINATED = "terminated"


STATUS_CODES = {
    Status.OK: Code.OK,
    Status.FAILED: Code.FAILED,
    Status.LIMIT: Code.FAILED,
    Status.INTERRUPTED: Code.INTERRUPTED,
    Status.TERMINATED: Code.TERMINATED,
}


class StopSignal(ExitStack):
    """Turns the first Ctrl-C or SIGTERM into a request to stop between two transitions; a second
    one is handled as before. Outside the main thread signals keep their handlers."""

    status: Status | None = None  # until a signal has come

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in NAMES}
        self.enter_context(handling(self._stop))
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.status is not None:
            give_back(number, self._before[signal.Signals(number)])
        else:
            self.status = Status.INTERRUPTED if number == signal.SIGINT else Status.TERMINATED


def drive(
    core: EngineCore,
    recorder: Recorder,
    *,
    max_rounds: int,
    stop: StopSignal | None = None,
    pause: Pause | None = None,
) -> Status:
    """Step to the end, to the limit of rounds while requests are unfinished, or to a stop signal;
    raises errors of ops. pause: is called before every transition; False stops the run. Its time
    does not count as the run's."""
    status = Status.OK
    stop = stop or StopSignal()

    def before_phase() -> bool:
        nonlocal status
        if stop.status is not None:
            status = stop.status
        elif recorder.meter.rounds >= max_rounds and not all(r.finished for r in core.requests):
            status = Status.LIMIT
        elif pause is not None:
            start = perf_counter_ns()
            goes_on = pause(core)
            recorder.exclude(perf_counter_ns() - start)
            # A stop signal may have come during the pause.
            status = (stop.status or Status.OK) if goes_on else Status.INTERRUPTED
        return status is Status.OK

    while core.step(before_phase):
        pass
    return status


def delay(seconds: float, recorder: Recorder, stop: StopSignal) -> Pause:
    """A pause in which the viewer gets its pictures; a stop signal ends it."""

    def wait(core: EngineCore) -> bool:
        until = monotonic() + seconds
        recorder.snapshot_requested = True
        while (remaining := until - monotonic()) > 0 and stop.status is None:
            if recorder.snapshot_requested:
                recorder.take_snapshot()
            sleep(min(remaining, POLL_SECONDS))
        return True

    return wait
