"""The kind of the terminal, and progress lines on it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from .shell import Writer

REFRESH = 4.0  # frames per second: a spinner must cost little
LINE_EVERY = 10.0  # seconds between lines without a terminal


def usable(console: Console, environ: dict[str, str]) -> bool:
    """Whether a live view is possible: a terminal without NO_COLOR or CI."""
    plain = environ.get("NO_COLOR") or environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_terminal and not console.is_dumb_terminal and not plain


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A progress line on stderr, or without a usable terminal a new line from time to time; yields
    a function that changes its text."""
    with measuring(text, bar=False) as show:
        yield lambda text: show(text, 0.0)


@contextmanager
def measuring(text: str, *, bar: bool = True) -> Iterator[Callable[[str, float], None]]:
    """The same with a progress bar."""
    console = Console(stderr=True)
    if not usable(console, dict(os.environ)):
        last = monotonic()

        def show(text: str, share: float) -> None:
            nonlocal last
            if monotonic() - last >= LINE_EVERY:
                last = monotonic()
                Writer(sys.stderr)(f"{text}\n")

        yield show
        return
    description = TextColumn("{task.description}", markup=False)
    bars = (BarColumn(bar_width=24), TimeRemainingColumn()) if bar else ()
    columns = (SpinnerColumn(), *bars, description)
    with Progress(*columns, console=console, refresh_per_second=REFRESH, transient=True) as live:
        task = live.add_task(text, total=None)
        yield lambda text, share: live.update(task, description=text, total=1.0, completed=share)
