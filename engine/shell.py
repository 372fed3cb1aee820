"""Manners towards the shell."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

DEBUG = "SPECSOT_DEBUG"


@contextmanager
def broken_pipe_is_no_error() -> Iterator[None]:
    """`specsot ... | head` ends quietly: whoever reads has seen enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(0) from None
    except SystemExit:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_output()
        raise


@contextmanager
def one_line_for_faults() -> Iterator[None]:
    """An error that no command has dealt with: one line, and where to get the rest."""
    try:
        yield
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        first = str(error).strip().split("\n", 1)[0]
        print(f"specsot: {type(error).__name__}: {first}", file=sys.stderr)
        print(f"specsot: this is a fault of specsot; {DEBUG}=1 shows where", file=sys.stderr)
        raise SystemExit(1) from None


def _drop_output() -> None:
    """Point stdout at nothing, so that the interpreter's last flush has somewhere to go."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
