"""Output to shells: encodings, closed pipes, errors in one line, tables, progress."""

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ..states.yaml.source import GraphError, Problem, RenamedKeyWarning
from .errors import Code, code_of, fault_of, is_told, message_of

if TYPE_CHECKING:  # a slow import
    from rich.console import Console

DEBUG = "SPECSOT_DEBUG"
STDOUT = "standard output"
WIDTH = 90  # of a line of a file that is shown
REFRESH = 4.0  # frames per second: a spinner must cost little
LINE_EVERY = 10.0  # seconds between lines without a terminal

CONTROL_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "\u2421"}
UNSAFE = re.compile(  # control characters, surrogates, marks that change the text direction
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\u2028\u2029]"
)


class Writer:
    """Writes and flushes; characters outside the encoding are escaped. A closed pipe is not an
    error, so that a run continues and writes its results when its output is piped into `head`.
    fault: why the stream cannot be written to; text after it is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.fault: OSError | None = None

    def __call__(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError as error:
            self.fault = None if isinstance(error, BrokenPipeError) else error
            _drop(self._stream)


def open_streams() -> None:
    """Replace closed standard streams by the null device: else the next opened file would get the
    number of the stream, and its output."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # stdout fails on write, which is reported: an answer would be lost.
            null = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            os.dup2(null, number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def complain(message: str) -> None:
    Writer(sys.stderr)(f"specsot: {message}\n")


def show_renamed_keys() -> None:
    """Print the warnings about old names of keys as messages."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, RenamedKeyWarning):
            complain(str(message))
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show


def _pointed(problem: Problem) -> str:
    """The problem; on a terminal with its line and a mark below its column."""
    if not (problem.line and sys.stderr.isatty()):
        return str(problem)
    package = Path(__file__).parents[1]  # the names of shipped files are relative to it
    files = [file for file in (Path(problem.file), package / problem.file) if file.is_file()]
    lines = files[0].read_text(encoding="utf-8", errors="replace").split("\n") if files else []
    if problem.line > len(lines):
        return str(problem)
    # One character for each: a control character is not for the terminal, a tab is one column.
    line = "".join(c if c.isprintable() else " " for c in lines[problem.line - 1])
    start = max(problem.column - 1 - WIDTH // 2, 0)
    mark = " " * (problem.column - 1 - start) + "^"
    return f"{problem}\n    {line[start : start + WIDTH]}\n    {mark}"


def tell_problems(problems: Iterable[Problem]) -> None:
    Writer(sys.stderr)("".join(f"{_pointed(problem)}\n" for problem in problems))


def ended(error: BaseException) -> Code:
    """Print a user's error or an interruption in one line, return its exit code; raise others."""
    if not is_told(error):
        raise error
    if isinstance(error, GraphError):
        complain("\n".join(map(_pointed, error.problems)) + error.more)
    else:
        complain("interrupted" if isinstance(error, KeyboardInterrupt) else message_of(error))
    return code_of(error)


@contextmanager
def user_errors() -> Iterator[None]:
    """End with one line and the exit code after a user's error, with 0 after a closed pipe."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # of `print`: `specsot schema | head`
        _drop(sys.stdout)
        raise typer.Exit from None
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(int(ended(error))) from None


def put(text: str) -> None:
    out = Writer(sys.stdout)
    out(text)
    if out.fault is not None:
        raise OSError(out.fault.errno, out.fault.strerror, STDOUT)


def deliver(
    text: str, place: str, what: str = "result", *, out: Writer | None = None, start: int = 0
) -> bool:
    """Write a text to stdout; True if that works. Otherwise to stderr, unless a file (`place`)
    holds it. what: its name in the message. start: characters that `out` has written already."""
    out = out or Writer(sys.stdout)
    out(text[start:])
    if out.fault is not None:
        where = f"is in {place}" if place else "follows here"
        complain(f"{STDOUT}: {message_of(out.fault)}; the {what} {where}")
        Writer(sys.stderr)("" if place else text)
    return out.fault is None


def printable(text: str, keep: str = "\n\t") -> str:
    """Control characters as Unicode's pictures of them, surrogates and direction overrides as
    replacement characters, except `keep`."""
    pictures = CONTROL_PICTURES | {char: char for char in keep}
    return UNSAFE.sub(lambda match: pictures.get(match[0], "\ufffd"), text)


def aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Lines of rows whose columns are two blanks apart."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def shortened(value: object, most: int) -> str:
    """The text of a value, of at most this many characters."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table in Markdown; control characters are made visible."""
    head, *body = (
        " | ".join(printable(str(cell), "").replace("|", "\\|") for cell in row)
        for row in (heads, *rows)
    )
    return [f"| {head} |", "|" + "---|" * len(heads), *(f"| {line} |" for line in body)]


def json_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def print_json(**parts: Any) -> None:
    print(json.dumps({"schema_version": 1, **parts}, indent=2))


@contextmanager
def one_line_for_faults() -> Iterator[None]:
    """Print an unhandled error in one line, with the way to its traceback."""
    try:
        yield
    except KeyboardInterrupt as error:  # outside of any command
        raise SystemExit(ended(error)) from None
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        complain(message_of(error))
        if not is_told(error):
            complain(f"this is a fault of {fault_of(error)}; {DEBUG}=1 shows where")
        raise SystemExit(1) from None
    finally:
        Writer(sys.stderr)("")
        out = Writer(sys.stdout)
        out("")
        if out.fault is not None:
            complain(f"{STDOUT}: {message_of(out.fault)}")
            raise SystemExit(1)


def _drop(stream: TextIO) -> None:
    """Redirect a stream to the null device, for the interpreter's last flush."""
    with suppress(OSError, ValueError):
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


def usable(console: "Console", environ: dict[str, str]) -> bool:
    """Whether a live view is possible: a terminal without NO_COLOR or CI."""
    plain = environ.get("NO_COLOR") or environ.get("CI", "").lower() not in ("", "0", "false")
    return console.is_terminal and not console.is_dumb_terminal and not plain


@contextmanager
def working(text: str, *, bar: bool = False) -> Iterator[Callable[..., None]]:
    """A progress line on stderr, or without a usable terminal a new line from time to time; yields
    a function that changes its text and, of a line with a bar, the share that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not usable(console, dict(os.environ)):
        last = monotonic()

        def show(text: str, share: float = 0.0) -> None:
            nonlocal last
            if monotonic() - last >= LINE_EVERY:
                last = monotonic()
                Writer(sys.stderr)(f"{text}\n")

        yield show
        return
    bars = (BarColumn(bar_width=24), TimeRemainingColumn()) if bar else ()
    columns = (SpinnerColumn(), *bars, TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, refresh_per_second=REFRESH, transient=True) as live:
        task = live.add_task(text, total=None)

        def update(text: str, share: float = 0.0) -> None:
            live.update(task, description=text, total=1.0, completed=share)

        yield update
