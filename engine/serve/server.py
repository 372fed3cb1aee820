"""The HTTP server: sockets, signals, protocol limits; `specsot serve` and `specsot view`."""

import asyncio
import hashlib
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import Code, UsageError
from ..record.run_folder import SavedRun
from ..shell import complain
from ..workers.router import Router, lower_priority
from .api.app import Api, ServerLimits, api_error, build_app, http_error
from .api.errors import ApiError
from .api.metrics import ServerMetrics
from .api.middleware import HEADER_BYTES, LOOPBACK, AdmissionMiddleware, AdmissionRules
from .page.routes import PageRoutes

TURNED_AWAY = {
    400: ("Bad Request", "this is not an HTTP request"),
    408: ("Request Timeout", "the request did not come in time"),
    431: ("Request Header Fields Too Large", "too long headers"),
    503: ("Service Unavailable", "too many connections"),
}


class StrictProtocol(H11Protocol):
    """An HTTP/1.1 connection that answers protocol errors in JSON.

    patience: seconds for the head of a request, from the start of the connection or the head's
        first byte, so that a slow client cannot hold a connection.
    max_connections: open connections; further ones get status 503.
    """

    def __init__(self, *words: Any, patience: float, max_connections: int, **options: Any) -> None:
        super().__init__(*words, **options)
        self._patience = patience
        self._max_connections = max_connections
        self._slow: asyncio.TimerHandle | None = None
        self._full = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._full = len(self.connections) > self._max_connections
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._full or self.transport.is_closing():
            self._refuse(503)  # not before: a connection with unread bytes loses what was written
            return
        self._wait_for_head()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """A refusal of what h11 could not read."""
        hint = getattr(sys.exception(), "error_status_hint", 400)
        self._refuse(hint if hint in TURNED_AWAY else 400)

    def _wait_for_head(self) -> None:
        if self._slow is None and self.conn.their_state is h11.IDLE:
            self._slow = self.loop.call_later(self._patience, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _too_slow(self) -> None:
        self._slow = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(408)

    def _refuse(self, status: int) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        reason, words = TURNED_AWAY[status]
        error = b'{"message":"%s","type":"invalid_request_error","param":null,"code":null}'
        body = b'{"error":%s}' % (error % words.encode())
        headers = [
            (b"content-type", b"application/json"),
            (b"connection", b"close"),
            (b"content-length", str(len(body)).encode()),
            *([(b"retry-after", b"1")] if status == 503 else []),
        ]
        with suppress(h11.LocalProtocolError):
            start = h11.Response(status_code=status, headers=headers, reason=reason.encode())
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


CONNECTIONS = 2048
UNSENT = 64 << 10  # bytes of the socket's send buffer for a slow client; the default is megabytes


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Address, access and limits of the server.

    keys: API keys, empty for no check. grace: seconds for open requests at shutdown.
    vllm_names: also report metrics under vLLM's names. runs_dir: the folder of recorded runs.
    patience: seconds for the head of a request, and again for its body.
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
        """Raise UsageError if other machines could connect without a key."""
        if not (self.loopback or self.keys or self.insecure):
            raise UsageError(
                f"--host {self.host}: others could reach the server; give --api-key, or --insecure"
            )

    def rules(self) -> AdmissionRules:
        hashed = [hashlib.sha256(key.encode()).digest() for key in self.keys]
        hosts = LOOPBACK if self.loopback else ()
        return AdmissionRules(hashed, hosts, self.body, self.patience)


class DrainingServer(uvicorn.Server):
    """The first signal starts a shutdown with `grace` seconds; the second one ends at once.

    Further signals are ignored.
    """

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
        """Wait until no request is open, at most `grace` seconds, then close the engine."""
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
    metrics = ServerMetrics(link, vllm=options.vllm_names)
    api = Api(link, metrics, options.limits)
    app = build_app(api)
    PageRoutes(link, Path(options.runs_dir)).add_to(app)
    middleware = AdmissionMiddleware(app, options.rules(), metrics, api.check_capacity)
    server = DrainingServer(config_of(middleware, options.patience), api, options.grace)
    where = address_of(listener)
    complain(f"listening on {where}; the models are being loaded")
    lower_priority()
    running = asyncio.create_task(link.run())
    ready_task = asyncio.create_task(_tell_ready(link, where))
    running.add_done_callback(lambda task: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
    finally:
        ready_task.cancel()
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
    http: Any = partial(StrictProtocol, patience=patience, max_connections=CONNECTIONS)
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


async def view(run: SavedRun, options: ServeOptions) -> int:
    """Show a run until a signal ends it; raises UsageError if the page cannot play the run."""
    from .page.playback import playback_of

    playback_of(run)
    listener = listen(options)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    PageRoutes(None, Path(), run).add_to(app)
    complain(f"{run.path.name} is shown at {address_of(listener)} (Ctrl-C ends)")
    await run_alone(
        config_of(AdmissionMiddleware(app, options.rules(), ServerMetrics(None)), options.patience),
        listener,
    )
    return int(Code.OK)
