"""What every request passes before anybody looks at it, and what every answer gets.

Denied by default: without the key only the liveness probe and the page's own files are given out.
"""

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...errors import message_of
from ...shell import complain
from .errors import ApiError, invalid
from .metrics import Meters

MOST_HEADERS = 100
HEADER_BYTES = 16 << 10
OPEN = ("/health", "/")
ANSWERED = ("/v1/chat/completions", "/v1/completions")
OPEN_BELOW = "/page/"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)


@dataclass(frozen=True, slots=True)
class GateRules:
    """What may pass. keys: sha256 of the API keys, none for everybody; hosts: allowed names in
    `Host`, none for any; body: bytes at most, that are there within `patience` seconds."""

    keys: Sequence[bytes] = ()
    hosts: Sequence[str] = ()
    body: int = 1 << 20
    patience: float = 20.0

    def allows(self, key: str) -> bool:
        """Whether this is one of the keys; takes the same time for every wrong one."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        same = [hmac.compare_digest(digest, one) for one in self.keys]
        return any(same)


class Gate:
    """The outermost layer of the server.

    room: raises ApiError where no answer can be written now, so that a body is not even read.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: GateRules,
        meters: Meters,
        room: Callable[[], None] | None = None,
    ) -> None:
        self._app = app
        self._rules = rules
        self._meters = meters
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        own = headers.get(b"x-request-id", "")
        id = own if REQUEST_ID.fullmatch(own) else uuid4().hex
        answer = _Answer(send, id, self._meters)
        posted = scope["method"] == "POST"
        try:
            self._check(scope, headers)
            body = await self._read(scope["path"], headers, receive) if posted else None
            await self._app(scope, receive if body is None else _Replay(body, receive), answer.send)
        except ApiError as error:
            await answer.error(error)
        except Exception as error:
            complain(f"request {id}: {message_of(error)}")
            await answer.error(
                ApiError(500, f"the server failed; request {id}", kind="server_error")
            )

    def _check(self, scope: Scope, headers: Mapping[bytes, str]) -> None:
        rules = self._rules
        path = scope["path"]
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > MOST_HEADERS or size > HEADER_BYTES:
            raise ApiError(431, "too many headers, or too long ones")
        host = headers.get(b"host", "").rpartition("@")[2]
        name = re.sub(r":\d+$", "", host)
        if rules.hosts and name.lower() not in rules.hosts:
            raise ApiError(403, "this server is not called so", code="host_not_allowed")
        if rules.keys and path not in OPEN and not path.startswith(OPEN_BELOW):
            kind, _, key = headers.get(b"authorization", "").partition(" ")
            if kind.lower() != "bearer" or not rules.allows(key.strip()):
                raise ApiError(
                    401,
                    "no valid API key was given",
                    code="invalid_api_key",
                    kind="authentication_error",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    async def _read(self, path: str, headers: Mapping[bytes, str], receive: Receive) -> bytes:
        """The body of a request; one that cannot be answered now is refused before."""
        if self._room is not None and path in ANSWERED:
            self._room()
        try:
            async with asyncio.timeout(self._rules.patience):
                return await self._body(headers, receive)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time") from None

    async def _body(self, headers: Mapping[bytes, str], receive: Receive) -> bytes:
        """The whole body; what is too long is not read to its end."""
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "content-type: must be application/json")
        most = self._rules.body
        length = headers.get(b"content-length", "0")
        too_long = ApiError(413, f"the body is longer than {most} bytes")
        if not length.isdecimal() or len(length) > 18 or int(length) > most:
            raise too_long
        parts = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise invalid("the client has left")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise too_long
            if not message.get("more_body"):
                return b"".join(parts)


class _Replay:
    """The body that was read, and then whatever comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body = self._body
        self._body = None
        return {"type": "http.request", "body": body, "more_body": False}


class _Answer:
    """The way back: every answer gets its id and the same cautious headers, and is counted."""

    def __init__(self, send: Send, id: str, meters: Meters) -> None:
        self._send = send
        self._id = id
        self._meters = meters
        self._begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begun = True
            self._meters.responses.labels(str(message["status"])).inc()
            more = [*ALWAYS, (b"x-request-id", self._id.encode())]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await self._send(message)

    async def error(self, error: ApiError) -> None:
        """An error instead of an answer; in the midst of one there is nothing to be said."""
        if self._begun:
            return
        body = json.dumps(error.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
        ]
        if error.status in (408, 413, 431):
            headers.append((b"connection", b"close"))
        start: dict[str, Any] = {"type": "http.response.start", "status": error.status}
        await self.send({**start, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})
