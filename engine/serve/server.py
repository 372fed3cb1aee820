"""The HTTP server: sockets, signals, connections and their deadlines, the checks of every request
before its route, headers of every response; `specsot serve` and `specsot view`.

Without a valid key, requests get only the liveness probe and the files of the page. Each open
connection needs a file descriptor. A connection beyond the limit replaces one without a complete
request; connections that have sent no byte are replaced first."""

import asyncio
import errno
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import h11
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import Code, UsageError, message_of
from ..prepare.options import LOOPBACK, ServeOptions
from ..record.run_folder import SavedRun
from ..shell import complain
from ..signals import handling
from ..workers.router import POLL_INTERVAL, Router
from .app import Api, add_error_handlers, add_page_routes, build_app
from .metrics import ServerMetrics
from .requests import INVALID, ApiError, ErrorBody, ErrorDetail, invalid

MAX_CONNECTIONS = 2048
ACCEPTS = 4  # connections of one turn of the event loop: fewer than the spare descriptors
QUEUED = 2048  # connections that wait to be accepted
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SPARE = 32  # descriptors for files, processes and connections that are being accepted
REQUEST_STATES = (h11.IDLE, h11.SEND_BODY)  # of a client, until its request is complete
TAKEN = 16 << 10  # bytes that a client must take of an answer in each `write_timeout`
REFUSALS = {
    400: ("Bad Request", "this is not an HTTP request"),
    408: ("Request Timeout", "the request did not come in time"),
    431: ("Request Header Fields Too Large", "too long headers"),
    503: ("Service Unavailable", "too many connections"),
}
MAX_HEADERS = 100
HEADER_BYTES = 16 << 10
PUBLIC_PATHS = ("/health", "/")
PUBLIC_PREFIX = "/page/"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
CLOSING = (408, 413, 431)  # statuses after which a connection may hold unread bytes
RESPONSE_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
HTTP_NICENESS = 5  # of this process's threads, below the engines
UNSENT = 64 << 10  # bytes of the socket's send buffer for a slow client; the default is megabytes


