"""Runs: an engine over a closed list of requests, driven to its end, a limit or a stop signal."""

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from time import monotonic, perf_counter_ns, sleep
from types import FrameType
from typing import Self

from ...states.request import Request
from ..errors import Code
from ..prepare.inputs import Prompt
from ..record.recorder import Recorder
from ..record.trace import Write
from .core import EngineCore
from .session import Session

Pause = Callable[[EngineCore], bool]
POLL_SECONDS = 0.05  # of the stop signal and the viewer during a delay


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
    Ctrl-C stops at once. Outside the main thread signals keep their handlers."""

    status: Status | None = None  # until a signal has come

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self.callback(signal.signal, number, signal.signal(number, self._stop))
        return self

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.status is not None:
            raise KeyboardInterrupt
        interrupted = number == signal.SIGINT
        self.status = Status.INTERRUPTED if interrupted else Status.TERMINATED


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

    def before_phase() -> bool:
        nonlocal status
        if stop is not None and stop.status is not None:
            status = stop.status
        elif recorder.meter.rounds >= max_rounds and not all(r.finished for r in core.requests):
            status = Status.LIMIT
        elif pause is not None:
            start = perf_counter_ns()
            goes_on = pause(core)
            recorder.exclude(perf_counter_ns() - start)
            if not goes_on:
                status = Status.INTERRUPTED
            elif stop is not None and stop.status is not None:  # during the pause
                status = stop.status
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
            recorder.serve_snapshot()
            sleep(min(remaining, POLL_SECONDS))
        return True

    return wait


def perform(
    session: Session,
    prompts: Sequence[Prompt | Request],
    *,
    write: Write | None = None,
    stop: StopSignal | None = None,
    max_rounds: int | None = None,
) -> tuple[EngineCore, Recorder, Status]:
    """A recorded run without a view, driven to its end, to `max_rounds` (by default the graph's
    limit) or to a stop signal."""
    core, recorder = recorded(session, prompts, write)
    limit = max_rounds or session.program.graph.limits.max_rounds
    status = drive(core, recorder, max_rounds=limit, stop=stop)
    recorder.flush()
    return core, recorder, status


def recorded(
    session: Session, prompts: Sequence[Prompt | Request], write: Write | None
) -> tuple[EngineCore, Recorder]:
    """A run before its first step, with the recorder of its events."""
    recorder = Recorder(session.prompts.decode, write)
    core = session.start(prompts, recorder)
    recorder.attach(core)
    return core, recorder
