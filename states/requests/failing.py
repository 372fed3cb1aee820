"""What goes wrong in somebody else's code ends one branch, with the reason."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from .lifecycles import Finish


class Ends(Protocol):
    """What can be ended."""

    def end(self, finish: Finish, note: str = "") -> None: ...


@contextmanager
def failing(branch: Ends) -> Iterator[None]:
    """What goes wrong inside ends this branch, with the reason, and nobody else."""
    try:
        yield
    except Exception as error:  # a grammar, a template: somebody else's code
        branch.end(Finish.FAILED, reason_of(error))


def reason_of(error: BaseException) -> str:
    """In a line: the kind of error, and what it says."""
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
