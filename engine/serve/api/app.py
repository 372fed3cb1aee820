"""The routes: OpenAI's, probes, metrics, tokens; each answer in the shape that clients expect."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from time import time
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ...workers.link import LinkState, WorkerGoneError
from ...workers.protocol import Decode, Decoded, Encode, Encoded, Refused
from ...workers.router import Router
from .answers import Answers, Shape, begin, streamed, whole
from .errors import ApiError, engine_gone, invalid, overloaded
from .fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    describe,
    read_fields,
)
from .metrics import ServerMetrics
from .submits import chat_submits, check_extras, completion_submits, conversation, prompts_of

OWNER = "specsot"
PING = 15  # seconds between comments on a stream on which nothing happens


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """queue: requests that are open at once; timeout: seconds of one; stall: seconds that a client
    may leave a stream unread."""

    queue: int = 256
    timeout: float = 600.0
    stall: float = 30.0


class Api:
    """What the routes share. draining: no new requests are taken."""

    def __init__(self, link: Router, server_metrics: ServerMetrics, limits: ServerLimits) -> None:
        self.link = link
        self.server_metrics = server_metrics
        self.limits = limits
        self.draining = False
        self.start_time = int(time())

    # -- completions ------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """Answer the last turn of a conversation."""
        fields: ChatRequest = read_fields(ChatRequest, await request.body())
        graph = self.graph(fields.model)
        ignored = check_extras(fields)
        submits = chat_submits(fields, graph, self._ids(), self.limits.timeout)
        self.admit(len(submits))
        answers = await begin(
            self.link, self.server_metrics, submits, self._shape(True, fields), fields
        )
        return await self._answer(request, answers, ignored, [""] * len(submits))

    async def completions(self, request: Request) -> Response:
        """Go on behind a text, or behind token ids."""
        fields: CompletionRequest = read_fields(CompletionRequest, await request.body())
        graph = self.graph(fields.model)
        ignored = check_extras(fields)
        submits = completion_submits(fields, graph, self._ids(), self.limits.timeout)
        self.admit(len(submits))
        before = [""] * len(submits)
        if fields.echo:
            if fields.stream:
                raise invalid("echo: not with stream", "echo")
            texts = [await self._text_of(prompt) for prompt in prompts_of(fields.prompt)]
            before = [text for text in texts for _ in range(fields.n)]
        answers = await begin(
            self.link, self.server_metrics, submits, self._shape(False, fields), fields
        )
        return await self._answer(request, answers, ignored, before)

    async def _answer(
        self, request: Request, answers: Answers, ignored: list[str], before: list[str]
    ) -> Response:
        headers = {"x-specsot-ignored": ", ".join(map(_shown, ignored[:32]))} if ignored else {}
        vendor = answers.fields.specsot
        if answers.fields.stream:
            if vendor.stream == "multiplexed" and answers.fields.stop:
                answers.close()
                raise invalid("stop: not with specsot.stream multiplexed", "stop")
            timeout = self.limits.stall
            return EventSourceResponse(
                streamed(answers), ping=PING, sep="\n", send_timeout=timeout, headers=headers
            )
        return JSONResponse(await whole(answers, request, before), headers=headers)

    def _shape(self, chat: bool, fields: SamplingFields) -> Shape:
        return Shape(chat=chat, model=f"{OWNER}/{self.graph(fields.model)}")

    def _ids(self) -> Iterator[str]:
        while True:
            yield self.link.new_id()

    def graph(self, model: str | None) -> str:
        """The graph that a request's `model` names; raises ApiError."""
        if not self.link.ready:
            starting = self.link.state is LinkState.STARTING
            raise engine_gone("the engine is starting" if starting else "the engine is not there")
        if model is None:
            return next(iter(self.link.graphs))
        name = model.removeprefix(f"{OWNER}/")
        if name not in self.link.graphs:
            there = ", ".join(f"{OWNER}/{served}" for served in self.link.graphs)
            message = f"there is no model {model[:80]!r}; there are: {there}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def check_capacity(self) -> None:
        """Raise ApiError if no more requests are admitted."""
        if self.link.ready:
            self.admit(1)

    def admit(self, more: int) -> None:
        """Raise ApiError if `more` requests exceed the queue."""
        if self.draining:
            self.server_metrics.rejected("draining")
            raise overloaded("the server is shutting down")
        if more > self.limits.queue:
            raise invalid(f"{more} choices in all, at most {self.limits.queue} are served", "n")
        if self.link.open + more > self.limits.queue:
            self.server_metrics.rejected("queue_full")
            raise overloaded(f"{self.link.open} requests are open, at most {self.limits.queue}")

    # -- tokens -----------------------------------------------------------------------------------

    async def _text_of(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        answer = await self._ask(Decode(self.link.new_id(), prompt))
        assert isinstance(answer, Decoded)
        return answer.text

    async def _ask(self, message: Encode | Decode) -> Any:
        try:
            answer = await self.link.answer(message)
        except WorkerGoneError:
            raise engine_gone() from None
        if isinstance(answer, Refused):
            raise invalid(answer.message, answer.param)
        return answer

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of the prompt that a conversation makes."""
        fields: TokenizeRequest = read_fields(TokenizeRequest, await request.body())
        graph = self.graph(fields.model)
        id = self.link.new_id()
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if fields.messages is not None:
            question, past, rules = conversation(fields.messages)
            ask = Encode(id, graph, question, chat=True, past=past, rules=rules)
        else:
            ask = Encode(id, graph, fields.prompt or "")
        encoded: Encoded = await self._ask(ask)
        longest = self.link.graphs[graph]["longest"]
        ids = list(encoded.token_ids)
        body = {"count": len(ids), "max_model_len": longest, "tokens": ids}
        return JSONResponse({**body, "token_strs": list(encoded.pieces)})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        fields: DetokenizeRequest = read_fields(DetokenizeRequest, await request.body())
        size = self.link.graphs[self.graph(fields.model)]["vocabulary"]
        if wrong := [token for token in fields.tokens if token >= size]:
            raise invalid(f"tokens: no token {wrong[0]}: the model has {size} of them", "tokens")
        return JSONResponse({"prompt": await self._text_of(fields.tokens)})

    # -- what is here -----------------------------------------------------------------------------

    def _model(self, name: str) -> dict[str, Any]:
        facts = self.link.graphs[name]
        body = {"id": f"{OWNER}/{name}", "object": "model", "created": self.start_time}
        more = {"root": facts["model"], "parent": None, "max_model_len": facts["longest"]}
        return {**body, "owned_by": OWNER, **more, "specsot": facts}

    async def models(self, request: Request) -> Response:
        """The graphs that are served."""
        self.graph(None)
        models = [self._model(name) for name in self.link.graphs]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        """One of them."""
        return JSONResponse(self._model(self.graph(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """Whether the server can answer, or soon will."""
        dead = self.link.state in (LinkState.DEAD, LinkState.CLOSED)
        replicas = self.link.replicas
        ready = sum(replica.state == LinkState.READY for replica in replicas)
        body = {"replicas": len(replicas), "ready": ready}
        return JSONResponse(body, status_code=503 if dead else 200)

    async def ready(self, request: Request) -> Response:
        """Whether it takes requests now."""
        good = self.link.ready and not self.draining
        state = "draining" if self.draining else str(self.link.state)
        return JSONResponse({"status": state}, status_code=200 if good else 503)

    async def version(self, request: Request) -> Response:
        """Of this program."""
        return JSONResponse({"version": version("specsot")})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return PlainTextResponse(
            self.server_metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )


def _shown(name: str) -> str:
    """A field name as a header value: printable ASCII, at most 64 characters."""
    return "".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in name[:64])


def build_app(api: Api) -> FastAPI:
    """The routes over one engine."""
    app = FastAPI(title="specsot", version=version("specsot"), docs_url=None, redoc_url=None)
    posts: list[tuple[str, Callable[..., Any], type[BaseModel]]] = [
        ("/v1/chat/completions", api.chat, ChatRequest),
        ("/v1/completions", api.completions, CompletionRequest),
        ("/tokenize", api.tokenize, TokenizeRequest),
        ("/detokenize", api.detokenize, DetokenizeRequest),
    ]
    for path, function, kind in posts:
        app.add_api_route(path, function, methods=["POST"], **describe(kind))
    gets: list[tuple[str, Callable[..., Any]]] = [
        ("/v1/models", api.models),
        ("/v1/models/{name:path}", api.model),
        ("/health", api.health),
        ("/ready", api.ready),
        ("/version", api.version),
        ("/metrics", api.metrics),
    ]
    for path, function in gets:
        app.add_api_route(path, function, methods=["GET"], **describe(None))
    app.add_route("/metrics", api.metrics, methods=["HEAD"], include_in_schema=False)
    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    return app


async def api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def http_error(request: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    words = {404: f"there is nothing at {request.url.path[:80]!r}", 405: "another method is needed"}
    problem = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
    headers = dict(error.headers or {})
    return JSONResponse(problem.body, status_code=error.status_code, headers=headers)
