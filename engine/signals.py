"""Ctrl-C and SIGTERM end the program with one line and an exit code, whenever they come.

While the program starts, it ends at once: nothing has been done that could be kept. Then they are
exceptions, so that what was made is kept. None is raised in the midst of an import: some extensions
swallow it there and go on with half a module.
"""

import gc
import os
import signal
from contextlib import suppress
from types import FrameType
from typing import NoReturn

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
LOOK = 0.02  # seconds until somebody looks again whether an import has ended

_postponed: list[int] = []


class Terminated(KeyboardInterrupt):
    """SIGTERM: what ends at Ctrl-C ends at this, in the same way."""


def end_at_once() -> None:
    """From here on they end the process; whoever ignores one (nohup) goes on ignoring it."""
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def raise_them() -> None:
    """From here on they are KeyboardInterrupt and Terminated."""
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


def let_close() -> None:
    """The program closes by itself, and at once: an exception would be a traceback."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in WORDS:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # the process ends: nobody needs to look for garbage any more


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"specsot: {WORDS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    """At once or when the import is done; asked for twice in one import, it is the end."""
    if not _importing(frame):
        raise _error(number)
    if _postponed:
        _end(number, frame)
    _postponed.append(number)
    signal.signal(signal.SIGALRM, _look_again)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)


def _look_again(number: int, frame: FrameType | None) -> None:
    if not _importing(frame):
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _error(_postponed.pop())


def _error(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


def _importing(frame: FrameType | None) -> bool:
    """Whether a frame is called by the import system, from however far."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
