"""HTTP/1.1 as uvicorn reads it, with refusals in JSON and no patience for slow senders."""

import asyncio
import sys
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

TURNED_AWAY = {
    400: ("Bad Request", "this is no HTTP request"),
    408: ("Request Timeout", "the request did not come in time"),
    431: ("Request Header Fields Too Large", "too long headers"),
    503: ("Service Unavailable", "too many connections"),
}


class StrictProtocol(H11Protocol):
    """A connection whose own refusals are JSON too, each with its right status.

    A head has to be there within so many seconds, counted from its first byte, or from the
    beginning of the connection: whoever sends it byte by byte holds it no longer than others.
    most: connections that are open at once; the next one is told so.
    """

    def __init__(self, *words: Any, patience: float, most: int, **options: Any) -> None:
        super().__init__(*words, **options)
        self._patience = patience
        self._most = most
        self._slow: asyncio.TimerHandle | None = None
        self._full = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._full = len(self.connections) > self._most
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
