"""OpenAI's Responses API: a text answer of the chat, in the shape of a response, and its events."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field
from starlette.requests import Request

from .answers import Answers
from .fields import Flag, RequestPart, Text, Whole
from .forms import ResponseFormat
from .requests import (
    MAX_TOKENS,
    UNSUPPORTED,
    ApiError,
    ChatRequest,
    Messages,
    SamplingFields,
    bad_field,
    validated,
)

NOT_HERE = ("tools", "previous_response_id", "conversation", "prompt", "background")
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


class TextOptions(RequestPart):
    """The form of the text."""

    format: ResponseFormat | None = None


class ResponseRequest(SamplingFields):
    """The body of POST /v1/responses."""

    input: Text | Messages
    instructions: Text | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[Whole, Field(ge=1, le=1)] = 1
    text: TextOptions | None = None
    metadata: dict[str, Any] | None = None
    store: Flag = Field(False, description="ignored: responses are not stored")

    def check_extras(self) -> list[str]:
        for name in NOT_HERE:
            if (self.model_extra or {}).get(name):
                raise bad_field(
                    name, "/v1/responses has only texts and stores nothing", UNSUPPORTED
                )
        return super().check_extras()

    def chat(self) -> ChatRequest:
        """The same request to the chat; raises ApiError."""
        others = {"response_format", "stream_options", "max_tokens"}
        shared = {*SamplingFields.model_fields} - others
        values = self.model_dump(include=shared, exclude_unset=True)
        said = self.input
        turns: list[Any] = [{"role": "user", "content": said}] if isinstance(said, str) else [*said]
        if self.instructions:
            turns.insert(0, {"role": "system", "content": self.instructions})
        values["messages"] = turns
        if self.text is not None and self.text.format is not None:
            values["response_format"] = self.text.format
        if self.max_output_tokens is not None:
            values["max_tokens"] = self.max_output_tokens
        if self.stream:
            values["stream_options"] = {"include_usage": True}
        return validated(ChatRequest, values)


def renamed(error: ApiError) -> ApiError:
    """An error of the chat that blames the field of a response request."""
    detail = error.body["error"]
    detail["param"] = NAMES.get(detail["param"], detail["param"])
    return error


class ResponseAnswer:
    """One response; the events of its stream carry it as far as it has come."""

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
        item = {"id": self._item_id, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": parts}

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
