"""What OpenAPI says of the routes: the bodies they take, and every error that they can give."""

from typing import Any

from pydantic import BaseModel

from .fields import SamplingFields
from .problems import ErrorBody

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
        one: {"model": ErrorBody, "description": WORDS[one]} for one in sorted(statuses)
    }
    if kind is not None and issubclass(kind, SamplingFields):
        errors[200] = STREAMED
    told: dict[str, Any] = {"responses": errors, "response_model": None}
    if kind is not None:
        schema = kind.model_json_schema()
        _inline(schema, schema.pop("$defs", {}))
        content = {"application/json": {"schema": schema}}
        told["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return told


def _inline(value: Any, definitions: dict[str, Any]) -> None:
    """Put definitions where they are named; none of ours names itself."""
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            _inline(one, definitions)
    if isinstance(value, dict) and (name := value.pop("$ref", None)):
        found = dict(definitions[name.rpartition("/")[2]])
        _inline(found, definitions)
        value.update(found)
