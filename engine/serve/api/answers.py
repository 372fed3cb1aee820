"""One request from its fields to its answer, whole or as a stream; whoever leaves is cancelled."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from ...workers.link import WorkerGoneError
from ...workers.protocol import Admitted, Ended, Message, Refused, Submit, Wrote
from ...workers.router import Router
from ...workers.tickets import StalledError, Ticket
from .fields import SamplingFields
from .meters import Meters, Stopwatch
from .problems import ApiError, engine_gone, invalid
from .replies import Shape, speculation_of, usage_of, usage_so_far
from .scores import Scores

SAID = {"outline": "titles", "opened": "title", "reused": "runs", "ended": "finish"}
FAILED = {  # how a request can end without an answer: status, type, what is said
    "failed": (500, "server_error", "the request failed"),
    "timeout": (504, "timeout_error", "the request's time was up"),
    "cancelled": (503, "server_error", "the request was cancelled"),
    "refused": (400, "invalid_request_error", "the request can never fit"),
}


@dataclass(slots=True)
class Choice:
    """One answer that is being written. index: its place in the response."""

    index: int
    submit: Submit
    ticket: Ticket
    watch: Stopwatch
    prompt_tokens: int = 0
    tokens: int = 0
    ended: Ended | None = None
    scores: Scores = field(default_factory=Scores)


@dataclass(slots=True)
class Answers:
    """All choices of a request."""

    choices: list[Choice]
    shape: Shape
    fields: SamplingFields
    per_prompt: int

    @property
    def prompts(self) -> list[int]:
        """Tokens of every prompt, once."""
        return [one.prompt_tokens for one in self.choices[:: self.per_prompt]]

    @property
    def ends(self) -> list[Ended]:
        return [one.ended for one in self.choices if one.ended is not None]

    def close(self) -> None:
        """Nobody waits any more."""
        for one in self.choices:
            one.ticket.close()


async def begin(
    link: Router,
    meters: Meters,
    submits: Sequence[Submit],
    shape: Shape,
    fields: SamplingFields,
) -> Answers:
    """Hand all choices to the engine; raises ApiError where one of them cannot be."""
    choices: list[Choice] = []
    answers = Answers(choices, shape, fields, fields.n)
    try:
        for index, submit in enumerate(submits):
            watch = meters.watch(submit.graph)
            choices.append(Choice(index, submit, link.ask(submit), watch))
        for one in choices:
            first = await one.ticket.next()
            if isinstance(first, Refused):
                one.ticket.ended = True
                raise invalid(first.message, first.param, first.code)
            assert isinstance(first, Admitted)
            one.prompt_tokens = first.prompt_tokens
    except WorkerGoneError:
        answers.close()
        raise engine_gone() from None
    except BaseException:
        answers.close()
        raise
    return answers


def failure(ended: Ended) -> ApiError | None:
    """What to say of a choice without an answer; None if there is one."""
    if ended.finish in ("stop", "length") or (ended.finish == "refused" and ended.text):
        return None
    status, kind, said = FAILED[ended.finish]
    code = "context_length_exceeded" if ended.finish == "refused" else ended.finish
    message = f"{said}: {ended.note}" if ended.note else said
    return ApiError(status, message, kind=kind, code=code)


def _took(one: Choice, message: Message) -> None:
    if isinstance(message, Wrote):
        one.tokens = message.tokens
        one.scores.add(message)
        one.watch.wrote(message.tokens)
    elif isinstance(message, Ended):
        one.ended = message
        one.ticket.ended = True
        one.watch.ended(message)
        one.ticket.close()


# -- whole ----------------------------------------------------------------------------------------


async def whole(answers: Answers, request: Request, prompts: Sequence[str]) -> dict[str, Any]:
    """The answer once all of it is there; raises ApiError, CancelledError when nobody waits.

    Args:
        prompts: what stands before each choice's text, for `echo`.
    """
    work = asyncio.ensure_future(_gather(answers))
    left = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "the client has left", kind="client_closed")
        work.result()
    except WorkerGoneError:
        raise engine_gone() from None
    finally:
        for task in (work, left):
            task.cancel()
        answers.close()
    ends = answers.ends
    if wrong := next(filter(None, map(failure, ends)), None):
        raise wrong
    shape = answers.shape
    empty = answers.choices[0].submit.max_tokens == 0
    texts = [
        prompt + ("" if empty else end.text) for prompt, end in zip(prompts, ends, strict=True)
    ]
    rows = [one.scores.shaped(one.scores.rest(), chat=shape.chat) for one in answers.choices]
    each = enumerate(zip(texts, ends, rows, strict=True))
    choices = [shape.choice(i, text, end, scores) for i, (text, end, scores) in each]
    vendor = {
        "graph": answers.choices[0].submit.graph,
        "notes": [one.note for one in ends if one.note],
    }
    detailed = answers.fields.specsot.trace
    metrics = speculation_of(ends, detailed=detailed)
    return shape.whole(choices, usage_of(ends, answers.prompts), metrics=metrics, specsot=vendor)


async def _gather(answers: Answers) -> None:
    await asyncio.gather(*(_to_end(one) for one in answers.choices))


async def _to_end(one: Choice) -> None:
    while one.ended is None:
        _took(one, await one.ticket.next())


async def _left(request: Request) -> None:
    """Until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- as a stream ----------------------------------------------------------------------------------


