"""Answers, whole or streamed: text, token scores, shapes in chat, completions and responses."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic, time
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from ..workers.link import WorkerGoneError
from ..workers.protocol import GRAMMAR, Admitted, Ended, Message, Refused, Submit, Wrote
from ..workers.router import Router
from ..workers.tickets import StalledError, Ticket
from .forms import CallReader
from .metrics import ServerMetrics
from .requests import ApiError, ChatRequest, CompletionRequest, ResponseRequest, engine_gone

LOWEST = -9999.0  # JSON has no -inf
EVENT_FIELDS = {
    "outline": "titles",
    "opened": "title",
    "reused": "runs",
    "rejected": "drafts",
    "ended": "finish",
}
FINISHED = {"stop": "stop", "length": "length", "refused": "length"}
FAILED = {  # ends without an answer: status, message, code
    "failed": (500, "the request failed", "failed"),
    "timeout": (504, "the request's time was up", "timeout"),
    "shutdown": (503, "the server has shut down", "shutting_down"),
    "cancelled": (503, "the request was cancelled", "cancelled"),
    "refused": (400, "the request can never fit", "context_length_exceeded"),
}


@dataclass(slots=True)
class Scores:
    """The scores of a choice's tokens, as rows of `Wrote.scores`. As with text, the rows of a part
    are sent once all parts before it have ended."""

    _rows: dict[int, list[Any]] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _current: int = -1
    _characters: int = 0  # of the tokens already sent

    def add(self, message: Wrote) -> None:
        for row in message.scores:
            self._rows.setdefault(row[0], []).append(row)
        self._ended |= {branch for name, branch, _ in message.events if name == "ended"}

    def more(self) -> list[Any]:
        """The rows that can be sent now."""
        rows = self.of(self._current)
        # Without an outline the first part starts at once.
        while self._current in self._ended or (
            self._current < 0 and (0 in self._rows or 0 in self._ended)
        ):
            self._current += 1
            rows += self.of(self._current)
        return rows

    def of(self, branch: int) -> list[Any]:
        return self._rows.pop(branch, [])

    def rest(self) -> list[Any]:
        return [row for branch in sorted(self._rows) for row in self.of(branch)]

    def shaped(self, rows: Sequence[Any], *, chat: bool) -> dict[str, Any] | None:
        if not rows:
            return None
        if chat:  # `branch`: the part that a token is of, -1 for the outline
            content = [
                {
                    **_scored(text, logprob),
                    "branch": branch,
                    "top_logprobs": [_scored(other, p) for _, other, p in top],
                }
                for branch, _, text, logprob, top in rows
            ]
            return {"content": content}
        _, _, texts, logprobs, tops = zip(*rows, strict=True)
        *offsets, self._characters = accumulate(map(len, texts), initial=self._characters)
        return {
            "tokens": texts,
            "token_logprobs": [None if p is None else max(p, LOWEST) for p in logprobs],
            "top_logprobs": [
                None if p is None else {text: max(q, LOWEST) for _, text, q in top}
                for p, top in zip(logprobs, tops, strict=True)
            ],
            "text_offset": offsets,
        }


def _scored(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(text.encode())}


@dataclass(slots=True)
class Choice:
    """One answer of a request. echoed: the prompt's text, which begins the answer's."""

    index: int
    submit: Submit
    ticket: Ticket
    reader: CallReader
    echoed: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    ended: Ended | None = None
    scores: Scores = field(default_factory=Scores)
    start_time: float = field(default_factory=monotonic)
    last_time: float | None = None

    def readable(self, text: str) -> str:
        """Text of the answer; empty where only the prompt is scored."""
        return "" if self.submit.prompt.max_new_tokens == 0 else text

    def receive(self, message: Message, metrics: ServerMetrics) -> None:
        now = monotonic()
        graph = self.submit.graph
        if isinstance(message, Wrote):
            if new := message.tokens - self.tokens:
                waited = now - (self.last_time or self.start_time)
                metrics.wrote(graph, new, waited, first=self.last_time is None)
                self.last_time = now
                self.tokens = message.tokens
            self.scores.add(message)
        elif isinstance(message, Ended):
            self.ended = message
            metrics.ended(graph, message, now - self.start_time)
            self.ticket.close()


class Answers:
    """All choices of a request; the reply or all its chunks have one id, time and model."""

    def __init__(
        self, fields: ChatRequest | CompletionRequest, model: str, metrics: ServerMetrics
    ) -> None:
        self.choices: list[Choice] = []
        self._fields = fields
        self._metrics = metrics
        self._chat = isinstance(fields, ChatRequest)
        kind = "chat.completion" if self._chat else "text_completion"
        self.envelope = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid4().hex}",
            "object": f"{kind}.chunk" if self._chat and fields.stream else kind,
            "created": int(time()),
            "model": model,
        }

    async def begin(self, router: Router, submits: Sequence[Submit], echoed: Sequence[str]) -> None:
        """Ask for all choices, each after its echoed text; raises ApiError for one refused."""
        try:
            offered = bool(self._fields.offered_tools())
            for index, (submit, text) in enumerate(zip(submits, echoed, strict=True)):
                choice = Choice(index, submit, router.ask(submit), CallReader(offered), echoed=text)
                self.choices.append(choice)
            for choice in self.choices:
                first = await choice.ticket.next()
                if isinstance(first, Refused):
                    blamed = self._fields.form()[0] if first.param == GRAMMAR else first.param
                    raise ApiError(400, first.message, param=blamed, code=first.code)
                assert isinstance(first, Admitted)
                choice.prompt_tokens = first.prompt_tokens
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        for choice in self.choices:
            choice.ticket.close()

    @property
    def _ends(self) -> list[Ended]:
        return [choice.ended for choice in self.choices if choice.ended is not None]

    async def _messages(
        self, client: Request | None = None
    ) -> AsyncGenerator[tuple[Choice, Message], None]:
        """The messages of all choices as they come, until all choices have ended; raises
        WorkerGoneError, StalledError, ApiError once `client` has disconnected."""
        merged: asyncio.Queue[tuple[Choice, Message] | Exception] = asyncio.Queue()

        async def forward(choice: Choice) -> None:
            try:
                message: Message | None = None
                while not isinstance(message, Ended):
                    message = await choice.ticket.next()
                    merged.put_nowait((choice, message))
            except (WorkerGoneError, StalledError) as error:
                merged.put_nowait(error)

        async def until_disconnect(client: Request) -> None:
            while (await client.receive())["type"] != "http.disconnect":
                pass
            merged.put_nowait(ApiError(499, "the client has left"))

        tasks = [asyncio.ensure_future(forward(choice)) for choice in self.choices]
        if client is not None:
            tasks.append(asyncio.ensure_future(until_disconnect(client)))
        try:
            while len(self._ends) < len(self.choices):
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                choice, message = item
                choice.receive(message, self._metrics)
                yield choice, message
        finally:
            for task in tasks:
                task.cancel()

    async def whole(self, request: Request) -> dict[str, Any]:
        """The complete answer; raises WorkerGoneError, ApiError (also when the client leaves)."""
        try:
            async for _ in self._messages(request):
                pass
        finally:
            self._close()
        if error := next(filter(None, map(failure, self._ends)), None):
            raise error
        choices = []
        for choice, ended in zip(self.choices, self._ends, strict=True):
            text = choice.echoed + choice.readable(ended.text)
            reader = choice.reader
            list(reader.feed(text, final=True))  # read to its end; the deltas are not needed
            content = None if reader.calls else reader.content
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if reader.calls:
                message["tool_calls"] = reader.calls
            answer = {"message": message} if self._chat else {"text": text}
            choices.append(self._shape(choice, answer, choice.scores.rest(), ended))
        notes = [end.note for end in self._ends if end.note]
        vendor = {"graph": self.choices[0].submit.graph, "notes": notes}
        return {**self.envelope, "choices": choices, **self._totals(), "specsot": vendor}

    async def streamed(self) -> AsyncIterator[str]:
        """The chunks as server-sent events."""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                yield json.dumps(chunk)
        yield "[DONE]"

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks as they come; the last one may be the body of an error."""
        options = self._fields.stream_options
        try:
            async with aclosing(self._messages()) as messages:
                for choice in self.choices:
                    if self._chat:
                        yield self._chunk(choice, {"role": "assistant", "content": ""})
                    elif choice.echoed:
                        yield self._chunk(choice, {"content": choice.echoed})
                async for choice, message in messages:
                    for chunk in self._chunks(choice, message):
                        yield chunk
            if options is not None and options.include_usage:
                yield {**self.envelope, "choices": [], **self._totals()}
        except ApiError as error:
            yield error.body
        except (WorkerGoneError, StalledError) as error:
            yield engine_gone(str(error)).body
        except Exception:
            yield ApiError(500, "the server failed").body
            raise
        finally:
            self._close()

    def _chunks(self, choice: Choice, message: Message) -> Iterator[dict[str, Any]]:
        if isinstance(message, Ended):
            if error := failure(message):
                raise error
            for delta in choice.reader.feed("", final=True):
                yield self._chunk(choice, delta)
            note = {"note": message.note} if message.note else None
            yield self._chunk(choice, {}, ended=message, vendor=note, rows=choice.scores.rest())
        elif isinstance(message, Wrote) and self._fields.specsot.stream == "multiplexed":
            for event in (*message.events, *message.rejected):
                yield self._event_chunk(choice, message.step, event)
        elif isinstance(message, Wrote):
            events = {"step": message.step, "events": [*message.events, *message.rejected]}
            trace = events if self._fields.specsot.trace else None
            rows = choice.scores.more()
            deltas = [*choice.reader.feed(choice.readable(message.text))]
            if not deltas and (trace or rows):
                deltas = [{"content": ""}]
            for delta in deltas:
                yield self._chunk(choice, delta, vendor=trace, rows=rows)
                trace = None
                rows = []

    def _event_chunk(self, choice: Choice, step: int, event: Sequence[Any]) -> dict[str, Any]:
        """The chunk of an event with its branch; the outline has no content."""
        name, branch, more = event
        vendor: dict[str, Any] = {"branch": branch, "event": name, "step": step}
        if name != "wrote":
            vendor[EVENT_FIELDS[name]] = more
            return self._chunk(choice, {"content": ""}, vendor=vendor)
        text = "".join(piece for piece, _ in more)
        if self._fields.specsot.trace:
            vendor["pieces"] = more
        if branch < 0:
            vendor["text"] = text
            text = ""
        return self._chunk(choice, {"content": text}, vendor=vendor, rows=choice.scores.of(branch))

    def _chunk(
        self,
        choice: Choice,
        delta: Mapping[str, Any],
        *,
        ended: Ended | None = None,
        vendor: Mapping[str, Any] | None = None,
        rows: Sequence[Any] = (),
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        shape = self._shape(choice, content, rows, ended)
        chunk: dict[str, Any] = {**self.envelope, "choices": [shape]}
        if vendor is not None:
            chunk["specsot"] = vendor
        options = self._fields.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self._token_counts(sum(choice.tokens for choice in self.choices))
        return chunk

    def _shape(
        self, choice: Choice, content: Mapping[str, Any], rows: Sequence[Any], ended: Ended | None
    ) -> dict[str, Any]:
        """A choice of the reply, or of a chunk."""
        logprobs = choice.scores.shaped(rows, chat=self._chat)
        shape = {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": None}
        if ended is not None:
            called = ended.finish == "stop" and choice.reader.calls and choice.reader.complete
            shape["finish_reason"] = "tool_calls" if called else FINISHED[ended.finish]
            shape["stop_reason"] = ended.stop
        return shape

    def _token_counts(self, written: int) -> dict[str, Any]:
        """A prompt counts once however many choices it has."""
        prompt = sum(choice.prompt_tokens for choice in self.choices[:: self._fields.n])
        written = 0 if self._fields.max_tokens == 0 else written
        total = prompt + written
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": total}

    def _totals(self) -> dict[str, Any]:
        """Tokens of all choices with outlines, and the drafts of a single one as vLLM has them."""
        ends = self._ends
        usage = Counter[str]()
        for end in ends:
            usage.update(end.usage)
        counts = self._token_counts(usage["answer"] + usage["outline"])
        counts["prompt_tokens_details"] = {
            "cached_tokens": min(usage["cached"], counts["prompt_tokens"])
        }
        counts["completion_tokens_details"] = {"skeleton_tokens": usage["outline"]}
        figures: dict[str, Any] | None = None
        if len(ends) == 1 and any(ends[0].drafted):
            accepted = ends[0].accepted
            drafted = ends[0].drafted
            figures = {
                "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
                "draft_acceptance_rate": sum(accepted) / sum(drafted),
                "acceptance_histogram": [accepted.count(n) for n in range(max(accepted) + 1)],
                "num_spec_steps": len(accepted),
                "num_accepted_draft_tokens": sum(accepted),
                "num_draft_tokens": sum(drafted),
                "num_spec_tokens": max(drafted),
            }
            if self._fields.specsot.trace:
                figures |= {"per_step_accepted": list(accepted), "per_step_drafted": list(drafted)}
        return {"usage": counts, "metrics": {"speculative_decoding": figures}}


def failure(ended: Ended) -> ApiError | None:
    """The error of a choice without an answer; None if it has one."""
    if ended.finish in ("stop", "length") or (ended.finish == "refused" and ended.text):
        return None
    status, reason, code = FAILED[ended.finish]
    return ApiError(status, f"{reason}: {ended.note}" if ended.note else reason, code=code)


class ResponseAnswer:
    """An answer of the chat as OpenAI's Responses API has it; its events carry all so far."""

    def __init__(self, fields: ResponseRequest, answers: Answers) -> None:
        self._answers = answers
        self._item_id = f"msg_{uuid4().hex}"
        self._number = 0  # of the next event
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": answers.envelope["created"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": answers.envelope["model"],
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": fields.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": fields.top_p,
            "usage": None,
        }
        if fields.text is not None:
            self._response["text"] |= fields.text.model_dump(exclude_none=True)

    async def whole(self, request: Request) -> dict[str, Any]:
        """The complete response; raises what `Answers.whole` raises."""
        answer = await self._answers.whole(request)
        (choice,) = answer["choices"]
        return self._ended(choice["message"]["content"], choice["finish_reason"], answer["usage"])

    def _ended(self, text: str, finish: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        status = "incomplete" if finish == "length" else "completed"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self._response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "output": [self._item(status, [_part(text)])],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        return self._response

    def _item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return {**item, "content": parts}

    async def streamed(self) -> AsyncIterator[dict[str, str]]:
        """The response as server-sent events."""
        part = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        scored = {**part, "logprobs": []}
        item = {"output_index": 0, "item": self._item("in_progress", [])}
        yield self._event("created", response=self._response)
        yield self._event("in_progress", response=self._response)
        yield self._event("output_item.added", **item)
        yield self._event("content_part.added", **part, part=_part(""))
        text = ""
        finish = "stop"
        async with aclosing(self._answers.chunks()) as chunks:
            async for chunk in chunks:
                if "error" in chunk:
                    detail = {"code": "server_error", "message": chunk["error"]["message"]}
                    self._response |= {"status": "failed", "error": detail}
                    yield self._event("failed", response=self._response)
                    return
                for choice in chunk["choices"]:
                    finish = choice["finish_reason"] or finish
                    if piece := choice["delta"].get("content"):
                        text += piece
                        yield self._event("output_text.delta", **scored, delta=piece)
                if not chunk["choices"]:
                    self._ended(text, finish, chunk["usage"])
        yield self._event("output_text.done", **scored, text=text)
        yield self._event("content_part.done", **part, part=_part(text))
        (done,) = self._response["output"]
        yield self._event("output_item.done", output_index=0, item=done)
        yield self._event(self._response["status"], response=self._response)

    def _event(self, name: str, **values: Any) -> dict[str, str]:
        kind = f"response.{name}"
        event = {"type": kind, "sequence_number": self._number, **values}
        self._number += 1
        return {"event": kind, "data": json.dumps(event)}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
