"""Connections: how many there are at once, which are closed first, and clients that do not read."""

import asyncio
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import pytest

from specsot.engine.prepare.options import ServeOptions
from specsot.engine.serve.metrics import ServerMetrics
from specsot.engine.serve.server import (
    MAX_CONNECTIONS,
    AdmissionMiddleware,
    BoundedServer,
    config_of,
    listen,
    most_connections,
)

LARGE = 4 << 20
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
FEW_FILES = """
from resource import RLIMIT_NOFILE, setrlimit
from specsot.engine.serve.server import most_connections
for most in (1024, 64, 16):
    setrlimit(RLIMIT_NOFILE, (most, most))
    print(most_connections())
"""


@dataclass
class SmallServer:
    """A server of this process. `/wait` is answered after `go`, `/large` with many bytes."""

    most: int
    go: Event = field(default_factory=Event)
    address: tuple[str, int] = ("", 0)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        while path == "/wait" and not self.go.is_set():
            await asyncio.sleep(0.01)
        body = bytes(LARGE if path == "/large" else 2)
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    @contextmanager
    def running(self) -> Iterator["SmallServer"]:
        options = ServeOptions(port=0, write_timeout=0.4)
        listener = listen(options)
        self.address = listener.getsockname()
        app = AdmissionMiddleware(self.app, options, ServerMetrics(None))
        server = BoundedServer(config_of(app, options, self.most))
        thread = Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            until(lambda: server.started)
            yield self
        finally:
            self.go.set()
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = monotonic() + seconds
    while not holds():
        assert monotonic() < end
        sleep(0.01)


@pytest.fixture
def small() -> Iterator[SmallServer]:
    with SmallServer(most=6).running() as server:
        yield server


def connect(
    server: SmallServer, stack: ExitStack, path: str = "", buffer: int = 0
) -> socket.socket:
    """A connection; with a path also the request for it."""
    pipe = stack.enter_context(socket.socket())
    pipe.settimeout(5)
    if buffer:
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    pipe.connect(server.address)
    if path:
        pipe.sendall(GET % path.encode())
    return pipe


def is_open(pipe: socket.socket) -> bool:
    pipe.setblocking(False)
    try:
        return pipe.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
    finally:
        pipe.settimeout(5)


def test_silent_connections_make_room_for_requests(small: SmallServer) -> None:
    with ExitStack() as stack:
        used = connect(small, stack, "first")
        assert used.recv(4096).startswith(b"HTTP/1.1 200 ")
        waiting = [connect(small, stack, "wait") for _ in range(2)]
        sleep(0.1)
        silent = [connect(small, stack) for _ in range(40)]
        until(lambda: sum(map(is_open, silent)) == 3)
        assert not any(map(is_open, silent[:37])), "the oldest are closed first"
        assert is_open(used), "one that was used is closed after the silent ones"
        start = monotonic()
        for _ in range(5):
            assert connect(small, stack, "next").recv(4096).startswith(b"HTTP/1.1 200 ")
        assert monotonic() - start < 3
        small.go.set()
        assert all(pipe.recv(4096).startswith(b"HTTP/1.1 200 ") for pipe in waiting)


def test_a_request_that_is_not_complete_makes_room_for_others(small: SmallServer) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        unended = [connect(small, stack) for _ in range(6)]
        for pipe in unended:
            pipe.sendall(head + b"Content-Length: 100\r\n\r\n{")
        sleep(0.1)
        assert connect(small, stack, "next").recv(4096).startswith(b"HTTP/1.1 200 ")
        assert sum(map(is_open, unended)) == 5


def test_one_more_request_than_connections_is_refused(small: SmallServer) -> None:
    with ExitStack() as stack:
        waiting = [connect(small, stack, "wait") for _ in range(6)]
        sleep(0.1)
        refused = connect(small, stack, "next").recv(4096)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
        assert b'"message":"too many connections"' in refused
        small.go.set()
        assert all(pipe.recv(4096).startswith(b"HTTP/1.1 200 ") for pipe in waiting)


def test_a_whole_answer_that_is_not_read_is_dropped(small: SmallServer) -> None:
    with ExitStack() as stack:
        unread = connect(small, stack, "large", buffer=4096)
        slow = connect(small, stack, "large", buffer=65536)
        received = 0
        start = monotonic()
        while received < LARGE:
            received += len(slow.recv(1 << 16))
            if monotonic() - start < 1.5:
                sleep(0.05)
        assert monotonic() - start > 1.2, "a slow client gets the whole answer"
        received = 0
        while part := unread.recv(1 << 16):
            received += len(part)
        assert received < LARGE


def test_two_lengths_of_a_body_close_the_connection(small: SmallServer) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b"2\r\n{}\r\n0\r\n\r\n"
    with ExitStack() as stack:
        pipe = connect(small, stack)
        pipe.sendall(head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        pipe.sendall(GET % b"smuggled")
        received = b""
        with suppress(ConnectionResetError):  # it closes with the second request unread
            while part := pipe.recv(4096):
                received += part
        assert received.count(b"HTTP/1.1 ") == 1 and b"connection: close" in received.lower()
        pipe = connect(small, stack)
        pipe.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + body)
        assert b"connection: close" not in pipe.recv(4096).lower()


def test_the_limit_of_open_files_is_raised_or_kept_to() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        assert most_connections() == MAX_CONNECTIONS
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > MAX_CONNECTIONS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    done = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True)
    many, few = map(int, done.stdout.split())
    assert 900 < many < 1000 and 8 <= few < 32
    assert "ulimit -n 16: the server needs more than" in done.stderr
