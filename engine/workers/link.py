"""A worker as its user has it: the host that starts its process, the connection, its life."""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from time import monotonic
from typing import Any, Protocol

from .protocol import MAX_LINE_BYTES, Failed, Load, Loaded, Message, Ready, Start, decode, encode

ENTRY = "from specsot.engine.workers.process import main; main()"
LOADING_DEADLINE = 300.0  # seconds that a watched worker has to load its models
WATCH_INTERVAL = 0.25  # seconds
SECRET_LETTERS = 32
GREETING_DEADLINE = 10.0  # seconds in which a connection must present its secret
CONNECTION_TIMEOUT = 15_000  # ms until unacknowledged data closes a worker's connection
Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HostError(RuntimeError):
    """A process that cannot be started; says why."""


class WorkerGoneError(RuntimeError):
    """The worker's process has ended."""


class WorkerHost(Protocol):
    """Runs a worker's process, one life after another: a thread, a process, a Ray actor."""

    @property
    def pid(self) -> int | None:
        """Of the process, if it is on this machine."""

    async def start(self) -> Pipe:
        """Start another process and connect to it; raises HostError."""

    def end(self) -> None:
        """Ask the process to end."""

    async def reap(self) -> None:
        """Make sure that the process has ended."""


class BackgroundService(Protocol):
    """Something that is open while workers run."""

    async def open(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is started with: its first message, and where it runs."""

    start: Start | Load
    host: WorkerHost


class ProcessHost:
    """A child process, connected by a socket pair."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[Any] | None = None
        # A child inherits the priority of the thread that starts it, and others lower theirs.
        self._starter = ThreadPoolExecutor(1)
        self._starter.submit(os.getpid).result()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> Pipe:
        ours, theirs = socket.socketpair()
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
        return await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def reap(self) -> None:
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            if process.poll() is None:
                process.kill()
        await asyncio.to_thread(process.wait)


# -- workers that connect from elsewhere ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConnectedWorker:
    """A worker that has connected. machine, pid: of its process."""

    pipe: Pipe
    machine: str
    pid: int

    @property
    def local_pid(self) -> int | None:
        """Of a process of this machine."""
        return self.pid if self.machine == socket.gethostname() else None


class WorkerListener:
    """Listens at an address of this machine; a connection without an expected secret is closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.port = 0
        self._expected: dict[str, asyncio.Future[ConnectedWorker]] = {}
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, self.address, 0, limit=MAX_LINE_BYTES
        )
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def expect(self) -> tuple[str, "asyncio.Future[ConnectedWorker]"]:
        """A new secret, and the worker that will present it."""
        secret = secrets.token_hex(SECRET_LETTERS // 2)
        self._expected[secret] = asyncio.get_running_loop().create_future()
        return secret, self._expected[secret]

    def withdraw(self, secret: str) -> None:
        """Accept a secret no longer."""
        self._expected.pop(secret, None)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, ValueError, KeyError, TimeoutError):
            async with asyncio.timeout(GREETING_DEADLINE):
                secret = (await reader.readexactly(SECRET_LETTERS)).decode()
                expected = self._expected.pop(secret)
                greeting = json.loads(await reader.readline())
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            worker = ConnectedWorker(
                (reader, writer), str(greeting["machine"]), int(greeting["pid"])
            )
            if not expected.done():
                expected.set_result(worker)
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


# -- the life of a worker -------------------------------------------------------------------------


class LinkState(StrEnum):
    """State of a worker's process."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


class WorkerLink:
    """A worker's process and the connection to it.

    Args:
        deadline: seconds of silence after which the worker is lost; None: it is not watched.
        on_message: takes every message but the first of a life. on_state: takes changes of state.

    Attributes:
        failed: why the worker cannot start. why: its process ended, the last time. greeting: of
            this life. lives: processes started so far; messages: received in this life.
    """

    def __init__(
        self,
        name: str,
        spec: WorkerSpec,
        *,
        deadline: float | None = None,
        on_message: Callable[["WorkerLink", Message], None],
        on_state: Callable[["WorkerLink"], None],
    ) -> None:
        self.name = name
        self.host = spec.host
        self.state = LinkState.STARTING
        self.failed: Failed | None = None
        self.greeting: Ready | Loaded | None = None
        self.why = ""
        self.lives = 0
        self.messages = 0
        self._start = spec.start
        self._deadline = deadline
        self._on_message = on_message
        self._on_state = on_state
        self._writer: asyncio.StreamWriter | None = None

    @property
    def ready(self) -> bool:
        return self.state is LinkState.READY

    def _is_dead(self) -> bool:
        return self.state is LinkState.DEAD

    @property
    def over(self) -> bool:
        """Whether there is not another life."""
        return self.state is LinkState.CLOSED or self.failed is not None

    @property
    def pid(self) -> int | None:
        return self.host.pid

    def _set(self, state: LinkState) -> None:
        if self.state is not LinkState.CLOSED:
            self.state = state
            self._on_state(self)

    async def live(self) -> None:
        """One life of the process; afterwards `why` says how it ended."""
        self.lives += 1
        self.messages = 0
        self.greeting = None
        self.why = "has ended"
        if self.lives > 1:
            self._set(LinkState.STARTING)
        watch: asyncio.Task[None] | None = None
        try:
            pipe = await self.host.start()
            if self._deadline is not None:
                watch = asyncio.create_task(self._watch(self._deadline))
            await self._listen(pipe)
        except HostError as error:
            self.why = f"cannot be started: {error}"
        finally:
            if watch is not None:
                watch.cancel()
            if not self._is_dead():
                self._set(LinkState.DEAD)
            await self.host.reap()

    async def _listen(self, pipe: Pipe) -> None:
        reader, self._writer = pipe
        try:
            if self.over or self._is_dead():
                return
            self.send(self._start)
            with suppress(ConnectionError, ValueError):
                while line := await reader.readline():
                    if self._is_dead():
                        return
                    self.messages += 1
                    self._receive(decode(line))
        finally:
            self._writer.close()

    def _receive(self, message: Message) -> None:
        match message:
            case Ready() | Loaded():
                self.greeting = message
                if self.state is LinkState.STARTING:
                    self._set(LinkState.READY)
            case Failed():
                self.failed = message
                self.why = message.message
                self._set(LinkState.DEAD)
            case _:
                self._on_message(self, message)

    async def _watch(self, deadline: float) -> None:
        """Cut off a silent worker; only time in which this process could listen counts."""
        silent = 0.0
        while True:
            started = monotonic()
            messages = self.messages
            await asyncio.sleep(WATCH_INTERVAL)
            passed = min(monotonic() - started, 2 * WATCH_INTERVAL)
            silent = 0.0 if self.messages > messages else silent + passed
            if silent > (deadline if self.ready else LOADING_DEADLINE):
                self.cut(f"has not answered for {silent:.0f} s")
                return

    def send(self, message: Message) -> None:
        """Raises WorkerGoneError."""
        if self._writer is None or self._writer.is_closing():
            raise WorkerGoneError("the engine's process has ended")
        self._writer.write(encode(message))

    def cut(self, why: str) -> None:
        """End this life at once; nothing more is received of it."""
        self.why = why
        self._set(LinkState.DEAD)
        if self._writer is not None:
            self._writer.transport.abort()

    async def close(self) -> None:
        """End the worker for good."""
        self._set(LinkState.CLOSED)
        self.host.end()
        if self._writer is not None:
            self._writer.close()
