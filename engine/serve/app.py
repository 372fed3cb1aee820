"""The routes: OpenAI's, probes, metrics, tokens, the page; each answer as clients expect it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from time import time
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import generate_latest
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..errors import UsageError
from ..prepare.inputs import Prompt
from ..prepare.options import ServeOptions
from ..record.run_folder import SavedRun, saved_runs
from ..workers.link import LinkState, WorkerGoneError
from ..workers.protocol import Encode, Encoded, Refused, encode
from ..workers.router import Router
from .answers import Answers, ResponseAnswer
from .metrics import ServerMetrics
from .requests import (
    RESPONSE_NAMES,
    UNSUPPORTED,
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    ResponseRequest,
    TokenizeRequest,
    conversation,
    engine_gone,
    first_error,
    invalid,
    overloaded,
)

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
TOKEN_PATHS = ("/tokenize", "/detokenize")
MAX_RUNS = 200
MAX_VIEWERS = 16
NO_STORE = {"cache-control": "no-cache"}
OWNER = "specsot"
UNSAFE = re.compile(r"[^!-~]|,")  # in a header: not printable, or a separator
PING = 15  # seconds between comments on a stream on which nothing happens


@dataclass(eq=False)
class Api:
    """What the routes share. draining: no new requests are taken."""

    router: Router
    server_metrics: ServerMetrics
    options: ServeOptions
    draining: bool = False
    start_time: int = field(default_factory=lambda: int(time()))

    async def chat(self, request: Request, fields: Body[ChatRequest]) -> Response:
        """Answer the last turn of a conversation."""
        return await self._generate(request, fields)

    async def completions(self, request: Request, fields: Body[CompletionRequest]) -> Response:
        """Go on behind a text, or behind token ids."""
        return await self._generate(request, fields)

    async def responses(self, request: Request, fields: Body[ResponseRequest]) -> Response:
        """Answer a text or a conversation, in the shape of the Responses API."""
        try:
            return await self._generate(request, fields)
        except ApiError as error:  # blames a field of the chat
            error.param = RESPONSE_NAMES.get(error.param or "", error.param)
            raise

    async def embeddings(self, request: Request) -> Response:
        """No graph has them."""
        raise invalid("the model does not support embeddings", "model", UNSUPPORTED)

    async def _generate(
        self, request: Request, fields: ChatRequest | CompletionRequest | ResponseRequest
    ) -> Response:
        names = [UNSAFE.sub("?", name[:64]) or "?" for name in fields.check_extras()[:32]]
        headers = {"x-specsot-ignored": ", ".join(names)} if names else {}
        asked = fields.chat() if isinstance(fields, ResponseRequest) else fields
        graph = self.graph(asked.model)
        submits = asked.submits(graph, self.router.new_id, self.options.timeout)
        self.admit(len(submits))
        echoed = [""] * len(submits)
        if isinstance(asked, CompletionRequest) and asked.echo:
            texts = [await self._text_of(prompt) for prompt in asked.prompts]
            echoed = [text for text in texts for _ in range(asked.n)]
        begun = Answers(asked, f"{OWNER}/{graph}", self.server_metrics)
        await begun.begin(self.router, submits, echoed)
        answers = ResponseAnswer(fields, begun) if isinstance(fields, ResponseRequest) else begun
        if not fields.stream:
            return JSONResponse(await answers.whole(request), headers=headers)
        limit = self.options.write_timeout
        return EventSourceResponse(
            answers.streamed(), ping=PING, sep="\n", send_timeout=limit, headers=headers
        )

    def graph(self, model: str | None) -> str:
        """The graph that a request's `model` names; raises ApiError."""
        if not self.router.ready:
            if self.router.state is LinkState.STARTING:
                raise engine_gone("the models are being loaded", "engine_loading")
            raise engine_gone("the engine is not running")
        if model is None:
            return next(iter(self.router.graphs))
        name = model.removeprefix(f"{OWNER}/")
        if name not in self.router.graphs:
            there = ", ".join(f"{OWNER}/{served}" for served in self.router.graphs)
            message = f"there is no model {model[:80]!r}; there are: {there}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def check_capacity(self, path: str) -> None:
        """Raise ApiError if no request for this path can be admitted."""
        if self.router.ready and path in GENERATION_PATHS:
            self.admit(1)
        elif self.router.ready and path in TOKEN_PATHS:
            self._admit_text()

    def _admit_text(self) -> None:
        """Raise ApiError if as many texts are tokenized as may be. They are not in the queue."""
        limit = self.options.max_tokenize
        if self.router.tokenizing >= limit:
            self.server_metrics.count("admission_rejections", "tokenize_full")
            raise overloaded(f"{limit} texts are being tokenized, the most that are at once")

    def admit(self, more: int) -> None:
        """Raise ApiError if `more` requests exceed the queue."""
        limit = self.options.max_queue
        if self.draining:
            self.server_metrics.count("admission_rejections", "draining")
            raise overloaded("the server is shutting down")
        if more > limit:
            raise invalid(f"{more} choices in all, at most {limit} are served", "n")
        if self.router.open + more > limit:
            self.server_metrics.count("admission_rejections", "queue_full")
            raise overloaded(f"{self.router.open} requests are open, at most {limit}")

    async def _text_of(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        graph = next(iter(self.router.graphs))
        answer = await self._ask(Encode(graph, Prompt(self.router.new_id(), ""), token_ids=prompt))
        return answer.text

    async def _ask(self, message: Encode) -> Encoded:
        try:
            answer = await self.router.answer(message, self.options.timeout)
        except TimeoutError:
            raise ApiError(504, "the request's time was up", code="timeout") from None
        if isinstance(answer, Refused):
            raise invalid(answer.message, answer.param)
        assert isinstance(answer, Encoded)
        return answer

    async def tokenize(self, fields: Body[TokenizeRequest]) -> Response:
        """The token ids of a text, or of the prompt that a conversation makes."""
        graph = self.graph(fields.model)
        self._admit_text()
        prompt = Prompt("", fields.prompt or "")
        if (fields.prompt is None) == (fields.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if fields.messages is not None:
            prompt, prefill = conversation(fields.messages)
            if prefill:
                raise invalid("messages: the last turn must be a user's", "messages")
        prompt = replace(prompt, key=self.router.new_id())
        encoded = await self._ask(Encode(graph, prompt, fields.messages is not None))
        body = {
            "count": len(encoded.token_ids),
            "max_model_len": self.router.graphs[graph]["longest"],
            "tokens": encoded.token_ids,
            "token_strs": encoded.pieces,
        }
        return JSONResponse(body)

    async def detokenize(self, fields: Body[DetokenizeRequest]) -> Response:
        """The text of token ids."""
        size = self.router.graphs[self.graph(fields.model)]["vocabulary"]
        if wrong := [token for token in fields.tokens if token >= size]:
            raise invalid(f"tokens: no token {wrong[0]}: the model has {size} of them", "tokens")
        self._admit_text()
        return JSONResponse({"prompt": await self._text_of(fields.tokens)})

    def _model(self, name: str) -> dict[str, Any]:
        facts = self.router.graphs[name]
        return {
            "id": f"{OWNER}/{name}",
            "object": "model",
            "created": self.start_time,
            "owned_by": OWNER,
            "root": facts["model"],
            "parent": None,
            "max_model_len": facts["longest"],
            "specsot": facts,
        }

    async def models(self) -> Response:
        """The graphs that are served."""
        self.graph(None)
        models = [self._model(name) for name in self.router.graphs]
        return JSONResponse({"object": "list", "data": models})

    async def model(self, name: str) -> Response:
        """One of them."""
        return JSONResponse(self._model(self.graph(name)))

    async def health(self) -> Response:
        """Whether the server can answer, or soon will."""
        dead = self.router.state in (LinkState.HUNG, LinkState.DEAD, LinkState.CLOSED)
        states = [replica["state"] for replica in self.router.replicas]
        body = {"replicas": len(states), "ready": states.count(LinkState.READY)}
        return JSONResponse(body, status_code=503 if dead else 200)

    async def ready(self) -> Response:
        """Whether it takes requests now."""
        good = self.router.ready and not self.draining
        state = "draining" if self.draining else str(self.router.state)
        return JSONResponse({"status": state}, status_code=200 if good else 503)

    async def version(self) -> Response:
        """Of this program."""
        return JSONResponse({"version": version("specsot")})

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        text = generate_latest(self.server_metrics.registry)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")


# -- the routes and their OpenAPI description -----------------------------------------------------

STREAMED = {
    "description": "The answer; with `stream` its chunks, and `[DONE]`.",
    "content": {"text/event-stream": {"schema": {"description": "Server-sent events."}}},
}
STATUSES: dict[int | str, str] = {
    400: "A field is wrong; `param` names it.",
    401: "No valid API key.",
    403: "The server is not called so.",
    404: "No such model, or path.",
    405: "Another method is needed.",
    408: "The request did not come in time.",
    413: "The body is too long.",
    415: "The body is no JSON.",
    429: "Too many requests.",
    431: "Too many headers, or too long ones.",
    500: "The server failed; the answer has the request's id.",
    503: "The engine is not there, or has no room; come again.",
    504: "The request's time was up.",
    "default": "Another error.",  # instead of the 422 that FastAPI adds
}
OF_BODIES = (413, 415, 429, 504)


def build_app(api: Api) -> FastAPI:
    app = FastAPI(title="specsot", version=version("specsot"), docs_url=None, redoc_url=None)
    routes: dict[str, Any] = {
        "/v1/chat/completions": api.chat,
        "/v1/completions": api.completions,
        "/v1/responses": api.responses,
        "/tokenize": api.tokenize,
        "/detokenize": api.detokenize,
        "/v1/models": api.models,
        "/v1/models/{name:path}": api.model,
        "/health": api.health,
        "/ready": api.ready,
        "/version": api.version,
        "/metrics": api.metrics,
    }
    for path, function in routes.items():
        has_body = path in GENERATION_PATHS + TOKEN_PATHS
        responses: dict[int | str, Any] = {
            status: {"model": ErrorBody, "description": text}
            for status, text in STATUSES.items()
            if has_body or status not in OF_BODIES
        }
        if path in GENERATION_PATHS:
            responses[200] = STREAMED
        elif function == api.metrics:
            responses[200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}
        app.add_api_route(
            path,
            function,
            methods=["POST" if has_body else "GET"],
            responses=responses,
            response_model=None,
            response_class=Response if function == api.metrics else JSONResponse,
        )
    app.add_route("/v1/embeddings", api.embeddings, methods=["POST"], include_in_schema=False)
    app.add_route("/metrics", api.metrics, methods=["HEAD"], include_in_schema=False)
    add_error_handlers(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors of routes and engines, unknown paths and wrong methods in this format."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, WorkerGoneError):
            error = engine_gone()
        if isinstance(error, RequestValidationError):
            error = first_error(error.errors())
        if isinstance(error, HTTPException):
            cause = error.__cause__  # of a body: no UTF-8, endless digits, endless nesting
            why = "too deep" if isinstance(cause, RecursionError) else str(cause).split("\n")[0]
            words = {
                400: f"the body cannot be read: {why[:200]}",
                404: f"there is nothing at {request.url.path[:80]!r}",
                405: "another method is needed",
            }
            message = words.get(error.status_code, str(error.detail))
            error = ApiError(error.status_code, message, headers=error.headers)
        assert isinstance(error, ApiError)
        return error.response

    async def pass_on(request: Request, error: Exception) -> Response:
        raise error  # to the outermost middleware, whose answer has the request's id

    for kind in (ApiError, WorkerGoneError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(Exception, pass_on)


# -- the page at `/`, its files, and its data: pictures of the engines, saved runs ----------------


def page_files() -> dict[str, tuple[bytes, str]]:
    return {
        file.name: (file.read_bytes(), f"{KINDS[end]}; charset=utf-8")
        for file in (files(__package__) / "static").iterdir()
        if (end := file.name.rpartition(".")[2]) in KINDS
    }


def add_page_routes(
    app: FastAPI, router: Router | None, runs: Path, only: SavedRun | None = None
) -> None:
    """Add the page's routes. router: None to play back runs only; only: the single run then."""
    files = page_files()

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise ApiError(404, f"file not found: {name[:80]!r}")
        body, kind = files[name]
        return Response(body, headers={"content-type": kind, **NO_STORE})

    async def about(request: Request) -> Response:
        body = {
            "live": router is not None,
            "state": "" if router is None else str(router.state),
            "graphs": [] if router is None else list(router.graphs.values()),
            "runs": [run.path.name for run in await asyncio.to_thread(shown_runs)],
        }
        return JSONResponse(body, headers=NO_STORE)

    def shown_runs() -> list[SavedRun]:
        if only is not None:
            return [only]
        try:
            return saved_runs(runs)[:MAX_RUNS]
        except (UsageError, OSError):
            return []

    def run(request: Request) -> Response:
        """The JSON of a run. It takes seconds: Starlette calls a plain function on a thread."""
        name = request.path_params["name"]
        found = next((saved for saved in shown_runs() if saved.path.name == name), None)
        if found is None:
            raise ApiError(404, f"run not found: {name[:80]!r}")
        from ..record.replay import playback_of  # imports torch

        try:
            text = json.dumps(playback_of(found), separators=(",", ":"))
        except UsageError as error:
            raise ApiError(400, str(error)) from None
        return Response(text, headers={"content-type": "application/json", **NO_STORE})

    async def pictures(request: Request) -> Response:
        """The engines' pictures, as server-sent events."""
        assert router is not None
        if len(router.watchers) >= MAX_VIEWERS:
            raise overloaded(f"{MAX_VIEWERS} pages are open already", 429)

        async def events() -> AsyncIterator[dict[str, str]]:
            async for picture in router.pictures():
                yield {"data": encode(picture).decode().strip()}

        return EventSourceResponse(events(), ping=PING, sep="\n", send_timeout=10)

    routes: dict[str, Any] = {
        "/": file,
        "/page/{name}": file,
        "/specsot/about": about,
        "/specsot/runs/{name}": run,
    }
    if router is not None:
        routes["/specsot/pictures"] = pictures
    for path, function in routes.items():
        app.add_route(path, function, methods=["GET"], include_in_schema=False)
