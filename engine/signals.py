"""Ctrl-C and SIGTERM end the program with one line and an exit code at any time. No handler raises
an exception while specsot computes: in a destructor or a callback of a library it is swallowed."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

NAMES = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
CURSOR = b"\x1b[?25h\r\x1b[K"  # shows it, in an empty line
SCREEN = b"\x1b[?1049l"  # the normal one


def end_at_once() -> None:
    """From now on signals end the process; ignored signals (nohup) stay ignored."""
    terminal = None
    with suppress(Exception):  # no terminal, or no such module
        import termios

        terminal = termios.tcgetattr(0)

    def end(number: int, frame: FrameType | None) -> NoReturn:
        with suppress(Exception):
            if terminal is not None and os.tcgetpgrp(0) == os.getpgrp():
                termios.tcsetattr(0, termios.TCSANOW, terminal)
        with suppress(OSError):
            os.write(2, CURSOR if os.isatty(2) else b"")
            os.write(2, f"specsot: {NAMES[signal.Signals(number)]}\n".encode())
        os._exit(128 + number)

    for number in NAMES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def let_close() -> None:
    """Ignore signals while the program closes: an exception would print a traceback."""
    for number in NAMES:
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # the process ends: garbage collection is useless


@contextmanager
def handling(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Call this handler in the block, if these signals are not ignored; only in the main thread."""
    main = threading.current_thread() is threading.main_thread()
    with ExitStack() as stack:
        for number in (numbers or NAMES) if main else ():
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                stack.callback(signal.signal, number, before)
                signal.signal(number, handler)
        yield


@contextmanager
def ending_with(clean: Callable[[], object]) -> Iterator[None]:
    """A signal that ends the process in the block calls this before: it must not wait for locks."""
    before = {number: signal.getsignal(number) for number in NAMES}

    def end(number: int, frame: FrameType | None) -> None:
        for name in NAMES:
            signal.signal(name, signal.SIG_IGN)
        with suppress(Exception):
            clean()
        give_back(number, before[signal.Signals(number)])

    with handling(end):
        yield


def give_back(number: int, handler: Any) -> None:
    """Let the handler of before have a signal."""
    signal.signal(number, handler)
    signal.raise_signal(number)
