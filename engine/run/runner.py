"""The loop of a run. It is the only place of the program that calls `advance`."""

import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import StrEnum
from time import monotonic, perf_counter_ns, sleep
from types import FrameType
from typing import TYPE_CHECKING, Self

from ...states.machine import Run
from ..errors import Code
from ..prepare.inputs import Prompt
from ..record.recorder import Recorder
from ..record.trace import Write

if TYPE_CHECKING:
    from .session import Session


Pause = Callable[[Run], bool]
SLICE = 0.05  # seconds between two looks at who wants something of a run that waits


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


class Halt(ExitStack):
    """Turns the first Ctrl-C or SIGTERM into a request to stop between two transitions.

    A second Ctrl-C stops at once. Outside the main thread signals are left alone.

    Attributes:
        status: None until somebody asked to stop.
    """

    status: Status | None = None

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
    run: Run,
    recorder: Recorder,
    *,
    max_rounds: int,
    halt: Halt | None = None,
    pause: Pause | None = None,
) -> Status:
    """Advance to the end, to the limit, or until somebody stops it.

    Args:
        max_rounds: rounds that a run may make before all its requests have ended.
        pause: called before every transition; False stops the run. The time that it takes is not
            the run's.

    Raises:
        Exception: whatever an op raised; what was committed before it is still there.
    """
    while not run.finished:
        if (asked := _asked(halt)) is not None:
            return asked
        enough = recorder.meter.rounds >= max_rounds
        if enough and not all(one.finished for one in run.board["branches"].requests):
            return Status.LIMIT
        if pause is not None:
            began = perf_counter_ns()
            goes_on = pause(run)
            recorder.waited(perf_counter_ns() - began)
            if not goes_on:
                return Status.INTERRUPTED
            if (asked := _asked(halt)) is not None:  # meanwhile
                return asked
        run.advance()
    return Status.OK


def _asked(halt: Halt | None) -> Status | None:
    """How somebody wants the run to end."""
    return None if halt is None else halt.status


def slowed(seconds: float, recorder: Recorder, halt: Halt) -> Pause:
    """A pause of so many seconds; pictures are made meanwhile, and a halt ends it."""

    def wait(run: Run) -> bool:
        until = monotonic() + seconds
        recorder.wanted = True
        while (left := until - monotonic()) > 0 and halt.status is None:
            recorder.serve()
            sleep(min(left, SLICE))
        return True

    return wait


def perform(
    session: "Session",
    prompts: Sequence[Prompt],
    *,
    write: Write | None = None,
    halt: Halt | None = None,
    max_rounds: int | None = None,
) -> tuple[Run, Recorder, Status]:
    """A recorded run without a view, driven to its end or until somebody stops it.

    Without `max_rounds` it may make as many as the graph says.
    """
    run, recorder = recorded(session, prompts, write)
    most = max_rounds or session.program.graph.limits.max_rounds
    status = drive(run, recorder, max_rounds=most, halt=halt)
    recorder.flush()
    return run, recorder, status


def recorded(
    session: "Session", prompts: Sequence[Prompt], write: Write | None
) -> tuple[Run, Recorder]:
    """A run before its first transition, with a recorder that takes its events."""
    recorder = Recorder(session.prompts.decode, write)
    run = session.start(prompts, recorder)
    recorder.attach(run)
    return run, recorder
