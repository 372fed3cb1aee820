"""Manners towards the shell: encodings, closed pipes, and no traceback for anybody."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TextIO, TypeVar

import typer

from .errors import Code, code_of, fault_of, is_ours, message_of

DEBUG = "SPECSOT_DEBUG"

P = ParamSpec("P")
R = TypeVar("R")


def writer(stream: TextIO) -> Callable[[str], None]:
    """Write and flush; whatever the encoding lacks is escaped, a reader that has gone is none.

    So a run goes on, and keeps what it makes, when its output is piped into `head`.
    """

    def write(text: str) -> None:
        encoding = stream.encoding or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except BrokenPipeError:
            _drop(stream)

    return write


def complain(message: str) -> None:
    """One message on stderr."""
    writer(sys.stderr)(f"specsot: {message}\n")


def ended(error: BaseException) -> Code:
    """The exit code of a user's mistake or an interruption, told in one line; faults go on."""
    if not is_ours(error):
        raise error
    complain("interrupted" if isinstance(error, KeyboardInterrupt) else message_of(error))
    return code_of(error)


def exit_code(command: Callable[P, int]) -> Callable[P, int]:
    """Let a command return its exit code also where a user's mistake ends it with one message."""

    @wraps(command)
    def called(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            return ended(error)

    return called


def json_text(document: Mapping[str, Any]) -> str:
    """A document for stdout."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def print_json(**parts: Any) -> None:
    """A document of these parts on stdout, in ASCII."""
    print(json.dumps({"schema_version": 1, **parts}, indent=2))


@contextmanager
def user_errors() -> Iterator[None]:
    """A user's mistake ends a command with one line and its exit code."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(int(ended(error))) from None


def quiet_pipes(function: Callable[P, R]) -> Callable[P, R]:
    """For commands that print as they like: `specsot schema | head` ends with 0."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = function(*args, **kwargs)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            _drop(sys.stdout)
            raise SystemExit(0) from None

    return called


@contextmanager
def one_line_for_faults() -> Iterator[None]:
    """An error that no command has dealt with: one line, and where to get the rest."""
    try:
        yield
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        first = str(error).strip().split("\n", 1)[0]
        complain(f"{type(error).__name__}: {first}")
        complain(f"this is a fault of {fault_of(error)}; {DEBUG}=1 shows where")
        raise SystemExit(1) from None
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _drop(sys.stdout)


def _drop(stream: TextIO) -> None:
    """Point a stream at nothing, so that the interpreter's last flush has somewhere to go."""
    with suppress(OSError, ValueError):
        number, null = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
