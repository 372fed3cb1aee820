"""Workers as their user has them: hosts that start processes, connections, and the lives of all."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Generic, Protocol, Self, TypeVar

from ..errors import ClusterError
from ..shell import complain
from .protocol import MAX_LINE_BYTES, Failed, Heartbeat, Load, Message, Ready, Start, decode, encode

ENTRY = "from specsot.engine.workers.process import main; main()"
LOADING_DEADLINE = 300.0  # seconds without a heartbeat while a worker loads its models
WATCH_INTERVAL = 0.25  # seconds
SECRET_BYTES = 16
GREETING_DEADLINE = 10.0  # seconds in which a connection must present its secret
CONNECTION_TIMEOUT = 15_000  # ms until unacknowledged data closes a worker's connection
RESTART_PAUSES = (0.1, 0.5, 2.0, 5.0)  # seconds, by the number of deaths in a row
STABLE_SECONDS = 60.0  # of a life after which deaths are counted anew
NOT_READY = Ready()  # the greeting of a life that has sent none
Link = TypeVar("Link", bound="WorkerLink")
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connection = tuple[Pipe, int | None]  # the number is that of its process, if it is of this machine


class WorkerGoneError(RuntimeError):
    """The worker's process has ended."""


class WorkerHost(Protocol):
    """Runs a worker's process, one life after another: a child process, a Ray actor. first: message
    to each. pid: if it is on this machine. `start` starts another process and connects to it, or
    raises ClusterError; `end` asks it to end; `reap` makes sure that it has."""

    first: Start | Load
    pid: int | None

    async def start(self) -> Pipe: ...
    def end(self) -> None: ...
    async def reap(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSource:
    """host: of worker number i with part p of the target's weights. services: open meanwhile."""

    host: Callable[[int, int], WorkerHost]
    parts: int = 1
    services: list[AbstractAsyncContextManager[Any]] = field(default_factory=list)


class ProcessHost:
    """A child process, connected by a socket pair."""

    def __init__(self, first: Start) -> None:
        self.first: Start | Load = first
        self.pid: int | None = None
        self._process: subprocess.Popen[Any] | None = None
        # A child inherits the priority of the thread that starts it, and others lower theirs.
        self._starter = ThreadPoolExecutor(1)
        self._starter.submit(os.getpid).result()

    async def start(self) -> Pipe:
        ours, theirs = socket.socketpair()
        start: Callable[[], subprocess.Popen[Any]] = partial(
            subprocess.Popen,
            [sys.executable, "-c", ENTRY, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._process = await asyncio.get_running_loop().run_in_executor(self._starter, start)
        self.pid = self._process.pid
        theirs.close()
        return await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()

    async def reap(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


@dataclass(eq=False)
class WorkerListener:
    """Listens at an address of this machine; closes connections without an `expected` secret."""

    address: str
    port: int = 0
    expected: dict[str, "asyncio.Future[Connection]"] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._greeted, self.address, limit=MAX_LINE_BYTES)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, ValueError, KeyError):
            async with asyncio.timeout(GREETING_DEADLINE):
                expected = self.expected.pop((await reader.readexactly(2 * SECRET_BYTES)).decode())
                greeting = json.loads(await reader.readline())
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pid = int(greeting["pid"]) if greeting["machine"] == socket.gethostname() else None
            if not expected.done():
                expected.set_result(((reader, writer), pid))
                return
        writer.close()


def connect_to(address: str, port: int, secret: str) -> socket.socket:
    """Connect a worker's process to its user's `WorkerListener`; raises OSError."""
    pipe = socket.create_connection((address, port), timeout=GREETING_DEADLINE)
    pipe.settimeout(None)
    pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CONNECTION_TIMEOUT)
    greeting = {"machine": socket.gethostname(), "pid": os.getpid()}
    pipe.sendall(secret.encode() + json.dumps(greeting).encode() + b"\n")
    return pipe


@dataclass(frozen=True, slots=True)
class HangLimits:
    """When a worker hangs. silence: seconds without any message; its process sends heartbeats from
    a thread of its own, also while it loads models or computes a long step. step: seconds without
    progress of its engines. kill_after: seconds in which it may recover before it is killed."""

    silence: float
    step: float = inf
    kill_after: float = 0.0


class LinkState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    HUNG = "hung"
    DEAD = "dead"
    CLOSED = "closed"


@dataclass(eq=False)
class WorkerLink:
    """A worker's process and the connection to it. failed: why the worker cannot start. why: its
    process ended, the last time. lives: processes started so far; greeting, messages (their
    number): of this life; stuck: seconds without progress, of the last heartbeat."""

    name: str
    host: WorkerHost
    members: "Membership[Any]" = field(repr=False)
    state: LinkState = LinkState.STARTING
    failed: Failed | None = None
    greeting: Ready = NOT_READY
    why: str = ""
    lives: int = 0
    messages: int = 0
    stuck: float = 0.0
    _writer: asyncio.StreamWriter | None = None

    @property
    def ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    def closed(self) -> bool:
        return self.state is LinkState.CLOSED

    @property
    def ended(self) -> bool:
        """Whether this life is over; there may be another one."""
        return self.state in (LinkState.DEAD, LinkState.CLOSED)

    def _set(self, state: LinkState) -> None:
        if state is not self.state and not self.closed:
            self.state = state
            self.members.on_state(self)

    async def live(self) -> None:
        """One life of the process; afterwards `why` says how it ended."""
        self.lives += 1
        self.messages = 0
        self.stuck = 0.0
        self.greeting = NOT_READY
        self.why = "has ended"
        self._set(LinkState.STARTING)
        watch = asyncio.create_task(self._watch(self.members.limits))
        try:
            reader, self._writer = await self.host.start()
            with closing(self._writer):
                if not self.ended:
                    self.send(self.host.first)
                    await self._listen(reader)
        except (ClusterError, OSError) as error:
            self.why = f"cannot be started: {error}"
        finally:
            watch.cancel()
            self._set(LinkState.DEAD)
            await self.host.reap()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError, ValueError):
            while (line := await reader.readline()) and self.state is not LinkState.DEAD:
                self.messages += 1
                match decode(line):
                    case Ready() as greeting:
                        self.greeting = greeting
                        if self.state is LinkState.STARTING:
                            self._set(LinkState.READY)
                    case Failed() as failed:
                        self.failed = failed
                        self.why = failed.message
                        self._set(LinkState.DEAD)
                    case Heartbeat() as heartbeat:
                        self.stuck = heartbeat.stuck
                    case message:
                        self.members.on_message(self, message)

    async def _watch(self, limits: HangLimits | None) -> None:
        """Note that it hangs, or recovers, or cut it off; only time spent listening counts."""
        silent = 0.0
        hung = 0.0
        while limits is not None:
            started = monotonic()
            messages = self.messages
            await asyncio.sleep(WATCH_INTERVAL)
            passed = min(monotonic() - started, 2 * WATCH_INTERVAL)
            silent = 0.0 if self.messages > messages else silent + passed
            is_loading = self.state is LinkState.STARTING
            is_silent = silent > (LOADING_DEADLINE if is_loading else limits.silence)
            hung = hung + passed if is_silent or self.stuck > limits.step else 0.0
            what = "has not answered" if is_silent else "has made no progress"
            why = f"{what} for {silent if is_silent else self.stuck:.0f} s"
            if hung and (is_loading or hung > limits.kill_after):
                self.cut(why)
                return
            if hung and self.ready:
                complain(f"{self.name} {why}")
                self._set(LinkState.HUNG)
            elif not hung and self.state is LinkState.HUNG:
                complain(f"{self.name} answers again")
                self._set(LinkState.READY)

    def send(self, message: Message) -> bool:
        """False if the connection is closed; the loss of the worker is noticed elsewhere."""
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(encode(message))
        return True

    def cut(self, why: str) -> None:
        """End this life at once; nothing more is received of it."""
        self.why = why
        self._set(LinkState.DEAD)
        if self._writer is not None:
            self._writer.transport.abort()

    def close(self) -> None:
        self._set(LinkState.CLOSED)
        self.host.end()
        if self._writer is not None:
            self._writer.close()


