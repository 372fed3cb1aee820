"""HTTP/1.1 connections: how many there may be, and their deadlines.

Each open connection needs a file descriptor. A connection beyond the limit replaces one without a
complete request; connections that have sent no byte are replaced first."""

import asyncio
import errno
import os
import resource
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import UsageError, message_of
from ..prepare.options import ServeOptions
from ..shell import complain
from .requests import INVALID, ErrorBody, ErrorDetail

MAX_CONNECTIONS = 2048
ACCEPTS = 4  # connections of one turn of the event loop: fewer than the spare descriptors
QUEUED = 2048  # connections that wait to be accepted
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
SPARE = 32  # descriptors for files, processes and connections that are being accepted
REQUEST_STATES = (h11.IDLE, h11.SEND_BODY)  # of a client, until its request is complete
TAKEN = 16 << 10  # bytes that a client must take of an answer in each `stall`
REFUSALS = {
    400: ("Bad Request", "this is not an HTTP request"),
    408: ("Request Timeout", "the request did not come in time"),
    431: ("Request Header Fields Too Large", "too long headers"),
    503: ("Service Unavailable", "too many connections"),
}


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
        """The order in which connections are closed: those that have sent no byte first, then the
        least recently used."""
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
            self._deadline = self.loop.call_later(self._limits.patience, self._refuse, 408)

    def _stop_timing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int) -> None:
        self._stop_timing()
        if self.transport.is_closing():
            return
        reason, message = REFUSALS[status]
        error = ErrorBody(error=ErrorDetail(message=message, type=INVALID))
        body = error.model_dump_json()
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
        """Give the client another `stall` seconds to read of what was written."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if size := self.transport.get_write_buffer_size():
            self._unread = self.loop.call_later(self._limits.stall, self._check_read, size)

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
