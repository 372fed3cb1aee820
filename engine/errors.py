"""Exit codes of errors, and one clear line for every kind of error."""

import re
from enum import IntEnum
from traceback import walk_tb

from ..models.files import ModelError
from ..states.text.tokens import OutlineError, PromptError
from ..states.yaml.source import GraphError


class Code(IntEnum):
    """Exit codes of `specsot`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    GRAPH = 3
    MODEL = 4
    UNEQUAL = 5
    REGRESSION = 6
    INTERRUPTED = 130
    TERMINATED = 143


class UsageError(ValueError):
    """An option or an input file that cannot be used."""


class LacksDrafterError(UsageError):
    """A graph drafts with a model, and no drafter model is given."""


class ClusterError(RuntimeError):
    """A cluster that cannot be used, or cannot continue, with the reason."""


class UnequalError(ValueError):
    """Two results that had to be equal are not."""


CODES: dict[type[BaseException], Code] = {  # of errors whose message says all that a user needs
    ClusterError: Code.FAILED,
    UsageError: Code.USAGE,
    PromptError: Code.USAGE,
    OutlineError: Code.USAGE,
    GraphError: Code.GRAPH,
    ModelError: Code.MODEL,
    UnequalError: Code.UNEQUAL,
    KeyboardInterrupt: Code.INTERRUPTED,
}


def code_of(error: BaseException) -> Code:
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), Code.FAILED)


def is_told(error: BaseException) -> bool:
    """True if the message says all that a user needs; other errors are faults of a program."""
    return isinstance(error, tuple(CODES)) or refusal(error) is not None


def refusal(error: BaseException) -> str | None:
    """The resource that the machine refused: a full disk, a missing right, too little memory."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        return reason if error.filename is None else f"{error.filename}: {reason}"
    first = first_line(error)
    short = "can't allocate memory" in first or type(error).__name__ == "OutOfMemoryError"
    if not short and not isinstance(error, MemoryError):
        return None
    size = re.search(r"allocate ([0-9.]+ ?[KMGT]?i?B|[0-9]+ bytes)", first)
    return "not enough memory" + (f" for {size[1]}" if size else "")


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]


def fault_of(error: BaseException) -> str:
    """The part with a defect: the package of an extension that raised an error, with file and line,
    or specsot. A module of an extension has something of specsot among its names."""
    from ..states.graph.plugins import line_of, package_of
    from ..states.policies import PolicyError

    cause = error.__cause__ if isinstance(error, PolicyError) and error.__cause__ else error
    for frame, _ in walk_tb(cause.__traceback__):
        package = package_of(frame)
        modules = (str(getattr(value, "__module__", "")) for value in frame.f_globals.values())
        if package != "specsot" and any(name.startswith("specsot.") for name in modules):
            return f"{package} ({line_of(cause, package)})"
    return "the policy" if isinstance(error, PolicyError) else "specsot"


def message_of(error: BaseException) -> str:
    """The message for the user; a fault has its type and its place in the graph."""
    if isinstance(error, tuple(CODES)):
        return str(error) or type(error).__name__
    places = [str(note) for note in getattr(error, "__notes__", ())]
    message = refusal(error) or ": ".join(filter(None, (type(error).__name__, first_line(error))))
    return ": ".join([*places, message])
