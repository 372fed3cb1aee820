"""What the HTTP side has of the engines, whether one process decodes or several replicas do."""

import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any

from .protocol import Decode, Encode, Failed, Message, Picture, Submit
from .tickets import EngineGoneError, Ticket

BEHIND = 5  # by how much the HTTP side gives way to engines where both want the processor

DRAINING = "draining"  # of a replica that gets nothing more


class LinkState(StrEnum):
    """Where an engine's process stands."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One process that decodes. state: a `LinkState`, or DRAINING; open: requests that it has;
    tokens: that are expected of it for them; written: in its life; restarts: how often it was
    started again."""

    name: str
    state: str
    pid: int | None
    open: int
    tokens: int
    written: int
    restarts: int


class Engines(ABC):
    """Takes requests, and gives back what engines say of them.

    Attributes:
        graphs: what is served, once it is known. failed: why nothing can be served, if so.
        reruns: how often requests were given to another process than the first.
        watchers: who wants pictures. changed: is set, and replaced, when the state changes.
    """

    def __init__(self) -> None:
        self.state = LinkState.STARTING
        self.graphs: Mapping[str, Mapping[str, Any]] = {}
        self.failed: Failed | None = None
        self.reruns = 0
        self.watchers: set[Callable[[Picture], None]] = set()
        self.changed = asyncio.Event()
        self._ids = count(1)

    @property
    def ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    @abstractmethod
    def open(self) -> int:
        """Requests that have not ended."""

    @property
    @abstractmethod
    def counts(self) -> Mapping[str, Mapping[str, Any]]:
        """What the engines of each graph have done, the last that was told."""

    @property
    @abstractmethod
    def replicas(self) -> Sequence[ReplicaFacts]:
        """The processes that decode."""

    @abstractmethod
    async def run(self) -> None:
        """Keep them alive until `close`; returns early if none can start."""

    @abstractmethod
    async def close(self) -> None:
        """End them; whoever still waits is told."""

    @abstractmethod
    def ask(self, message: Submit | Encode | Decode) -> Ticket:
        """Hand a message over; its answers come to the ticket. Raises EngineGoneError."""

    @abstractmethod
    def forget(self, ticket: Ticket) -> None:
        """Nobody reads it any more."""

    @abstractmethod
    def look(self, on: bool) -> None:
        """Whether pictures are wanted."""

    def new_id(self) -> str:
        return f"r{next(self._ids)}"

    def _set(self, state: LinkState) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    async def answer(self, message: Encode | Decode) -> Message:
        """The only answer to a message; raises EngineGoneError."""
        ticket = self.ask(message)
        try:
            return await ticket.next()
        finally:
            ticket.ended = True
            ticket.close()

    async def pictures(self) -> AsyncIterator[Picture]:
        """Pictures while somebody reads them; of several that wait only the last of each graph."""
        latest: dict[str, Picture] = {}
        some = asyncio.Event()

        def watcher(picture: Picture) -> None:
            latest[picture.graph] = picture
            some.set()

        self.watchers.add(watcher)
        with suppress(EngineGoneError):
            self.look(True)
        try:
            while True:
                await some.wait()
                some.clear()
                pictures = [*latest.values()]
                latest = {}
                for picture in pictures:
                    yield picture
        finally:
            self.watchers.discard(watcher)
            if not self.watchers:
                with suppress(EngineGoneError):
                    self.look(False)


def give_way() -> None:
    """This thread comes behind the engines from now on, so that a flood of requests takes nothing
    from those that are answered. Threads that are there already keep their rank."""
    if sys.platform == "linux":  # elsewhere the rank is the whole process's
        os.nice(BEHIND)
