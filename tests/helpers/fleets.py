"""Fleets without Ray: replicas in threads of this process, which can be lost, or hang."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

from helpers.clusters import ThreadHost
from specsot.engine.cli.serve import plain_options
from specsot.engine.prepare.options import RunOptions
from specsot.engine.workers.link import WorkerSource
from specsot.engine.workers.process import WorkerProcess
from specsot.engine.workers.protocol import Ended, Message, Start, Submit, Wrote
from specsot.engine.workers.router import Router

LOADS = Lock()
GRAPHS, BUDGET, DEADLINE = ("bim_dflash", "dflash"), 24, 2.0


def start_of(*graphs: str, budget: int = BUDGET) -> Start:
    return Start(graphs or GRAPHS, plain_options(RunOptions(threads=1, max_new_tokens=budget)))


def engine_host(start: Start) -> ThreadHost:
    """The engine process of a server in a thread. Models are loaded in one thread at a time: until
    the first message says that they are loaded."""
    loading = Event()

    def serve(connection: socket.socket) -> None:
        LOADS.acquire()
        loading.set()
        try:
            WorkerProcess().serve(connection)
        finally:
            loaded()

    def loaded() -> None:
        if loading.is_set():
            loading.clear()
            LOADS.release()

    return ThreadHost(start, serve, loaded)


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


async def hear(engines: Router, asked: Submit, into: list[Heard] | None = None) -> Heard:
    """All that is said of a request; it is in the list from its beginning."""
    heard, ticket = Heard(), engines.ask(asked)
    if into is not None:
        into.append(heard)
    while heard.ended is None:
        heard.took(await ticket.next())
    ticket.close()
    return heard


async def hear_all(
    engines: Router, asked: Sequence[Submit], into: list[Heard] | None = None
) -> list[Heard]:
    return [*await asyncio.gather(*(hear(engines, one, into) for one in asked))]


@asynccontextmanager
async def running(engines: Router, replicas: int = 1) -> AsyncIterator[None]:
    """Router while they run, from when so many are ready."""
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


def one_engine(start: Start) -> Router:
    """What a server without replicas has."""
    return Router(WorkerSource(lambda number, part: engine_host(start)), single=True)


@dataclass
class ThreadFleet:
    """A router, and where its replicas run, by number."""

    start: Start
    count: int = 2
    deadline: float = DEADLINE
    hosts: dict[int, ThreadHost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fleet = Router(WorkerSource(self._host), self.count, self.deadline)

    def _host(self, number: int, part: int) -> ThreadHost:
        self.hosts[number] = engine_host(self.start)
        return self.hosts[number]

    @property
    def busiest(self) -> int:
        """The number of the replica with most to do."""
        facts = max(self.fleet.replicas, key=lambda one: one.tokens)
        return int(facts.name.rpartition("-")[2])
