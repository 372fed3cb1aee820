"""An experiment's result for people at a terminal."""

import io
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench.table import STYLE, WIDTH
from ..terminal import usable
from ..text_stream import printable
from .output import cells_of, columns_of
from .rows import Row
from .spec import Experiment


def render(
    experiment: Experiment,
    rows: Sequence[Row],
    notes: Sequence[str],
    stream: TextIO,
    environ: dict[str, str],
) -> str:
    """As wide as the stream's terminal, or WIDTH columns."""
    there = Console(file=stream)
    out = io.StringIO()
    width = there.width if there.is_terminal else WIDTH
    console = Console(file=out, width=width, force_terminal=usable(there, environ), highlight=False)
    unicode = "utf" in (stream.encoding or "utf-8").lower()
    console.print(_table(experiment, rows, box.SIMPLE_HEAD if unicode else box.ASCII))
    for note in notes:
        console.print(Text(printable(note, "")))
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _table(experiment: Experiment, rows: Sequence[Row], lines: box.Box) -> Table:
    paths = list(experiment.vary)
    names = columns_of(experiment, rows)
    table = Table(title=f"\n{experiment.name}: {experiment.doc}", box=lines, **STYLE)
    table.add_column("", no_wrap=True)
    table.add_column("side", overflow="fold")
    for path in paths:
        table.add_column(path.replace(".", ".\n"), overflow="fold")
    table.add_column("equal", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right", overflow="fold")
    for row in rows:
        cells = cells_of(row, paths, names, between="\n")
        table.add_row(*(Text(printable(text)) for text in cells))
    return table
