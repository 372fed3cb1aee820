"""The checks of every request before its route, headers of every response.
Without a valid key, requests get only the liveness probe and the files of the page."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import message_of
from ..prepare.options import LOOPBACK, ServeOptions
from ..shell import complain
from .metrics import ServerMetrics
from .requests import ApiError, invalid

MAX_HEADERS = 100
HEADER_BYTES = 16 << 10
PUBLIC_PATHS = ("/health", "/")
PUBLIC_PREFIX = "/page/"
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
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


@dataclass(frozen=True, slots=True)
class AdmissionMiddleware:
    """The outermost ASGI middleware: authentication, limits, errors and response headers.
    check_capacity: raises ApiError before a body is read if no request can be admitted."""

    app: ASGIApp
    options: ServeOptions
    metrics: ServerMetrics
    check_capacity: Callable[[], None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client_id = request.headers.get("x-request-id", "")
        id = client_id if REQUEST_ID.fullmatch(client_id) else uuid4().hex
        started = False

        async def respond(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.metrics.responses.labels(str(message["status"])).inc()
                headers = MutableHeaders(scope=message)
                headers.update({**RESPONSE_HEADERS, "x-request-id": id})
                if message["status"] in CLOSING:
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
        host = request.headers.get("host", "").rpartition("@")[2]
        name = re.sub(r":\d+$", "", host).lower()
        if self.options.loopback and name not in LOOPBACK:
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
        if self.check_capacity is not None and request.scope["path"] in GENERATION_PATHS:
            self.check_capacity()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "content-type: must be application/json")
        limit = self.options.max_body
        too_long = ApiError(413, f"the body is longer than {limit} bytes")
        if int(request.headers.get("content-length", "0")) > limit:  # h11 lets only digits through
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.options.patience):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_long
        except TimeoutError:
            raise ApiError(408, "the body did not come in time") from None
        except ClientDisconnect:
            raise invalid("the client has left") from None
        return bytes(body)
