"""One engine's process: it is started, fed, watched, and started again."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

from ...shell import complain
from .engines import Engines, LinkState, ReplicaFacts
from .hosts import EngineHost, HostError, Pipe
from .protocol import (
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
from .tickets import EngineGoneError, Ticket

PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds before it is started again, by how often it died
LOADING = 300.0  # seconds that a process which is watched has to load its models
LOOKED = 0.25  # seconds between two looks at whether it still says something


class EngineLink(Engines):
    """An engine's process, and who waits for it.

    Args:
        start: what it is told first.
        name: what it is called when it is told of.
        deadline: seconds of silence after which it has hung; None: it is not watched. It counts
            what it does several times a second, and says so.
        tries: how often in a row it may end before it is ready; None: it is always tried again.
        told: is called when the state has changed.

    Attributes:
        counts: what each engine has done, the last that was told. restarts: how often the process
            was started again. why: it ended, the last time.
    """

    counts: Mapping[str, Mapping[str, Any]] = {}

    def __init__(
        self,
        start: Start,
        host: EngineHost,
        name: str = "the engine's process",
        *,
        deadline: float | None = None,
        tries: int | None = None,
        told: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.host = host
        self.name = name
        self.restarts = 0
        self.why = ""
        self._start = start
        self._deadline = deadline
        self._tries = tries
        self._told = told
        self._tickets: dict[str, Ticket] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._lines = 0

    @property
    def open(self) -> int:
        return len(self._tickets)

    @property
    def pid(self) -> int | None:
        return self.host.pid

    @property
    def replicas(self) -> tuple[ReplicaFacts, ...]:
        done = self.open, 0, self.written, self.restarts
        return (ReplicaFacts("engine", str(self.state), self.pid, *done),)

    @property
    def written(self) -> int:
        """Tokens of this life of it."""
        return sum(one["tokens"] for one in self.counts.values())

    # -- the process ------------------------------------------------------------------------------

    async def run(self) -> None:
        died = failures = 0
        while not self._over:
            began = monotonic()
            self._lines = 0
            self.why = "has ended"
            try:
                await self._live()
            except HostError as error:
                self.why = f"cannot be started: {error}"
            finally:
                self._tell_dead()
            if self._over:
                return
            died = 1 if monotonic() - began > 60 else died + 1
            failures = 0 if self._lines else failures + 1
            if self._tries is not None and failures >= self._tries:
                self.failed = Failed(1, f"{self.name} {self.why}, {failures} times in a row")
                self._set(LinkState.DEAD)
                return
            self.restarts += 1
            complain(f"{self.name} {self.why}; it is started again ({self.restarts})")
            await asyncio.sleep(PAUSES[min(died, len(PAUSES)) - 1])

    @property
    def _over(self) -> bool:
        return self.state is LinkState.CLOSED or self.failed is not None

    async def _live(self) -> None:
        """One life of the process; raises HostError if it does not begin."""
        self._set(LinkState.STARTING)
        watch: asyncio.Task[None] | None = None
        try:
            pipe = await self.host.start()
            if self._deadline is not None:
                watch = asyncio.create_task(self._watch(self._deadline))
            await self._listen(pipe)
        finally:
            if watch is not None:
                watch.cancel()
            await self.host.reap()

    async def _listen(self, pipe: Pipe) -> None:
        reader, self._writer = pipe
        try:
            if self._over:
                return
            self._send(self._start)
            with suppress(ConnectionError, ValueError):
                while line := await reader.readline():
                    self._lines += 1
                    self._took(unpacked(line))
        finally:
            self._writer.close()

    async def _watch(self, deadline: float) -> None:
        """Cut off a process that says nothing; only time in which this one could listen counts."""
        silent = 0.0
        while True:
            began = monotonic()
            heard = self._lines
            await asyncio.sleep(LOOKED)
            silent = 0 if self._lines > heard else silent + min(monotonic() - began, 2 * LOOKED)
            if silent > (deadline if self.ready else LOADING):
                self.why = f"has not answered for {silent:.0f} s"
                if self._writer is not None:
                    self._writer.transport.abort()
                return

    def _tell_dead(self) -> None:
        """Everybody who waits is told at once."""
        if self.state is not LinkState.CLOSED:
            self._set(LinkState.DEAD)
        tickets = [*self._tickets.values()]
        self._tickets = {}
        for ticket in tickets:
            ticket.put(None)

    def _set(self, state: LinkState) -> None:
        super()._set(state)
        if self._told is not None:
            self._told()

    def _took(self, message: Message) -> None:
        match message:
            case Ready(graphs):
                self.graphs = graphs
                if self.state is LinkState.STARTING:
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
        self._set(LinkState.CLOSED)
        self.host.end()
        if self._writer is not None:
            self._writer.close()

    # -- requests ---------------------------------------------------------------------------------

    def ask(self, message: Submit | Encode | Decode) -> Ticket:
        ticket = Ticket(self, message.id)
        self.give(message, ticket)
        return ticket

    def give(self, message: Submit | Encode | Decode, ticket: Ticket) -> None:
        """Hand a message over; its answers come to this ticket. Raises EngineGoneError."""
        if not self.ready:
            raise EngineGoneError("the engine is not there")
        self._send(message)
        self._tickets[message.id] = ticket

    def forget(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.id, None) is not None and not ticket.ended:
            with suppress(EngineGoneError):
                self._send(Cancel(ticket.id))

    def look(self, on: bool) -> None:
        self._send(Look(on))