@dataclass(frozen=True, slots=True)
class AdmissionMiddleware:
    """The outermost ASGI middleware: authentication, limits, errors and response headers.
    check_capacity: raises ApiError, before a body is read, if its path admits no request."""

    app: ASGIApp
    options: ServeOptions
    metrics: ServerMetrics
    check_capacity: Callable[[str], None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client_id = request.headers.get("x-request-id", "")
        id = client_id if REQUEST_ID.fullmatch(client_id) else uuid4().hex
        started = False
        # What follows such a request may be meant for another server (RFC 9112, section 6.1).
        has_two_lengths = {"content-length", "transfer-encoding"} <= {*request.headers}

        async def respond(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.metrics.responses.labels(str(message["status"])).inc()
                headers = MutableHeaders(scope=message)
                headers.update({**RESPONSE_HEADERS, "x-request-id": id})
                if message["status"] in CLOSING or has_two_lengths:
                    headers["connection"] = "close"
            await send(message)

        try:
            self._check(request)
            first: list[Message] = []
            if request.method == "POST":
                body = await self._body(request)
                first.append({"type": "http.request", "body": body, "more_body": False})

            async def replay() -> Message:
                return first.pop() if first else await receive()

            await self.app(scope, replay, respond)
            return
        except ApiError as refusal:
            error = refusal
        except Exception as failure:
            complain(f"request {id}: {message_of(failure)}")
            error = ApiError(500, f"the server failed; request {id}")
        if not started:
            await error.response(scope, receive, respond)

    def _check(self, request: Request) -> None:
        raw = request.headers.raw
        size = sum(len(name) + len(value) for name, value in raw)
        if len(raw) > MAX_HEADERS or size > HEADER_BYTES:
            raise ApiError(431, "too many headers, or too long ones")
        name = re.sub(r":\d+$", "", request.headers.get("host", "").rpartition("@")[2]).lower()
        if self.options.host in LOOPBACK and name not in LOOPBACK:
            raise ApiError(403, "this server is not called so", code="host_not_allowed")
        path = request.scope["path"]
        if self.options.keys and path not in PUBLIC_PATHS and not path.startswith(PUBLIC_PREFIX):
            kind, _, key = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self.options.allows(key.strip()):
                bearer = {"WWW-Authenticate": "Bearer"}
                message = "no valid API key was given"
                raise ApiError(401, message, code="invalid_api_key", headers=bearer)

    async def _body(self, request: Request) -> bytes:
        """The whole body; what cannot be answered now, or is too long, is not read to its end."""
        if self.check_capacity is not None:
            self.check_capacity(request.scope["path"])
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "content-type: must be application/json")
        limit = self.options.max_body
        too_long = ApiError(413, f"the body is longer than {limit} bytes")
        if int(request.headers.get("content-length", "0")) > limit:  # h11 lets only digits through
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.options.read_timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_long
        except TimeoutError:
            raise ApiError(408, "the body did not come in time") from None
        except ClientDisconnect:
            raise invalid("the client has left") from None
        return bytes(body)


def most_connections() -> int:
    """Connections for which there are file descriptors; raises the limit of this process as far as
    it needs and may. Raises UsageError: there are too few."""
    others = len(os.listdir("/dev/fd")) + SPARE
    wanted = others + MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted and soft != resource.RLIM_INFINITY:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - others
    if most < 1:
        raise UsageError(f"ulimit -n {soft}: the server needs more than {others} open files")
    return min(most, MAX_CONNECTIONS)


class StrictProtocol(H11Protocol):
    """An HTTP/1.1 connection that answers protocol errors in JSON. A client that sends or reads too
    slowly loses it. most: connections of the server."""

    def __init__(self, *words: Any, limits: ServeOptions, most: int, **options: Any) -> None:
        super().__init__(*words, **options)
        self._limits = limits
        self._most = most
        self._deadline: asyncio.TimerHandle | None = None  # of the head
        self._unread: asyncio.TimerHandle | None = None
        self._full = False
        self._is_silent = True
        self._last_time = self.loop.time()

    @property
    def use(self) -> tuple[int, bool, float]:
        """The order of closing: first those that sent no byte, then the least recently used."""
        return REQUEST_STATES.index(self.conn.their_state), not self._is_silent, self._last_time

    @property
    def is_idle(self) -> bool:
        """Whether the client has not sent a complete request."""
        return self.conn.their_state in REQUEST_STATES and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._full = len(self.connections) >= self._most and not close_idle(self.connections)
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        self._is_silent = False
        self._last_time = self.loop.time()
        if self._full or self.transport.is_closing():
            self._refuse(503)  # not before: a connection with unread bytes loses what was written
            return
        self._time_head()
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timing()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        hint = getattr(sys.exception(), "error_status_hint", 400)
        self._refuse(hint if hint in REFUSALS else 400)

    def _time_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timing()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self._limits.read_timeout, self._refuse, 408)

    def _stop_timing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int) -> None:
        self._stop_timing()
        if self.transport.is_closing():
            return
        reason, message = REFUSALS[status]
        body = ErrorBody(error=ErrorDetail(message=message, type=INVALID)).model_dump_json()
        retry = "retry-after: 1\r\n" if status == 503 else ""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            head += f"connection: close\r\ncontent-length: {len(body)}\r\n{retry}\r\n"
            self.transport.write((head + body).encode())
        self.transport.close()
        self._time_reading()

    # -- a client that does not read its answer ----------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._time_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._time_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_reading()

    def _time_reading(self) -> None:
        """Give the client another `write_timeout` seconds to read of what was written."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if size := self.transport.get_write_buffer_size():
            self._unread = self.loop.call_later(self._limits.write_timeout, self._check_read, size)

    def _check_read(self, before: int) -> None:
        size = self.transport.get_write_buffer_size()
        # A stream that waits for its engine: its buffer may have grown again since.
        grows = not (self.flow.write_paused or self.cycle is None or self.cycle.response_complete)
        if size and size > before - TAKEN and not grows:
            self.transport.abort()
        else:
            self._time_reading()


def close_idle(connections: Iterable[Any]) -> bool:
    """Close the first idle connection in the order of `use`; False if no connection is idle."""
    chosen = min((one for one in connections if one.is_idle), key=lambda one: one.use, default=None)
    if chosen is not None:
        chosen.transport.abort()
    return chosen is not None


class BoundedServer(uvicorn.Server):
    """Accepts few connections at a time while many wait; frees a descriptor if there is none."""

    _has_failed = False  # to accept a connection

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(QUEUED)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") if "socket" in context else None
        if not isinstance(error, OSError) or error.errno not in NO_DESCRIPTOR:
            loop.default_exception_handler(context)
            return
        close_idle(self.server_state.connections)
        if not self._has_failed:
            self._has_failed = True
            complain(f"a connection was not accepted: {message_of(error)} (reported once)")


class DrainingServer(BoundedServer):
    """The first signal starts a shutdown that takes `timeout` seconds; the second ends at once."""

    def __init__(self, config: uvicorn.Config, api: Api, timeout: float) -> None:
        super().__init__(config)
        self.api = api
        self.timeout = timeout
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                # What is behind the server ends too now: nothing of it is to be left behind.
                signal.signal(number, signal.SIG_IGN)

    def _signal(self) -> None:
        if self._drain is not None:
            self.should_exit = self.force_exit = True
            return
        self.api.draining = True
        if count := self.api.router.open:
            complain(f"open requests: {count}; they have {self.timeout:g} s (again: at once)")
        self._drain = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                while self.api.router.open or self.api.router.tokenizing:
                    await asyncio.sleep(0.05)
        await self.api.router.close()
        self.should_exit = True


def listen(options: ServeOptions) -> socket.socket:
    """The socket; raises UsageError. Its protocol is named, for only then asyncio sends small
    pieces at once (TCP_NODELAY), which else may wait 40 ms for an acknowledgement."""
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


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins use the server; browsers ask before, without a key."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "x-specsot-ignored", "retry-after"),
    )


def config_of(app: Any, options: ServeOptions, most: int) -> uvicorn.Config:
    """most: connections."""
    http: Any = partial(StrictProtocol, limits=options, most=most)
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
        backlog=ACCEPTS,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=2,
    )


async def serve(router: Router, options: ServeOptions) -> int:
    """Serve until a signal ends it, or no engine can start; the exit code."""
    listener = listen(options)
    address = address_of(listener)
    metrics = ServerMetrics(router, vllm=options.metrics_compat is not None)
    api = Api(router, metrics, options)
    app = build_app(api)
    add_page_routes(app, router, options.runs_dir)
    middleware: ASGIApp = AdmissionMiddleware(app, options, metrics, api.check_capacity)
    if options.cors:
        middleware = cors(middleware, options.cors)
    config = config_of(middleware, options, most_connections())
    server = DrainingServer(config, api, options.shutdown_timeout)

    async def report_ready() -> None:
        while not router.ready:
            await asyncio.sleep(POLL_INTERVAL)
        names = ", ".join(f"specsot/{name}" for name in router.graphs)
        complain(f"ready: {address} serves {names}")

    complain(f"listening on {address}; the models are being loaded")
    if sys.platform == "linux":  # elsewhere the priority is the whole process's
        # A flood of requests must take no processor from the engines. This and later threads.
        os.nice(HTTP_NICENESS)
    running = asyncio.create_task(router.run())
    reporting = asyncio.create_task(report_ready())
    running.add_done_callback(lambda task: setattr(server, "should_exit", True))
    try:
        await server.serve(sockets=[listener])
    finally:
        reporting.cancel()
        await router.close()
        await asyncio.wait({running}, timeout=5)
    if router.failed is not None:
        complain(router.failed.message)
        return router.failed.code
    return int(Code.OK)


async def view(run: SavedRun, options: ServeOptions) -> int:
    """Show a run until a signal ends it; raises UsageError if the page cannot play the run."""
    from ..record.replay import playback_of

    playback_of(run)
    listener = listen(options)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_error_handlers(app)
    add_page_routes(app, None, Path(), run)
    middleware = AdmissionMiddleware(app, options, ServerMetrics(None))
    complain(f"{run.path.name} is shown at {address_of(listener)} (Ctrl-C ends)")
    server = BoundedServer(config_of(middleware, options, most_connections()))
    with handling(lambda *_: None):  # uvicorn hands a signal on after it has ended
        await server.serve(sockets=[listener])
    return int(Code.OK)
