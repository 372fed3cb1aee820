"""Who waits for the answers to a message, and what it is told."""

import asyncio
from typing import Protocol

from .protocol import Message

HELD = 4096  # messages that wait for a slow client before it is cut off


class EngineGoneError(RuntimeError):
    """The engine's process has ended while it was being asked."""


class StalledError(RuntimeError):
    """A client did not read what was written for it."""


class TicketOwner(Protocol):
    """Who was asked, and wants to know when nobody waits any more."""

    def forget(self, ticket: "Ticket") -> None: ...


class Ticket:
    """One request's messages, in order.

    Attributes:
        ended: nothing more will come, so that nothing is to be cancelled.
    """

    def __init__(self, asked_of: TicketOwner, id: str) -> None:
        self.asked_of = asked_of
        self.id = id
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.ended = False

    def put(self, message: Message | None) -> None:
        """One more message; None: the engine's process has ended."""
        self.ended = self.ended or message is None
        self._messages.put_nowait(message)

    async def next(self) -> Message:
        """The next message; raises EngineGoneError, StalledError."""
        if self._messages.qsize() > HELD:
            raise StalledError(f"{HELD} messages were not read")
        message = await self._messages.get()
        if message is None:
            raise EngineGoneError("the engine's process has ended")
        return message

    @property
    def waiting(self) -> int:
        return self._messages.qsize()

    def close(self) -> None:
        """Nobody reads any more; what has not ended is cancelled."""
        self.asked_of.forget(self)
