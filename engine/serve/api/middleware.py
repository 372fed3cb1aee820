"""Checks of every request before its route, and headers of every response.

Without a valid key, requests get only the liveness probe and the files of the page.
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
from .metrics import ServerMetrics

MAX_HEADERS = 100
HEADER_BYTES = 16 << 10
PUBLIC_PATHS = ("/health", "/")
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
PUBLIC_PREFIX = "/page/"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
RESPONSE_HEADERS = (
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
class AdmissionRules:
    """Limits of requests.

    keys: sha256 of the API keys, empty for no check; hosts: allowed `Host` names, empty for any.
    body: maximum bytes of a body, received within `patience` seconds.
    """

    keys: Sequence[bytes] = ()
    hosts: Sequence[str] = ()
    body: int = 1 << 20
    patience: float = 20.0

    def allows(self, key: str) -> bool:
        """Whether this is one of the keys; takes the same time for every wrong one."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        same = [hmac.compare_digest(digest, key_hash) for key_hash in self.keys]
        return any(same)


class AdmissionMiddleware:
    """The outermost ASGI middleware: authentication, limits, errors and response headers.

    check_capacity: raises ApiError before a body is read if no request can be admitted.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: AdmissionRules,
        metrics: ServerMetrics,
        check_capacity: Callable[[], None] | None = None,
    ) -> None:
        self._app = app
        self._rules = rules
        self._metrics = metrics
        self._check_capacity = check_capacity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        client_id = headers.get(b"x-request-id", "")
        id = client_id if REQUEST_ID.fullmatch(client_id) else uuid4().hex
        answer = _Answer(send, id, self._metrics)
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
        if len(scope["headers"]) > MAX_HEADERS or size > HEADER_BYTES:
            raise ApiError(431, "too many headers, or too long ones")
        host = headers.get(b"host", "").rpartition("@")[2]
        name = re.sub(r":\d+$", "", host)
        if rules.hosts and name.lower() not in rules.hosts:
            raise ApiError(403, "this server is not called so", code="host_not_allowed")
        if rules.keys and path not in PUBLIC_PATHS and not path.startswith(PUBLIC_PREFIX):
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
        if self._check_capacity is not None and path in GENERATION_PATHS:
            self._check_capacity()
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
    """Receives the body already read, then further messages."""

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
    """Sends a response with its id and the security headers, and counts it."""

    def __init__(self, send: Send, id: str, metrics: ServerMetrics) -> None:
        self._send = send
        self._id = id
        self._metrics = metrics
        self._started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._metrics.responses.labels(str(message["status"])).inc()
            more = [*RESPONSE_HEADERS, (b"x-request-id", self._id.encode())]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await self._send(message)

    async def error(self, error: ApiError) -> None:
        """Send an error, unless the response has started."""
        if self._started:
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
