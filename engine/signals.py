"""Ctrl-C and SIGTERM end the program with one line and an exit code at any time. During the start
the process ends at once: there are no results yet. Later they are exceptions, so that results are
written. No exception is raised during an import: some extensions swallow it and continue with half
a module."""

import gc
import os
import signal
from contextlib import suppress
from types import FrameType
from typing import NoReturn

NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
POLL_SECONDS = 0.02  # between two checks for the end of an import

_postponed: list[int] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def end_at_once() -> None:
    """From now on signals end the process; ignored signals (nohup) stay ignored."""
    for number in NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def raise_them() -> None:
    """From now on signals raise KeyboardInterrupt and Terminated."""
    for number in NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


def let_close() -> None:
    """Ignore signals while the program closes: an exception would print a traceback."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in NAMES:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # the process ends: garbage collection is useless


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"specsot: {NAMES[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise at once, or after the current import; a second signal then ends the process."""
    if not _importing(frame):
        raise _error(number)
    if _postponed:
        _end(number, frame)
    _postponed.append(number)
    signal.signal(signal.SIGALRM, _check_import)
    signal.setitimer(signal.ITIMER_REAL, POLL_SECONDS, POLL_SECONDS)


def _check_import(number: int, frame: FrameType | None) -> None:
    if not _importing(frame):
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _error(_postponed.pop())


def _error(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _importing(frame: FrameType | None) -> bool:
    """Whether the import system is among the callers of a frame."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
