"""The form that a request wants of an answer: a JSON schema, a pattern, choices, or function calls.

Calls are the JSON list `[{"name":"f","arguments":{}}]`, in prompts, grammars and answers."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from ...states.text.grammar import ANY_OBJECT, GrammarError, calls_grammar
from .fields import RequestPart, Text

MAX_CALLS = 8  # of one answer
HEAD = re.compile(r'[\[,]\{"name":("[^"]*"),"arguments":')  # of a call
DECODER = json.JSONDecoder()
TOOLS_TEXT = """You can call these functions:
{functions}
To call them, answer only with a JSON list: [{{"name":NAME,"arguments":{{}}}}]"""


class ResponseFormat(RequestPart):
    """text, json_object, or json_schema with a schema: in `json_schema` for the chat, next to the
    type for a response."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Function(RequestPart):
    """A function with the JSON schema of its arguments."""

    name: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class Tool(RequestPart):
    """A function that an answer may call."""

    type: Literal["function"]
    function: Function


ToolChoice = Literal["none", "auto", "required"] | Tool


def tools_grammar(tools: Sequence[Tool], choice: ToolChoice, *, several: bool) -> str:
    """The grammar of answers that call tools, or may call them; raises GrammarError."""
    functions = {}
    for tool in tools:
        schema = tool.function.parameters or {**ANY_OBJECT, "properties": {}}
        if schema.get("type", "object") != "object":
            raise GrammarError(f"the parameters of {tool.function.name} must be an object")
        functions[tool.function.name] = schema
    most = MAX_CALLS if several and isinstance(choice, str) else 1
    return calls_grammar(functions, most, free=choice == "auto")


def tools_text(tools: Sequence[Tool]) -> str:
    """The description of tools in a prompt."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    return TOOLS_TEXT.format(functions="\n".join(map(json.dumps, functions)))


class Called(RequestPart):
    """The name of a called function and its arguments, as JSON."""

    name: Text
    arguments: Text = "{}"


class ToolCall(RequestPart):
    """A call in an earlier answer."""

    id: Text = ""
    function: Called


def calls_text(calls: Sequence[ToolCall]) -> str:
    """Calls as a model wrote them."""
    texts = [
        f'{{"name":{json.dumps(call.function.name)},"arguments":{call.function.arguments or "{}"}}}'
        for call in calls
    ]
    return f"[{','.join(texts)}]"


@dataclass(slots=True)
class CallReader:
    """Reads an answer, which may call functions if some were `offered`, as its text arrives.
    content: the text of an answer without calls; calls: as OpenAI has them. complete: the last call
    has all of its arguments."""

    offered: bool = True
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = True
    _text: str = ""
    _start: int = 0  # of the arguments of the last call
    _sent: int = 0

    def feed(self, text: str, *, final: bool = False) -> Iterator[dict[str, Any]]:
        """The deltas of a stream for more text of the answer."""
        self._text += text
        if self.offered and not (self.calls or self.content):
            self._text = self._text.lstrip()
        may_call = self.offered and not self.content
        if may_call and "[{".startswith(self._text[:2]):  # calls, or too short to tell
            yield from self._read_calls()
            if self.calls or not final:
                return
        content = self._text
        self._text = ""
        self.content += content
        if content:
            yield {"content": content}

    def _read_calls(self) -> Iterator[dict[str, Any]]:
        while True:
            if not self.complete:  # the last call's arguments, or their next piece
                end = len(self._text)
                with suppress(ValueError):  # incomplete
                    _, end = DECODER.raw_decode(self._text, self._start)
                    self.complete = True
                if piece := self._text[self._sent : end]:
                    self.calls[-1]["function"]["arguments"] += piece
                    yield self._delta({"function": {"arguments": piece}})
                self._sent = end + self.complete  # after the brace that ends the call
            head = HEAD.match(self._text, self._sent)
            if not self.complete or head is None:
                return
            self._start = self._sent = head.end()
            self.complete = False
            function = {"name": json.loads(head[1]), "arguments": ""}
            call = {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
            self.calls.append(call)
            yield self._delta({**call, "function": dict(function)})

    def _delta(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}
