"""Requests: their fields with limits, a `Submit` for each choice, and errors as OpenAI has them."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse

from ...states.text.documents import Document
from ...states.text.grammar import (
    ANY_OBJECT,
    GrammarError,
    choice_grammar,
    regex_grammar,
    schema_grammar,
)
from ...states.text.prompts import PastTurn
from ..prepare.inputs import Prompt, RequestSettings
from ..workers.protocol import Submit
from .fields import Biases, Flag, Penalty, Real, RequestPart, Stops, Text, TokenId, Whole
from .forms import ResponseFormat, Tool, ToolCall, ToolChoice, calls_text, tools_grammar, tools_text

MAX_CHOICES = 16
MAX_PROMPTS = 32
MAX_TOKENS = 1 << 20
MAX_CHARACTERS = 200_000
INT64 = 1 << 63
LONE = re.compile("[\ud800-\udfff]")  # surrogates that no text can have
UNSUPPORTED = "unsupported_parameter"
GREEDY = 1e-5  # temperatures below are 0
NOT_HERE = {  # what means something elsewhere; ignoring it would give another answer than asked for
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "answers are texts",
    "suffix": "there is no filling in",
    "use_beam_search": "serve the graph `beam`",
    "guided_grammar": "use guided_regex, guided_choice or response_format",
    "guided_json": "use response_format",
    "structured_outputs": "use guided_regex, guided_choice or response_format",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "chat_template": "templates in requests are not supported",
    "chat_template_kwargs": "templates in requests are not supported",
    "documents": "use specsot.documents",
    "prompt_embeds": "tensors in requests are not supported",
    "logits_processors": "code in requests is not supported",
}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
FREE_ONLY = ("top_p", "top_k", "min_p", *PENALTIES)  # settings that a grammar excludes
NEUTRAL = {"top_p": 1, "top_k": -1, "repetition_penalty": 1}  # values that change nothing
RETRY = {"Retry-After": "1"}  # seconds
INVALID = "invalid_request_error"
TYPES = {  # of a status, where it is not INVALID
    401: "authentication_error",
    429: "rate_limit_error",
    499: "client_closed",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
RESPONSE_NAMES = {  # of the chat's fields in a response request
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
}
Ids = Annotated[list[TokenId], Field(min_length=1)]


class ErrorDetail(BaseModel):
    """What is wrong: `param` names the field, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of an error."""

    error: ErrorDetail


@dataclass(eq=False)
class ApiError(Exception):
    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, INVALID)
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return {"error": detail.model_dump()}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def bad_field(param: str, why: str, code: str | None = None) -> ApiError:
    return invalid(f"{param}: {why}", param, code)


def overloaded(message: str, status: int = 503) -> ApiError:
    return ApiError(status, message, code="server_overloaded", headers=RETRY)


def engine_gone(
    message: str = "the engine has ended and is started again", code: str = "engine_dead"
) -> ApiError:
    return ApiError(503, message, code=code, headers=RETRY)


class StreamOptions(RequestPart):
    """include_usage: one more chunk with the usage; continuous_usage_stats: in every chunk."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class DocumentField(RequestPart):
    """A text to answer from."""

    text: Text
    title: Text = ""


class Vendor(BaseModel):
    """Fields of specsot's own."""

    model_config = ConfigDict(extra="forbid")

    skeleton: Flag = Field(True, description="false: one plain answer with any graph")
    stream: Literal["ordered", "multiplexed"] = Field(
        "ordered",
        description="ordered: parts in reading order; multiplexed: as they are generated, "
        "each chunk with its part",
    )
    part_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description="budget of each part of an outlined answer, of the only part of others"
    )
    trace: Flag = Field(False, description="chunks have the origin of every token")
    documents: Annotated[list[DocumentField | Text], Field(max_length=256)] = []
    timeout: Annotated[Real, Field(gt=0, le=86_400)] | None = Field(
        None, description="seconds after which it ends; at most those of the server"
    )
    cache_salt: Annotated[Text, Field(max_length=256)] = Field(
        "", description="only requests with the same salt share cached prompts and answers"
    )