async def streamed(answers: Answers) -> AsyncIterator[str]:
    """The chunks of an answer, as JSON, and `[DONE]`."""
    options = answers.fields.stream_options
    merged: asyncio.Queue[tuple[Choice, Message | BaseException]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_forward(one, merged)) for one in answers.choices]
    try:
        if answers.shape.chat:
            for one in answers.choices:
                yield _json(answers.shape.chunk(one.index, "", first=True), answers)
        while len(answers.ends) < len(answers.choices):
            one, message = await merged.get()
            if isinstance(message, BaseException):
                raise message
            _took(one, message)
            for chunk in _chunks(answers, one, message):
                yield _json(chunk, answers)
        if options is not None and options.include_usage:
            ends = answers.ends
            usage = usage_of(ends, answers.prompts)
            metrics = speculation_of(ends, detailed=answers.fields.specsot.trace)
            yield json.dumps(answers.shape.last(usage, metrics=metrics))
    except (ApiError, WorkerGoneError, StalledError) as error:
        told = error if isinstance(error, ApiError) else engine_gone(str(error))
        yield json.dumps(told.body)
    finally:
        for task in tasks:
            task.cancel()
        answers.close()
    yield "[DONE]"


async def _forward(
    one: Choice, merged: "asyncio.Queue[tuple[Choice, Message | BaseException]]"
) -> None:
    with suppress(asyncio.CancelledError):
        try:
            message: Message | None = None
            while not isinstance(message, Ended):
                message = await one.ticket.next()
                merged.put_nowait((one, message))
        except (WorkerGoneError, StalledError) as error:
            merged.put_nowait((one, error))


def _chunks(answers: Answers, one: Choice, message: Message) -> list[dict[str, Any]]:
    """What a message says to the client."""
    shape = answers.shape
    vendor = answers.fields.specsot
    if isinstance(message, Ended):
        if wrong := failure(message):
            raise wrong
        more = {"note": message.note} if message.note else None
        scores = one.scores.shaped(one.scores.rest(), chat=shape.chat)
        return [shape.chunk(one.index, ended=message, vendor=more, scores=scores)]
    if not isinstance(message, Wrote):
        return []
    if vendor.stream == "multiplexed":
        return [*_multiplexed(shape, one, message, trace=vendor.trace)]
    told = {"step": message.step, "events": message.events} if vendor.trace else None
    scores = one.scores.shaped(one.scores.more(), chat=shape.chat)
    if not message.text and told is None and scores is None:
        return []
    return [shape.chunk(one.index, message.text, vendor=told, scores=scores)]


def _multiplexed(
    shape: Shape, one: Choice, message: Wrote, *, trace: bool
) -> "list[dict[str, Any]]":
    """A chunk for each event, which says of which branch it is; the outline is no content."""
    chunks = []
    for name, branch, more in message.events:
        text = "".join(piece for piece, _ in more) if name == "wrote" else ""
        rows = one.scores.of(branch) if name == "wrote" else []
        told: dict[str, Any] = {"branch": branch, "event": name, "step": message.step}
        if name == "wrote":
            told |= {"pieces": more} if trace else {}
            told |= {"text": text} if branch < 0 else {}
        else:
            told[SAID[name]] = more
        shown = text if branch >= 0 else ""
        scores = one.scores.shaped(rows, chat=shape.chat)
        chunks.append(shape.chunk(one.index, shown, vendor=told, scores=scores))
    return chunks


def _json(chunk: Mapping[str, Any], answers: Answers) -> str:
    options = answers.fields.stream_options
    if options is not None and options.continuous_usage_stats:
        written = sum(one.tokens for one in answers.choices)
        chunk = {**chunk, "usage": usage_so_far(sum(answers.prompts), written)}
    return json.dumps(chunk)
