"""Answers of requests, whole or streamed: their text, shapes of replies and token scores."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from ...workers.link import WorkerGoneError
from ...workers.protocol import Admitted, Ended, Message, Refused, Submit, Wrote
from ...workers.router import Router
from ...workers.tickets import StalledError, Ticket
from .errors import ApiError, engine_gone, invalid
from .fields import SamplingFields
from .metrics import ServerMetrics, Stopwatch

LOWEST = -9999.0  # JSON has no -inf


@dataclass(slots=True)
class Scores:
    """The scores of a choice's tokens, as rows of `Wrote.scores`.

    Parts are decoded in parallel. As with text, the rows of a part are sent once all parts before
    it have ended.
    """

    _rows: dict[int, list[Any]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _at: int = -1
    _characters: int = 0  # of the tokens already sent

    def add(self, message: Wrote) -> None:
        """Add the rows of a step."""
        for row in message.scores:
            self._rows.setdefault(row[0], []).append(row)
        for name, branch, _ in message.events:
            if name == "ended":
                self._ended.add(branch)

    def more(self) -> list[Any]:
        """The rows that can be sent now."""
        rows = self.of(self._at)
        while self._at in self._ended or self._is_plain:
            self._at += 1
            rows += self.of(self._at)
        return rows

    def of(self, branch: int) -> list[Any]:
        """The unsent rows of a branch."""
        return self._rows.pop(branch, [])

    def rest(self) -> list[Any]:
        """All unsent rows."""
        return [row for branch in sorted(self._rows) for row in self.of(branch)]

    @property
    def _is_plain(self) -> bool:
        """The first part has begun, and there was no outline."""
        return self._at < 0 and (0 in self._rows or 0 in self._ended)

    def shaped(self, rows: Sequence[Any], *, chat: bool) -> dict[str, Any] | None:
        """Rows as an answer has them; None for none."""
        if not rows:
            return None
        if chat:
            return {"content": [_entry(*row) for row in rows]}
        offsets = []
        for _, _, text, _, _ in rows:
            offsets.append(self._characters)
            self._characters += len(text)
        return {
            "tokens": [text for _, _, text, _, _ in rows],
            "token_logprobs": [None if p is None else _floor(p) for _, _, _, p, _ in rows],
            "top_logprobs": [
                None if p is None else {t: _floor(q) for _, t, q in top} for _, _, _, p, top in rows
            ],
            "text_offset": offsets,
        }


def _entry(branch: int, token: int, text: str, logprob: float, top: Sequence[Any]) -> Any:
    """A token of a chat answer; `branch` is the part that it is of, -1 for the outline."""
    details = {"branch": branch, "top_logprobs": [_pair(t, p) for _, t, p in top]}
    return {**_pair(text, logprob), **details}


def _pair(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _floor(logprob), "bytes": list(text.encode())}


def _floor(logprob: float) -> float:
    return max(logprob, LOWEST)


FINISHED = {"stop": "stop", "length": "length", "refused": "length"}


def usage_of(ended: Sequence[Ended], prompts: Sequence[int]) -> dict[str, Any]:
    """Tokens of all choices; outlines were written, so they count.

    Args:
        prompts: tokens of each prompt, counted once however many choices it has.
    """
    cached = sum(end.usage["cached"] for end in ended)
    outline = sum(end.usage["outline"] for end in ended)
    written = sum(end.usage["answer"] for end in ended) + outline
    prompt = sum(prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
        "completion_tokens_details": {"skeleton_tokens": outline},
    }


def usage_so_far(prompt: int, written: int) -> dict[str, Any]:
    """The same while an answer is written."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def speculation_of(ended: Sequence[Ended], *, detailed: bool = False) -> dict[str, Any] | None:
    """How drafts of the only choice fared, in the words that vLLM and AIPerf have for it."""
    if len(ended) != 1 or not sum(ended[0].drafted):
        return {"speculative_decoding": None}
    accepted = ended[0].accepted
    drafted = ended[0].drafted
    histogram = [0] * (max(accepted) + 1)
    for count in accepted:
        histogram[count] += 1
    figures: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": max(drafted),
    }
    if detailed:
        figures |= {"per_step_accepted": list(accepted), "per_step_drafted": list(drafted)}
    return {"speculative_decoding": figures}


