"""What a failure means to the shell: exit codes, and one clear line for every kind of error."""

import re
from enum import IntEnum
from traceback import walk_tb

from ..models.files import ModelError
from ..states.text.outline import OutlineError
from ..states.yaml.source import GraphError
from .signals import Terminated


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
    """A graph drafts, and nobody has said with what model."""


class ClusterError(RuntimeError):
    """A cluster that cannot be used, or cannot go on; says why."""


class UnequalError(ValueError):
    """Two results that had to be equal are not."""


def code_of(error: BaseException) -> Code:
    """The exit code that an error ends the program with."""
    from ..states.text.template import TemplateError
    from ..states.text.tokens import PromptError

    kinds: list[tuple[type[BaseException] | tuple[type[BaseException], ...], Code]] = [
        ((UsageError, PromptError, OutlineError), Code.USAGE),
        ((GraphError, TemplateError), Code.GRAPH),
        (ModelError, Code.MODEL),
        (UnequalError, Code.UNEQUAL),
        (Terminated, Code.TERMINATED),
        (KeyboardInterrupt, Code.INTERRUPTED),
    ]
    return next((code for kind, code in kinds if isinstance(error, kind)), Code.FAILED)


def is_told(error: BaseException) -> bool:
    """Whether the message says all that a user needs; anything else is a fault of some program."""
    known = code_of(error) is not Code.FAILED or isinstance(error, ClusterError)
    return known or refusal(error) is not None


def refusal(error: BaseException) -> str | None:
    """What the machine refused, in words: a full disk, a missing right, too little memory."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        return reason if error.filename is None else f"{error.filename}: {reason}"
    first = first_line(error)
    short = "can't allocate memory" in first or type(error).__name__ == "OutOfMemoryError"
    if not short and not isinstance(error, MemoryError):
        return None
    asked = re.search(r"allocate ([0-9.]+ ?[KMGT]?i?B|[0-9]+ bytes)", first)
    return "not enough memory" + (f" for {asked[1]}" if asked else "")


def first_line(error: BaseException) -> str:
    """Of what the error says."""
    return str(error).strip().split("\n", 1)[0]


def fault_of(error: BaseException) -> str:
    """The package to blame for an error that is not the user's: of the op that raised it.

    An op or a guard is called by `states.machine`; what stands below it may be anybody's.
    """
    frames = [frame.f_globals["__name__"] for frame, _ in walk_tb(error.__traceback__)]
    machine = "specsot.states.machine"
    called = next((i for i in reversed(range(len(frames))) if frames[i] == machine), -1) + 1
    return str(frames[called]).split(".")[0] if 0 < called < len(frames) else "specsot"


def message_of(error: BaseException) -> str:
    """What to tell the user; a fault is told with its kind and its place in the graph."""
    if code_of(error) is not Code.FAILED or isinstance(error, ClusterError):
        return str(error) or type(error).__name__
    places = [str(note) for note in getattr(error, "__notes__", ())]
    told = refusal(error) or ": ".join(filter(None, (type(error).__name__, first_line(error))))
    return ": ".join([*places, told])
