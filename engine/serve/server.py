"""The server: a socket, the HTTP side in this process, the engine in another."""

import asyncio
import hashlib
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from ..errors import Code, UsageError
from ..shell import complain
from ..workers.router import Router, lower_priority
from .api.app import Api, ServerLimits, build_app
from .api.gate import HEADER_BYTES, LOOPBACK, Gate, GateRules
from .api.meters import Meters
from .page.routes import PageRoutes
from .strict_http import StrictProtocol

CONNECTIONS = 2048
UNSENT = 64 << 10  # bytes that the system keeps for a client who does not read; else megabytes


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How the server listens, and what it lets in.

    keys: API keys, none for everybody. grace: seconds that open requests have at the end.
    vllm_names: metrics under vLLM's names too. runs_dir: where recorded runs are. patience: seconds
    that a client has to send a request, its head and then its body.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Sequence[str] = ()
    insecure: bool = False
    body: int = 1 << 20
    limits: ServerLimits = field(default_factory=ServerLimits)
    grace: float = 30.0
    vllm_names: bool = False
    runs_dir: str = "runs"
    patience: float = 20.0

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK

    def check(self) -> None:
        """Raise UsageError for what would let in anybody."""
        if not (self.loopback or self.keys or self.insecure):
            raise UsageError(
                f"--host {self.host}: others could reach the server; give --api-key, or --insecure"
            )

    def rules(self) -> GateRules:
        hashed = [hashlib.sha256(key.encode()).digest() for key in self.keys]
        hosts = LOOPBACK if self.loopback else ()
        return GateRules(hashed, hosts, self.body, self.patience)


class DrainingServer(uvicorn.Server):
    """The first signal lets open requests end, for so long; the second one ends at once, and those
    behind it do nothing any more."""

    def __init__(self, config: uvicorn.Config, api: Api, grace: float) -> None:
        super().__init__(config)
        self.api = api
        self.grace = grace
        self.signalled: int | None = None
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                # What is behind the server ends too now: nothing of it is to be left behind.
                signal.signal(number, signal.SIG_IGN)

    def _signal(self, number: int) -> None:
        if self.signalled is not None:
            self.should_exit = self.force_exit = True
            return
        self.signalled = number
        self.api.draining = True
        count = self.api.link.open
        if count:
            complain(f"{count} requests are open; they have {self.grace:g} s (again: at once)")
        self._drain = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        """Wait until nobody is served, or the time is up."""
        until = asyncio.get_running_loop().time() + self.grace
        while self.api.link.open and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.05)
        await self.api.link.close()
        self.should_exit = True


def listen(options: ServeOptions) -> socket.socket:
    """The socket; raises UsageError.

    Its protocol is named, for only then asyncio sends small pieces at once (TCP_NODELAY): else an
    answer on a connection that is kept, and a chunk of a stream, may wait 40 ms for an
    acknowledgement.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)
    try:
        listener.bind((options.host.strip("[]"), options.port))
    except OSError as error:
        listener.close()
        where = f"--host {options.host} --port {options.port}"
        raise UsageError(f"{where}: {error.strerror or error}") from None
    return listener


async def serve(link: Router, options: ServeOptions) -> int:
    """Serve until a signal ends it, or no engine can start; the exit code."""
    listener = listen(options)
    meters = Meters(link, vllm=options.vllm_names)
    api = Api(link, meters, options.limits)
    app = build_app(api)
    PageRoutes(link, Path(options.runs_dir)).add_to(app)
    gate = Gate(app, options.rules(), meters, api.room)
    server = DrainingServer(config_of(gate, options.patience), api, options.grace)
    where = address_of(listener)
    complain(f"listening on {where}; the models are being loaded")
    lower_priority()
    running = asyncio.create_task(link.run())
    told = asyncio.create_task(_tell_ready(link, where))
    running.add_done_callback(lambda task: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
    finally:
        told.cancel()
        await link.close()
        await asyncio.wait({running}, timeout=5)
    if link.failed is not None:
        complain(link.failed.message)
        return link.failed.code
    return int(Code.OK)


def address_of(listener: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def run_alone(config: uvicorn.Config, listener: socket.socket) -> None:
    """Serve what needs no engine, until a signal ends it."""
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):
        await server.serve(sockets=[listener])


async def _tell_ready(link: Router, where: str) -> None:
    while not link.ready:
        await link.changed.wait()
    names = ", ".join(f"specsot/{name}" for name in link.graphs)
    complain(f"ready: {where} serves {names}")


def config_of(app: Any, patience: float) -> uvicorn.Config:
    http: Any = partial(StrictProtocol, patience=patience, most=CONNECTIONS)
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADER_BYTES + 4096,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
    )
