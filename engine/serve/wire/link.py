"""The HTTP side's end of the engine's process: it is started, fed, watched, and started again."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import StrEnum
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

from ...shell import complain
from .protocol import (
    MOST,
    Cancel,
    Counts,
    Decode,
    Encode,
    Failed,
    Look,
    Message,
    Picture,
    Ready,
    Start,
    Submit,
    packed,
    unpacked,
)

ENTRY = "from specsot.engine.serve.worker.process import main; main()"
PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds before it is started again, by how often it died
BEHIND = 5  # by how much the HTTP side gives way to the engine where both want the processor
HELD = 4096  # messages that wait for a slow client before it is cut off


class LinkState(StrEnum):
    """Where the engine's process stands."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class EngineGoneError(RuntimeError):
    """The engine's process has ended while it was being asked."""


class StalledError(RuntimeError):
    """A client did not read what was written for it."""


class Ticket:
    """One request's messages, in order."""

    def __init__(self, link: "EngineLink", id: str) -> None:
        self.link, self.id = link, id
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.ended = False

    def put(self, message: Message | None) -> None:
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
        self.link.forget(self)


class EngineLink:
    """The engine's process, and who waits for it.

    Attributes:
        graphs: what is served, once the process is ready. counts: what each engine has done, the
            last that was told. restarts: how often the process was started again.
        failed: why it cannot start, if it cannot.
    """

    def __init__(self, graphs: Sequence[str], options: Mapping[str, Any]) -> None:
        self._start = Start(graphs, options)
        self.state = LinkState.STARTING
        self.graphs: Mapping[str, Mapping[str, Any]] = {}
        self.counts: Mapping[str, Mapping[str, Any]] = {}
        self.restarts = 0
        self.failed: Failed | None = None
        self.watchers: set[Callable[[Picture], None]] = set()
        self.changed = asyncio.Event()
        self._tickets: dict[str, Ticket] = {}
        self._ids = count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[Any] | None = None
        self._starter = ThreadPoolExecutor(1)

    @property
    def ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def new_id(self) -> str:
        return f"r{next(self._ids)}"

    # -- the process ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the process alive until `close`; returns early if it cannot start.

        This thread gives way from now on, so that a flood of requests takes nothing from those that
        are answered. Only the thread that starts the process keeps its rank, for it inherits that.
        """
        self._starter.submit(os.getpid).result()
        if sys.platform == "linux":  # elsewhere the rank is the whole process's
            os.nice(BEHIND)
        died = 0
        while not self._over:
            began = monotonic()
            try:
                await self._live()
            finally:
                self._told_dead()
            if self._over:
                return
            died = 1 if monotonic() - began > 60 else died + 1
            self.restarts += 1
            complain(f"the engine's process has ended; it is started again ({self.restarts})")
            await asyncio.sleep(PAUSES[min(died, len(PAUSES)) - 1])

    @property
    def _over(self) -> bool:
        return self.state is LinkState.CLOSED or self.failed is not None

    async def _live(self) -> None:
        """One life of the process."""
        ours, theirs = socket.socketpair()
        self._set(LinkState.STARTING)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        start: Callable[[], subprocess.Popen[Any]] = partial(
            subprocess.Popen,
            [sys.executable, "-c", ENTRY, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = await asyncio.get_running_loop().run_in_executor(self._starter, start)
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=MOST)
        self._send(self._start)
        try:
            with suppress(ConnectionError, ValueError):
                while line := await reader.readline():
                    self._took(unpacked(line))
        finally:
            self._writer.close()
            await self._reap()

    async def _reap(self) -> None:
        """End what is left of the process."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            if process.poll() is None:
                process.kill()
        await asyncio.to_thread(process.wait)

    def _told_dead(self) -> None:
        """Everybody who waits is told at once."""
        if self.state is not LinkState.CLOSED:
            self._set(LinkState.DEAD)
        tickets, self._tickets = [*self._tickets.values()], {}
        for ticket in tickets:
            ticket.ended = True
            ticket.put(None)

    def _set(self, state: LinkState) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    def _took(self, message: Message) -> None:
        match message:
            case Ready(graphs):
                self.graphs = graphs
                self._set(LinkState.READY)
                if self.watchers:
                    self._send(Look(True))
            case Failed():
                self.failed = message
                self._set(LinkState.DEAD)
            case Counts(graphs):
                self.counts = graphs
            case Picture():
                for watcher in [*self.watchers]:
                    watcher(message)
            case _:
                if ticket := self._tickets.get(getattr(message, "id", "")):
                    ticket.put(message)

    def _send(self, message: Message) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineGoneError("the engine's process has ended")
        self._writer.write(packed(message))

    async def close(self) -> None:
        """End the process; whoever still waits is told."""
        self._set(LinkState.CLOSED)
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        if self._writer is not None:
            self._writer.close()

    # -- requests ---------------------------------------------------------------------------------

    def ask(self, message: Submit | Encode | Decode) -> Ticket:
        """Hand a message over; its answers come to the ticket. Raises EngineGoneError."""
        if not self.ready:
            raise EngineGoneError("the engine is not there")
        ticket = Ticket(self, message.id)
        self._send(message)
        self._tickets[message.id] = ticket
        return ticket

    async def answer(self, message: Encode | Decode) -> Message:
        """The only answer to a message."""
        ticket = self.ask(message)
        try:
            return await ticket.next()
        finally:
            ticket.ended = True
            ticket.close()

    def forget(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.id, None) is not None and not ticket.ended:
            with suppress(EngineGoneError):
                self._send(Cancel(ticket.id))

    # -- pictures ---------------------------------------------------------------------------------

    async def pictures(self) -> AsyncIterator[Picture]:
        """Pictures while somebody reads them; of several that wait only the last of each graph."""
        latest: dict[str, Picture] = {}
        some = asyncio.Event()

        def watcher(picture: Picture) -> None:
            latest[picture.graph] = picture
            some.set()

        self.watchers.add(watcher)
        with suppress(EngineGoneError):
            self._send(Look(True))
        try:
            while True:
                await some.wait()
                some.clear()
                pictures, latest = [*latest.values()], {}
                for picture in pictures:
                    yield picture
        finally:
            self.watchers.discard(watcher)
            if not self.watchers:
                with suppress(EngineGoneError):
                    self._send(Look(False))