class SamplingFields(RequestPart):
    """What all endpoints take. not_here: fields that are refused, and why."""

    not_here: ClassVar[Mapping[str, str]] = NOT_HERE

    model: Text | None = Field(
        None, max_length=200, description="a served graph; first if left out"
    )
    max_tokens: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[Real, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Real, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=1 << 30)] | None = None
    min_p: Annotated[Real, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-INT64, lt=INT64)] | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=16)] = Field(default_factory=list)
    ignore_eos: Flag = False
    min_tokens: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] = 0
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[Real, Field(gt=0, le=10)] | None = None
    logit_bias: Biases = Field(default_factory=dict)
    stream: Flag = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    response_format: ResponseFormat | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    cache_salt: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="as specsot.cache_salt"
    )
    specsot: Vendor = Field(default_factory=lambda: Vendor.model_validate({}))

    def check_extras(self) -> list[str]:
        """Names of ignored fields; raises ApiError for fields that must not be ignored."""
        extras = self.model_extra or {}
        for name, why in self.not_here.items():
            if extras.get(name):
                raise bad_field(name, why, UNSUPPORTED)
        if extras.get("modalities") not in (None, ["text"]):
            raise bad_field("modalities", "answers are texts", UNSUPPORTED)
        return sorted(extras)

    def drafts(self) -> list[Submit]:
        """For each prompt a `Submit` with what one endpoint alone has; raises ApiError."""
        raise NotImplementedError

    def submits(self, graph: str, new_id: Callable[[], str], timeout: float) -> list[Submit]:
        drafts = self.drafts()
        vendor = self.specsot
        limit = drafts[0].prompt.max_new_tokens
        budgets = [budget for budget in (limit, vendor.part_tokens) if budget is not None]
        if limit is not None and self.min_tokens > limit:
            raise bad_field("min_tokens", f"{self.min_tokens}, more than max_tokens")
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "needs stream: true")
        if self.stream and vendor.stream == "multiplexed" and self.stop:
            raise bad_field("stop", "not with specsot.stream multiplexed")
        documents = tuple(
            Document(str(number), document)
            if isinstance(document, str)
            else Document(document.title or str(number), document.text)
            for number, document in enumerate(vendor.documents, 1)
        )
        seed = random.getrandbits(62) if self.seed is None else self.seed
        shared: Any = {"documents": documents, "cache_salt": self.cache_salt or vendor.cache_salt}
        shared["max_new_tokens"] = min(budgets, default=None)
        settings: Any = {"skeleton": vendor.skeleton, "stop_ids": tuple(self.stop_token_ids)}
        settings |= {"ignore_eos": self.ignore_eos, "answer_tokens": limit}
        name, settings["grammar"] = self.form()
        if name and drafts[0].settings.prefill:
            raise bad_field(name, "not with a last message of the assistant")
        common: Any = {
            "graph": graph,
            "sampling": self._sampling(),
            "stop": self.stop,
            "timeout": min(timeout, vendor.timeout or timeout),
            "trace": vendor.trace,
        }
        return [
            draft._replace(
                prompt=replace(draft.prompt, key=new_id(), seed=seed + choice, **shared),
                settings=replace(draft.settings, **settings),
                **common,
            )
            for draft in drafts
            for choice in range(self.n)
        ]

    def offered_tools(self) -> Sequence[Tool]:
        """The tools that an answer may call; raises ApiError."""
        return ()

    def forms(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """The fields that give the form of the answer, and what makes its grammar."""
        if self.guided_regex is not None:
            yield "guided_regex", partial(regex_grammar, self.guided_regex)
        if self.guided_choice is not None:
            yield "guided_choice", partial(choice_grammar, self.guided_choice)
        if (wanted := self.response_format) is not None and wanted.type != "text":
            given = wanted.json_schema or wanted.model_extra or {}
            schema = ANY_OBJECT if wanted.type == "json_object" else given.get("schema")
            yield "response_format", partial(schema_grammar, schema)

    def form(self) -> tuple[str, str | None]:
        """The field that gives the form of the answer, and its grammar; raises ApiError."""
        forms = [*self.forms()]
        if not forms:
            return "", None
        (name, make), *others = forms
        if others:
            raise bad_field(others[0][0], f"not with {name}")
        if excluded := self.excluded_setting():
            raise bad_field(excluded, f"not with {name}: a grammar chooses the tokens", UNSUPPORTED)
        try:
            return name, make()
        except GrammarError as error:
            raise bad_field(name, str(error), "invalid_schema") from None

    def excluded_setting(self) -> str | None:
        """A given setting that a grammar excludes."""
        for name in (*FREE_ONLY, "logit_bias", "min_tokens", "ignore_eos"):
            if (value := getattr(self, name)) and value != NEUTRAL.get(name):
                return name
        return None

    def _sampling(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("temperature", *FREE_ONLY)}
        rules = {name: value for name, value in values.items() if value is not None}
        if rules.get("temperature", 1.0) < GREEDY:
            rules["temperature"] = 0.0
        if "top_k" in rules:
            rules["top_k"] = max(rules["top_k"], 0)
        if self.logit_bias:
            rules["logit_bias"] = sorted([int(id), add] for id, add in self.logit_bias.items())
        if self.min_tokens:
            rules["min_new_tokens"] = self.min_tokens
        return rules


class ContentPart(RequestPart):
    """Only texts are read."""

    type: Text
    text: Text | None = None


class ChatMessage(RequestPart):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Text | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Flag = True
    continue_final_message: Flag = Field(
        False, description="continue the last message, which is the assistant's"
    )
    add_generation_prompt: Flag = True

    def drafts(self) -> list[Submit]:
        prompt, prefill = conversation(self.messages)
        wanted = self.continue_final_message or not self.add_generation_prompt
        if wanted and self.messages[-1].role != "assistant":
            raise bad_field("messages", "the last message must be the assistant's")
        rules = prompt.rules
        if tools := self.offered_tools():
            rules = "\n\n".join(filter(None, (rules, tools_text(tools))))
            if self.specsot.stream == "multiplexed":
                raise bad_field("specsot", "stream: multiplexed is not available with tools")
        turns = chain.from_iterable((turn.question, turn.answer) for turn in prompt.past)
        for text in (prompt.text, rules, prefill, *turns):
            check_length(text, "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_field("top_logprobs", "needs logprobs: true")
        limit = self.max_completion_tokens or self.max_tokens
        prompt = replace(prompt, rules=rules, max_new_tokens=limit)
        top = (self.top_logprobs or 0) if self.logprobs else -1
        return [Submit("", prompt, RequestSettings(prefill=prefill), logprobs=top)]

    def offered_tools(self) -> Sequence[Tool]:
        if self.tool_choice == "none":
            return ()
        if self.tool_choice == "auto":  # with settings that a grammar excludes, a plain text
            return () if self.excluded_setting() else self.tools
        named = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        tools = [tool for tool in self.tools if named in (None, tool.function.name)]
        if not tools:
            raise bad_field("tool_choice", f"unknown tool {named!r}" if named else "needs tools")
        return tools

    def forms(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield from super().forms()
        if tools := self.offered_tools():
            several = self.parallel_tool_calls
            yield "tools", partial(tools_grammar, tools, self.tool_choice, several=several)


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] | None = 16
    echo: Flag = False
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    best_of: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None

    @property
    def prompts(self) -> list[Any]:
        many = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if many else [self.prompt]

    def drafts(self) -> list[Submit]:
        if self.best_of not in (None, self.n):
            raise bad_field("best_of", "every choice is given back; ask for n of them", UNSUPPORTED)
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "0 gives nothing without echo")
        top = -1 if self.logprobs is None else self.logprobs
        drafts = []
        for prompt in self.prompts:
            if not prompt:
                raise bad_field("prompt", "must not be empty")
            raw = isinstance(prompt, str)
            if raw:
                check_length(prompt, "prompt")
            text = Prompt("", prompt if raw else "", max_new_tokens=self.max_tokens)
            settings = RequestSettings(token_ids=() if raw else tuple(prompt))
            drafts.append(Submit("", text, settings, raw=raw, echo=self.echo, logprobs=top))
        return drafts


class TextOptions(RequestPart):
    """The form of the text."""

    format: ResponseFormat | None = None


class ResponseRequest(SamplingFields):
    """The body of POST /v1/responses."""

    not_here: ClassVar[Mapping[str, str]] = NOT_HERE | dict.fromkeys(
        ("tools", "previous_response_id", "conversation", "prompt", "background"),
        "/v1/responses has only texts and stores nothing",
    )

    input: Text | Messages
    instructions: Text | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[Whole, Field(ge=1, le=1)] = 1
    text: TextOptions | None = None
    metadata: dict[str, Any] | None = None
    store: Flag = Field(False, description="ignored: responses are not stored")

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
        try:
            return ChatRequest.model_validate(values)
        except ValidationError as error:
            raise first_error(error.errors(include_url=False, include_input=False)) from None


class TokenizeRequest(RequestPart):
    """The body of POST /tokenize: a prompt, or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None


class DetokenizeRequest(RequestPart):
    """The body of POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 16)]


