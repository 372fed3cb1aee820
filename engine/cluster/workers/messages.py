"""What the driver of a cluster and its workers say to each other: frozen messages, as JSON.

Nothing is unpickled on either side: a message is JSON, its `kind` one of these classes, and its
fields are checked when it is read. KV rows travel apart, in collectives.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ....states.migrated_request import MigratedRequest
from ...prepare.inputs import Prompt


class MessageError(ValueError):
    """A text that is no message."""


# -- to a worker ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Take part in a process group, which replaces the one before; and in smaller ones inside.

    epoch: its number. rank, size: in it. host, port: of the store where its members find each
    other. address: that this worker listens at. deadline: seconds, of every collective.
    skeleton, branches: how many write an outline together, and how many a branch (`units_of`).
    """

    epoch: int
    rank: int
    size: int
    host: str
    port: int
    address: str
    deadline: float
    skeleton: int = 1
    branches: int = 1


@dataclass(frozen=True, slots=True)
class Assign:
    """Do a part of a request: its outline, or some of its branches.

    work: what replies name it. prompt: of the request, its seed included. tp, unit: who does it,
    the unit of this number among those of so many workers; of one worker: whoever is told.
    """

    work: str
    prompt: Prompt
    handed: MigratedRequest
    tp: int = 1
    unit: int = 0


@dataclass(frozen=True, slots=True)
class Regroup:
    """The rows of a prefix go from those who have them to the whole group, in one collective.

    number: what replies name it. tp, unit: who has them. ids: of the target's rows.
    rows: so many of each pool. cache_salt: of the request.
    """

    number: int
    epoch: int
    tp: int
    unit: int
    ids: tuple[int, ...]
    rows: tuple[int, ...]
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Recall:
    """A part of a request is wanted no more; nothing: no part of any."""

    work: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """Say what has been done since the last time."""

    number: int


@dataclass(frozen=True, slots=True)
class Greet:
    """Another driver is there: forget what the last one wanted, and say `Loaded`."""


@dataclass(frozen=True, slots=True)
class Close:
    """End."""


# -- from a worker --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models are there. pid, address: of its process. most: branches that run side by side.
    weights: where the first parameter lies, and bytes of all."""

    pid: int
    address: str
    most: int
    weights: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CannotStart:
    """The worker ends; code: the exit code that goes with the reason."""

    code: int
    why: str


@dataclass(frozen=True, slots=True)
class Grouped:
    """Whether the group has been formed; why: not."""

    epoch: int
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A collective of the group failed: nothing is computed together until there is another one,
    and what was is forgotten."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens of a branch that are certain, from number `start` of its answer on."""

    work: str
    branch: int
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BranchEnded:
    """All tokens of a branch have been told. rows: of each pool that are kept of what an outline
    stands behind, and of itself, and can be sent to others."""

    work: str
    branch: int
    finish: str
    note: str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """Nothing of it is left to do."""

    work: str


@dataclass(frozen=True, slots=True)
class Regrouped:
    """The collective is over. bytes: that came here; kept: whether they were wanted and fit.
    seconds: in all, and of the collective alone. why: it failed. rows: what the source has, where
    it has not those that were asked for: then none came."""

    number: int
    bytes: int
    kept: bool
    seconds: float
    collective: float
    why: str = ""
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to `Count`. counts: of its `Meter`; held: `held_figures` of each of its engines.
    open_files: of its process; peak_memory: most that it was resident with, in KB on Linux."""

    number: int
    counts: dict[str, Any]
    held: list[dict[str, Any]]
    open_files: int
    peak_memory: int


Order = FormGroup | Assign | Regroup | Recall | Count | Greet | Close
Reply = (
    Loaded
    | CannotStart
    | Grouped
    | GroupLost
    | Committed
    | BranchEnded
    | WorkEnded
    | Regrouped
    | Counted
)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Order | Reply).__args__}


def is_shared(order: Order) -> bool:
    """Whether everybody in the group is told it, and in the same order among all of these: what is
    done together begins with one."""
    together = isinstance(order, Assign) and order.tp > 1
    return together or isinstance(order, FormGroup | Regroup | Recall)


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(KINDS[kind])


def packed(message: Order | Reply) -> str:
    """A message as text."""
    kind = type(message).__name__
    return json.dumps([kind, _adapter(kind).dump_python(message, mode="json")])


def match_scores(text: str) -> Order:
    """What a worker is told; raises MessageError."""
    message: Order = _unpacked(text)
    return message


def reply_of(text: str) -> Reply:
    """What a worker tells; raises MessageError."""
    message: Reply = _unpacked(text)
    return message


def _unpacked(text: str) -> Any:
    try:
        kind, values = json.loads(text)
        return _adapter(kind).validate_python(values)
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise MessageError(f"no message: {error}") from None