class Shape:
    """The envelope of one request's answer: the same id, time and model on every chunk."""

    def __init__(self, *, chat: bool, model: str) -> None:
        self.chat = chat
        self.model = model
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid4().hex}"
        self.created = int(time())

    def _envelope(self, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        if self.chat and stream:
            kind += ".chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(
        self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], **more: Any
    ) -> dict[str, Any]:
        return {**self._envelope(stream=False), "choices": list(choices), "usage": usage, **more}

    def choice(
        self, index: int, text: str, ended: Ended, scores: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """A finished choice of an answer that is not streamed."""
        end = {"finish_reason": FINISHED[ended.finish], "stop_reason": ended.stop}
        if self.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": scores, **end}
        return {"index": index, "text": text, "logprobs": scores, **end}

    def chunk(
        self,
        index: int,
        text: str | None = None,
        *,
        first: bool = False,
        ended: Ended | None = None,
        vendor: Mapping[str, Any] | None = None,
        scores: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A piece of one choice: its beginning, a text, or its end."""
        finish = None if ended is None else FINISHED[ended.finish]
        choice: dict[str, Any] = {"index": index, "logprobs": scores, "finish_reason": finish}
        if ended is not None:
            choice["stop_reason"] = ended.stop
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
            choice["delta"] = delta if text is None else {**delta, "content": text}
        else:
            choice["text"] = text or ""
        chunk = {**self._envelope(stream=True), "choices": [choice]}
        return chunk if vendor is None else {**chunk, "specsot": vendor}

    def last(self, usage: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """The chunk behind all choices that says what they took."""
        return {**self._envelope(stream=True), "choices": [], "usage": usage, **more}


EVENT_FIELDS = {"outline": "titles", "opened": "title", "reused": "runs", "ended": "finish"}
FAILED = {  # ends without an answer: status, type, message
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
        return [choice.prompt_tokens for choice in self.choices[:: self.per_prompt]]

    @property
    def ends(self) -> list[Ended]:
        return [choice.ended for choice in self.choices if choice.ended is not None]

    def close(self) -> None:
        """Close the tickets of all choices."""
        for choice in self.choices:
            choice.ticket.close()


async def begin(
    link: Router,
    server_metrics: ServerMetrics,
    submits: Sequence[Submit],
    shape: Shape,
    fields: SamplingFields,
) -> Answers:
    """Hand all choices to the engine; raises ApiError where one of them cannot be."""
    choices: list[Choice] = []
    answers = Answers(choices, shape, fields, fields.n)
    try:
        for index, submit in enumerate(submits):
            watch = server_metrics.watch(submit.graph)
            choices.append(Choice(index, submit, link.ask(submit), watch))
        for choice in choices:
            first = await choice.ticket.next()
            if isinstance(first, Refused):
                choice.ticket.ended = True
                raise invalid(first.message, first.param, first.code)
            assert isinstance(first, Admitted)
            choice.prompt_tokens = first.prompt_tokens
    except WorkerGoneError:
        answers.close()
        raise engine_gone() from None
    except BaseException:
        answers.close()
        raise
    return answers


def failure(ended: Ended) -> ApiError | None:
    """The error of a choice without an answer; None if it has one."""
    if ended.finish in ("stop", "length") or (ended.finish == "refused" and ended.text):
        return None
    status, kind, reason = FAILED[ended.finish]
    code = "context_length_exceeded" if ended.finish == "refused" else ended.finish
    message = f"{reason}: {ended.note}" if ended.note else reason
    return ApiError(status, message, kind=kind, code=code)


def _receive(choice: Choice, message: Message) -> None:
    if isinstance(message, Wrote):
        choice.tokens = message.tokens
        choice.scores.add(message)
        choice.watch.wrote(message.tokens)
    elif isinstance(message, Ended):
        choice.ended = message
        choice.ticket.ended = True
        choice.watch.ended(message)
        choice.ticket.close()


# -- whole ----------------------------------------------------------------------------------------


async def whole(answers: Answers, request: Request, prompts: Sequence[str]) -> dict[str, Any]:
    """The complete answer; raises ApiError, also when the client disconnects.

    Args:
        prompts: the prefix of each choice's text, for `echo`.
    """
    work = asyncio.ensure_future(_gather(answers))
    disconnect = asyncio.ensure_future(_until_disconnect(request))
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ApiError(499, "the client has left", kind="client_closed")
        work.result()
    except WorkerGoneError:
        raise engine_gone() from None
    finally:
        for task in (work, disconnect):
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
    rows = [
        choice.scores.shaped(choice.scores.rest(), chat=shape.chat) for choice in answers.choices
    ]
    each = enumerate(zip(texts, ends, rows, strict=True))
    choices = [shape.choice(i, text, end, scores) for i, (text, end, scores) in each]
    vendor = {
        "graph": answers.choices[0].submit.graph,
        "notes": [end.note for end in ends if end.note],
    }
    detailed = answers.fields.specsot.trace
    metrics = speculation_of(ends, detailed=detailed)
    return shape.whole(choices, usage_of(ends, answers.prompts), metrics=metrics, specsot=vendor)


async def _gather(answers: Answers) -> None:
    await asyncio.gather(*(_to_end(choice) for choice in answers.choices))


async def _to_end(choice: Choice) -> None:
    while choice.ended is None:
        _receive(choice, await choice.ticket.next())


async def _until_disconnect(request: Request) -> None:
    """Until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# -- as a stream ----------------------------------------------------------------------------------


async def streamed(answers: Answers) -> AsyncIterator[str]:
    """The chunks of an answer, as JSON, and `[DONE]`."""
    options = answers.fields.stream_options
    merged: asyncio.Queue[tuple[Choice, Message | BaseException]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_forward(choice, merged)) for choice in answers.choices]
    try:
        if answers.shape.chat:
            for choice in answers.choices:
                yield _json(answers.shape.chunk(choice.index, "", first=True), answers)
        while len(answers.ends) < len(answers.choices):
            choice, message = await merged.get()
            if isinstance(message, BaseException):
                raise message
            _receive(choice, message)
            for chunk in _chunks(answers, choice, message):
                yield _json(chunk, answers)
        if options is not None and options.include_usage:
            ends = answers.ends
            usage = usage_of(ends, answers.prompts)
            metrics = speculation_of(ends, detailed=answers.fields.specsot.trace)
            yield json.dumps(answers.shape.last(usage, metrics=metrics))
    except (ApiError, WorkerGoneError, StalledError) as error:
        api_error = error if isinstance(error, ApiError) else engine_gone(str(error))
        yield json.dumps(api_error.body)
    finally:
        for task in tasks:
            task.cancel()
        answers.close()
    yield "[DONE]"


async def _forward(
    choice: Choice, merged: "asyncio.Queue[tuple[Choice, Message | BaseException]]"
) -> None:
    with suppress(asyncio.CancelledError):
        try:
            message: Message | None = None
            while not isinstance(message, Ended):
                message = await choice.ticket.next()
                merged.put_nowait((choice, message))
        except (WorkerGoneError, StalledError) as error:
            merged.put_nowait((choice, error))


def _chunks(answers: Answers, choice: Choice, message: Message) -> list[dict[str, Any]]:
    """The chunks of a message."""
    shape = answers.shape
    vendor = answers.fields.specsot
    if isinstance(message, Ended):
        if wrong := failure(message):
            raise wrong
        more = {"note": message.note} if message.note else None
        scores = choice.scores.shaped(choice.scores.rest(), chat=shape.chat)
        return [shape.chunk(choice.index, ended=message, vendor=more, scores=scores)]
    if not isinstance(message, Wrote):
        return []
    if vendor.stream == "multiplexed":
        return [*_multiplexed(shape, choice, message, trace=vendor.trace)]
    trace = {"step": message.step, "events": message.events} if vendor.trace else None
    scores = choice.scores.shaped(choice.scores.more(), chat=shape.chat)
    if not message.text and trace is None and scores is None:
        return []
    return [shape.chunk(choice.index, message.text, vendor=trace, scores=scores)]


def _multiplexed(
    shape: Shape, choice: Choice, message: Wrote, *, trace: bool
) -> "list[dict[str, Any]]":
    """A chunk for each event with its branch; the outline has no content."""
    chunks = []
    for name, branch, more in message.events:
        text = "".join(piece for piece, _ in more) if name == "wrote" else ""
        rows = choice.scores.of(branch) if name == "wrote" else []
        details: dict[str, Any] = {"branch": branch, "event": name, "step": message.step}
        if name == "wrote":
            details |= {"pieces": more} if trace else {}
            details |= {"text": text} if branch < 0 else {}
        else:
            details[EVENT_FIELDS[name]] = more
        shown = text if branch >= 0 else ""
        scores = choice.scores.shaped(rows, chat=shape.chat)
        chunks.append(shape.chunk(choice.index, shown, vendor=details, scores=scores))
    return chunks


def _json(chunk: Mapping[str, Any], answers: Answers) -> str:
    options = answers.fields.stream_options
    if options is not None and options.continuous_usage_stats:
        written = sum(choice.tokens for choice in answers.choices)
        chunk = {**chunk, "usage": usage_so_far(sum(answers.prompts), written)}
    return json.dumps(chunk)
