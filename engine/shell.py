"""Manners towards the shell."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


def _drop_output() -> None:
    """Point stdout at nothing, so that the interpreter's last flush has somewhere to go."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