@dataclass(eq=False)
class Membership(Generic[Link]):
    """The workers of a router or a director. limits: when a worker hangs, and is lost; None: never.
    restarts: a worker whose process ends is started again under its name, else it leaves. tries:
    lives in a row without being ready, then it fails. links: workers that have not left."""

    source: WorkerSource
    limits: HangLimits | None = None
    restarts: bool = False
    tries: int | None = None
    links: list[Link] = field(default_factory=list)
    closed: bool = False
    _services: AsyncExitStack = field(default_factory=AsyncExitStack)
    _lives: set["asyncio.Task[None]"] = field(default_factory=set)

    def on_message(self, link: Link, message: Message) -> None:
        """Take a message of a worker, but the first of a life."""
        raise NotImplementedError

    def on_state(self, link: Link) -> None:
        """Note a change of state, or that a worker has left."""
        raise NotImplementedError

    async def open_services(self) -> None:
        for service in self.source.services:
            await self._services.enter_async_context(service)

    def start(self, link: Link) -> Link:
        """Start one more worker, from code that runs in the loop."""
        self.links.append(link)
        life = asyncio.create_task(self._live(link))
        self._lives.add(life)
        life.add_done_callback(self._lives.discard)
        return link

    async def _live(self, link: Link) -> None:
        deaths = 0
        failures = 0
        try:
            while not (link.closed or link.failed):
                started = monotonic()
                await link.live()
                if link.closed or link.failed or not self.restarts:
                    return
                deaths = 1 if monotonic() - started > STABLE_SECONDS else deaths + 1
                failures = failures + 1 if link.greeting is NOT_READY else 0
                if self.tries is not None and failures >= self.tries:
                    link.failed = Failed(1, f"{link.name} {link.why}, {failures} times in a row")
                    return
                complain(f"{link.name} {link.why}; it is started again ({link.lives})")
                await asyncio.sleep(RESTART_PAUSES[min(deaths, len(RESTART_PAUSES)) - 1])
        finally:
            self.links.remove(link)
            self.on_state(link)

    def end_all(self) -> None:
        self.closed = True
        for link in [*self.links]:
            link.close()

    async def ended(self) -> None:
        """Wait until all processes have ended, then close the services."""
        if self._lives:
            await asyncio.wait(self._lives)
        await self._services.aclose()
