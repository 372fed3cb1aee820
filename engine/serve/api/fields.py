"""Request fields with their limits, and the OpenAPI description of requests."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .errors import ErrorBody, invalid

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 64
MAX_BIASES = 300
MAX_MESSAGES = 1024
MAX_PROMPTS = 32
MAX_TOKENS = 1 << 20
INT64 = 1 << 63


def _whole(value: Any) -> Any:
    """1.0 passes, for there are languages with one kind of number; true and "5" do not."""
    if isinstance(value, bool | str):
        raise ValueError("must be a whole number")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries, at most {MAX_BIASES} are allowed")
    if wrong := next((k for k in value if not (str(k).isascii() and str(k).isdecimal())), None):
        raise ValueError(f"{wrong[:20]!r} is not a token id")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Real, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS, strict=True)]
Stops = Annotated[list[Stop], BeforeValidator(_stops), Field(max_length=MAX_STOPS)]
TokenId = Annotated[Whole, Field(ge=0, lt=1 << 31)]
Biases = Annotated[
    dict[str, Annotated[Real, Field(ge=-100, le=100)]],
    BeforeValidator(_biases),
    Field(max_length=MAX_BIASES),
]
Text = Annotated[str, Field(strict=True)]


class RequestPart(BaseModel):
    """A part of a request; extra fields are ignored and reported."""

    model_config = ConfigDict(extra="allow")


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

    skeleton: Flag = Field(True, description="false: one plain answer, whatever the graph does")
    stream: Literal["ordered", "multiplexed"] = Field(
        "ordered",
        description="ordered: parts in reading order; multiplexed: as they are written, each chunk "
        "says of which part",
    )
    trace: Flag = Field(False, description="chunks say of every token how it came")
    documents: Annotated[list[DocumentField | Text], Field(max_length=256)] = []
    timeout: Annotated[Real, Field(gt=0, le=86_400)] | None = Field(
        None, description="seconds after which it is ended; never more than the server gives"
    )
    cache_salt: Annotated[Text, Field(max_length=256)] = Field(
        "", description="only requests of the same one share what is kept of prompts and answers"
    )


class ResponseFormat(RequestPart):
    """text, json_object, or json_schema with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class SamplingFields(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="allow")

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
    stop: Stops = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=16)] = []
    ignore_eos: Flag = False
    min_tokens: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] = 0
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[Real, Field(gt=0, le=10)] | None = None
    logit_bias: Biases = {}
    stream: Flag = False
    stream_options: StreamOptions | None = None
    user: Text | None = None
    cache_salt: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="as specsot.cache_salt"
    )
    specsot: Vendor = Field(default_factory=lambda: Vendor.model_validate({}))


class ContentPart(RequestPart):
    """Only texts are read."""

    type: Text
    text: Text | None = None


class ChatMessage(RequestPart):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[ContentPart] | None = None


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
        | (Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)])
    )
    max_tokens: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] | None = 16
    echo: Flag = False
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    best_of: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None


class TokenizeRequest(RequestPart):
    """The body of POST /tokenize: a prompt, or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )


class DetokenizeRequest(RequestPart):
    """The body of POST /detokenize."""

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 16)]


def read_json(body: bytes) -> Any:
    """The value of a body; raises ApiError. Of equal keys the last one counts."""
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, endless digits, endless nesting
        what = "too deep" if isinstance(error, RecursionError) else str(error).split("\n")[0][:200]
        raise invalid(f"the body cannot be read: {what}") from None


def read_fields(kind: type[BaseModel], body: bytes) -> Any:
    """Parse a body as one of the requests above; null values count as absent."""
    value = read_json(body)
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    values = {name: entry for name, entry in value.items() if entry is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        loc = [str(part) for part in first["loc"]]
        param = loc[0] if loc else None
        where = ".".join(part for part in loc if part.isidentifier() or part.isdecimal())
        message = first["msg"].removeprefix("Value error, ")
        raise invalid(f"{where[:120] or 'the body'}: {message}", param) from None


COMMON = (400, 401, 403, 405, 408, 431, 500, 503)
OF_BODIES = (404, 413, 415, 429, 504)
STREAMED = {
    "description": "The answer; with `stream` its chunks, and `[DONE]`.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
WORDS = {
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
}


def describe(kind: type[BaseModel] | None) -> dict[str, Any]:
    """Arguments of `add_api_route`; kind: of its body, None without one."""
    statuses = (*COMMON, *(OF_BODIES if kind is not None else (404,)))
    errors: dict[int | str, Any] = {
        status: {"model": ErrorBody, "description": WORDS[status]} for status in sorted(statuses)
    }
    if kind is not None and issubclass(kind, SamplingFields):
        errors[200] = STREAMED
    arguments: dict[str, Any] = {"responses": errors, "response_model": None}
    if kind is not None:
        schema = kind.model_json_schema()
        _inline(schema, schema.pop("$defs", {}))
        content = {"application/json": {"schema": schema}}
        arguments["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return arguments


def _inline(value: Any, definitions: dict[str, Any]) -> None:
    """Replace references with their definitions, none of which is recursive."""
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, dict | list):
            _inline(child, definitions)
    if isinstance(value, dict) and (name := value.pop("$ref", None)):
        definition = dict(definitions[name.rpartition("/")[2]])
        _inline(definition, definitions)
        value.update(definition)
