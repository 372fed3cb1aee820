"""Fleets without Ray: replicas in threads of this process, which can be lost, or hang."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

from specsot.engine.cli.serving.serve import plain_options
from specsot.engine.prepare.options import RunOptions
from specsot.engine.serve.fleet.fleet import Fleet
from specsot.engine.serve.fleet.members import Berth
from specsot.engine.serve.wire.engines import Engines
from specsot.engine.serve.wire.hosts import Pipe
from specsot.engine.serve.wire.link import EngineLink
from specsot.engine.serve.wire.protocol import MOST, Ended, Message, Start, Submit, Wrote
from specsot.engine.serve.worker.process import Worker

LOADS = Lock()
GRAPHS, BUDGET, DEADLINE = ("bim_dflash", "dflash"), 24, 2.0


def start_of(*graphs: str, budget: int = BUDGET) -> Start:
    return Start(graphs or GRAPHS, plain_options(RunOptions(threads=1, max_new_tokens=budget)))


class ThreadHost:
    """The same worker and the same messages, in a thread.

    Attributes:
        goes: what it says arrives; cleared, it hangs.
    """

    pid: int | None = None

    def __init__(self) -> None:
        self.goes = Event()
        self._ends: list[socket.socket] = []
        self._loads = False
        self._worker: Thread | None = None

    async def start(self) -> Pipe:
        ours, relay = socket.socketpair()
        back, theirs = socket.socketpair()
        self._ends = ends = [ours, relay, back, theirs]
        self.goes.set()
        self._worker = Thread(target=self._work, args=(theirs,), daemon=True)
        self._worker.start()
        for source, sink in ((back, relay), (relay, back)):
            Thread(target=self._pump, args=(source, sink, ends), daemon=True).start()
        return await asyncio.open_connection(sock=ours, limit=MOST)

    def _work(self, pipe: socket.socket) -> None:
        """Models are loaded in one thread at a time: until it says that it has them."""
        LOADS.acquire()
        self._loads = True
        try:
            Worker(pipe).run()
        finally:
            self._loaded()

    def _loaded(self) -> None:
        if self._loads:
            self._loads = False
            LOADS.release()

    def _pump(
        self, source: socket.socket, sink: socket.socket, ends: Sequence[socket.socket]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if source is ends[2]:
                    self._loaded()
                self.goes.wait()
                sink.sendall(data)
        _shut(ends)

    def end(self) -> None:
        """Lose it, whatever it does."""
        _shut(self._ends)

    async def reap(self) -> None:
        self.goes.set()
        self.end()
        if self._worker is not None:
            await asyncio.to_thread(self._worker.join, 10)


def _shut(ends: Sequence[socket.socket]) -> None:
    for one in ends:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@dataclass
class Heard:
    """What whoever asked was told."""

    text: str = ""
    pieces: dict[int, list[str]] = field(default_factory=dict)
    once: list[tuple[str, int, Any]] = field(default_factory=list)
    scores: dict[int, list[Any]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None

    def took(self, message: Message) -> None:
        if isinstance(message, Ended):
            self.ended = message
        if not isinstance(message, Wrote):
            return
        self.text += message.text
        self.tokens.append(message.tokens)
        for name, branch, more in message.events:
            if name == "wrote":
                self.pieces.setdefault(branch, []).extend(piece for piece, _ in more)
            else:
                self.once.append((name, branch, more))
        for branch, token, text, score, _ in message.scores:
            rounded = None if score is None else round(score, 4)
            self.scores.setdefault(branch, []).append([token, text, rounded])

    @property
    def result(self) -> tuple[Any, ...]:
        """What does not depend on who wrote it, and when."""
        assert self.ended is not None
        usage = {name: count for name, count in self.ended.usage.items() if name != "cached"}
        ended = self.ended.text, self.ended.finish, self.ended.stop, usage
        return self.text, self.pieces, sorted(self.once, key=repr), self.scores, ended


async def hear(engines: Engines, asked: Submit, into: list[Heard] | None = None) -> Heard:
    """All that is said of a request; it is in the list from its beginning."""
    heard, ticket = Heard(), engines.ask(asked)
    if into is not None:
        into.append(heard)
    while heard.ended is None:
        heard.took(await ticket.next())
    ticket.close()
    return heard


async def hear_all(
    engines: Engines, asked: Sequence[Submit], into: list[Heard] | None = None
) -> list[Heard]:
    return [*await asyncio.gather(*(hear(engines, one, into) for one in asked))]


@asynccontextmanager
async def running(engines: Engines, replicas: int = 1) -> AsyncIterator[None]:
    """Engines while they run, from when so many are ready."""
    running = asyncio.create_task(engines.run())
    try:
        await until(lambda: sum(one.state == "ready" for one in engines.replicas) == replicas)
        yield
    finally:
        await engines.close()
        await running


async def until(holds: Any, seconds: float = 60.0) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)


def one_engine(start: Start) -> EngineLink:
    """What an ordinary server has."""
    return EngineLink(start, ThreadHost())


@dataclass
class ThreadFleet:
    """A fleet, and where its replicas run, by number."""

    start: Start
    count: int = 2
    deadline: float = DEADLINE
    hosts: dict[int, ThreadHost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fleet = Fleet(self._berth, self.count, self.deadline)

    def _berth(self, number: int) -> Berth:
        self.hosts[number] = ThreadHost()
        return Berth(self.start, self.hosts[number])

    @property
    def busiest(self) -> int:
        """The number of the replica with most to do."""
        facts = max(self.fleet.replicas, key=lambda one: one.tokens)
        return int(facts.name.rpartition("-")[2])
