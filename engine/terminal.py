"""What kind of terminal there is, and a sign of life on it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

REFRESH = 4.0  # pictures per second: a spinner must not cost the work that it stands for


def usable(console: Console, environ: dict[str, str]) -> bool:
    """Whether a live view makes sense: a real terminal that nobody asked to be kept plain."""
    plain = environ.get("NO_COLOR") or environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_terminal and not console.is_dumb_terminal and not plain


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr while something goes on, only where somebody watches; yields what changes
    its text."""
    console = Console(stderr=True)
    if not usable(console, dict(os.environ)):
        yield lambda text: None
        return
    with console.status(Text(text), refresh_per_second=REFRESH) as status:
        yield lambda text: status.update(Text(text))
