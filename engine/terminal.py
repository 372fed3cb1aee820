"""What kind of terminal there is, and a sign of life on it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from .shell import Writer

REFRESH = 4.0  # pictures per second: a spinner must not cost the work that it stands for
LINE_EVERY = 10.0  # seconds between lines where there is no terminal


def usable(console: Console, environ: dict[str, str]) -> bool:
    """Whether a live view makes sense: a real terminal that nobody asked to be kept plain."""
    plain = environ.get("NO_COLOR") or environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_terminal and not console.is_dumb_terminal and not plain


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr while something goes on; yields what changes its text.

    Where nobody watches, or nothing shall move, now and then a line of its own.
    """
    console = Console(stderr=True)
    if not usable(console, dict(os.environ)):
        yield _lines_now_and_then()
        return
    with console.status(Text(text), refresh_per_second=REFRESH) as status:
        yield lambda text: status.update(Text(text))


@contextmanager
def measuring(text: str) -> Iterator[Callable[[str, float], None]]:
    """The same with a bar, for what can say how far it is."""
    console = Console(stderr=True)
    if not usable(console, dict(os.environ)):
        lines = _lines_now_and_then()
        yield lambda text, share: lines(text)
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, refresh_per_second=REFRESH, transient=True) as bar:
        task = bar.add_task(text, total=None)

        def tell(text: str, share: float) -> None:
            bar.update(task, description=text, total=1.0, completed=share)

        yield tell


def _lines_now_and_then() -> Callable[[str], None]:
    write = Writer(sys.stderr)
    last = monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if monotonic() - last >= LINE_EVERY:
            last = monotonic()
            write(f"{text}\n")

    return tell