def conversation(messages: Sequence[ChatMessage]) -> tuple[Prompt, str]:
    """The prompt of messages, in which turns of one role that follow each other are one turn, and
    results of tools are a user's; and the beginning of the answer. Raises ApiError."""
    rules: list[str] = []
    turns: list[tuple[str, str]] = []
    names: dict[str, str] = {}  # of called functions
    for number, message in enumerate(messages):
        role = message.role
        text = _content(message, f"messages.{number}.content")
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            text = "\n\n".join(filter(None, (text, calls_text(message.tool_calls))))
        if role == "tool":
            role = "user"
            text = f"Result of {names.get(message.tool_call_id or '', 'the call')}: {text}"
        if role in ("system", "developer"):
            rules.append(text)
        elif turns and turns[-1][0] == role:
            turns[-1] = (role, f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append((role, text))
    prefill = ""
    if messages[-1].role == "assistant" and not messages[-1].tool_calls:
        prefill = turns.pop()[1]
    for place, index in (("last", -1), ("first", 0)):
        if not turns or turns[index][0] != "user":
            raise bad_field("messages", f"the {place} turn must be a user's")
    texts = [text for _, text in turns]
    past = tuple(map(PastTurn, texts[:-1:2], texts[1:-1:2]))
    text = "\n\n".join(rule for rule in rules if rule.strip())
    return Prompt("", texts[-1], past=past, rules=text), prefill


def _content(message: ChatMessage, where: str) -> str:
    if message.content is None and message.role != "assistant":
        raise invalid(f"{where}: must be a text", "messages")
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            kind = part.type[:40]
            raise invalid(f"{where}: only parts of type text are read, not {kind!r}", "messages")
    return "".join(part.text or "" for part in message.content)


def check_length(text: str, param: str) -> None:
    if len(text) > MAX_CHARACTERS:
        limit = f"Expected a string with maximum length {MAX_CHARACTERS}"  # OpenAI's words
        why = f"string too long. {limit}, but got a string with length {len(text)} instead."
        raise bad_field(param, why, "context_length_exceeded")


Fields = TypeVar("Fields", bound=BaseModel)


def without_nulls(body: Any) -> Any:
    """A body's fields, of which null ones count as absent; raises ApiError."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    for name, content in body.items():
        if LONE.search(json.dumps([name, content], ensure_ascii=False)):
            where = None if LONE.search(name) else name
            raise invalid(f"{where or 'a name'}: a lone surrogate is not valid Unicode", where)
    return {name: value for name, value in body.items() if value is not None}


Body = Annotated[Fields, BeforeValidator(without_nulls)]


def first_error(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors of a request's fields, or of FastAPI's of a body."""
    first = errors[0]
    if first["type"] == "json_invalid":
        why = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return invalid(f"the body is not JSON: {why}")
    if first["loc"] == ("body",):  # it is empty, or null
        return invalid("the body must be a JSON object")
    loc = [str(part) for part in first["loc"]]
    if loc[:1] == ["body"]:
        loc = loc[1:]
    where = ".".join(part for part in loc if part.isidentifier() or part.isdecimal())
    message = first["msg"].removeprefix("Value error, ")
    return invalid(f"{where[:120] or 'the body'}: {message}", loc[0] if loc else None)
