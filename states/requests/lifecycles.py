"""The lives of requests and of branches: two machines, declared in one table.

Whoever takes a way that is not in the table has a fault of ours: `transitions` raises MachineError.
The machines have no models of their own; a request or a branch is moved by `move`, which sets its
`stage`. A way costs some microseconds, and nobody takes one for a token or a round.
"""

import logging
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from transitions import Machine

logging.getLogger("transitions").setLevel(logging.WARNING)  # it tells of each step, at a price


class Stage(StrEnum):
    """Where a request or a branch stands."""

    WAITING = "waiting"
    PREFILL = "prefilling"  # a request whose prompt is read in chunks
    OUTLINE = "outlining"  # a request whose root branch is writing
    RUNNING = "running"
    MERGING = "merging"  # a request whose last branch combines the others
    PREEMPTED = "preempted"  # it had to make way, and goes on where it was once there is room
    DONE = "done"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


WAITS = (Stage.WAITING, Stage.PREEMPTED)
OPEN = (Stage.PREFILL, Stage.OUTLINE, Stage.RUNNING, Stage.MERGING)
LIVE = (*WAITS, *OPEN)
ENDED = (Stage.DONE, Stage.REFUSED, Stage.CANCELLED, Stage.FAILED)


class Way(NamedTuple):
    """One row of the table: from any of some stages to another."""

    name: str
    sources: tuple[Stage, ...]
    target: Stage
    doc: str


_NEW = (*WAITS, Stage.PREFILL)


def _ends(live: tuple[Stage, ...]) -> tuple[Way, ...]:
    return (
        Way("refuse", live, Stage.REFUSED, "it can never run, or not beside the others"),
        Way("cancel", live, Stage.CANCELLED, "somebody has ended it, or its time was up"),
        Way("fail", (*live, Stage.DONE), Stage.FAILED, "what it met ends it, and nobody else"),
    )


REQUEST_WAYS = (
    Way("read", _NEW, Stage.PREFILL, "a part of its prompt is read"),
    Way("outline", _NEW, Stage.OUTLINE, "its root branch writes the outline"),
    Way("run", (*_NEW, Stage.OUTLINE), Stage.RUNNING, "its branches write"),
    Way("merge", (*_NEW, Stage.RUNNING), Stage.MERGING, "one last branch combines the others"),
    Way("preempt", OPEN, Stage.PREEMPTED, "rows ran out, and it is the youngest"),
    Way("finish", (Stage.RUNNING, Stage.MERGING), Stage.DONE, "all of its branches have ended"),
    *_ends(LIVE),
)
BRANCH_WAYS = (
    Way("run", WAITS, Stage.RUNNING, "its prompt is read, or what is gone of its rows"),
    Way("preempt", (Stage.RUNNING,), Stage.PREEMPTED, "rows ran out, and it is the youngest"),
    Way("finish", (*WAITS, Stage.RUNNING), Stage.DONE, "a stop token, or its budget"),
    *_ends((*WAITS, Stage.RUNNING)),
)
LIFECYCLES = {"request": REQUEST_WAYS, "branch": BRANCH_WAYS}


class Finish(StrEnum):
    """Why a branch ended."""

    STOP = "stop"
    LENGTH = "length"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    FAILED = "failed"


ENDS = {  # which way of its life ends whom
    **dict.fromkeys((Finish.STOP, Finish.LENGTH), "finish"),
    **dict.fromkeys((Finish.CANCELLED, Finish.TIMEOUT), "cancel"),
    Finish.REFUSED: "refuse",
    Finish.FAILED: "fail",
}


class Staged(Protocol):
    """What has a life."""

    stage: Stage


def _machine(ways: Sequence[Way]) -> Machine:
    rows: list[dict[str, Any]] = [
        {"trigger": way.name, "source": list(way.sources), "dest": way.target} for way in ways
    ]
    return Machine(
        model=None,
        states=list(dict.fromkeys(s for way in ways for s in (*way.sources, way.target))),
        transitions=rows,
        initial=Stage.WAITING,
        auto_transitions=False,
        model_attribute="stage",
    )


_EVENTS = {name: _machine(ways).events for name, ways in LIFECYCLES.items()}


def move(kind: str, whom: Staged, way: str) -> None:
    """A request or a branch (`kind`) takes a way of its life.

    Raises:
        transitions.MachineError: there is no such way from where it stands.
    """
    _EVENTS[kind][way].trigger(whom)
