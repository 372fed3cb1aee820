"""Conversion of request fields to engine messages: a `Submit` for each choice."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....states.text.grammar import ANY_OBJECT
from ...workers.protocol import Submit
from .errors import invalid, unsupported
from .fields import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    SamplingFields,
    Vendor,
)

GREEDY = 1e-5  # temperatures below are 0
MAX_CHARACTERS = 200_000
NOT_HERE = {  # what means something elsewhere; ignoring it would give another answer than asked for
    "tools": "there are no tool calls",
    "functions": "there are no tool calls",
    "function_call": "there are no tool calls",
    "audio": "answers are texts",
    "suffix": "there is no filling in",
    "use_beam_search": "serve the graph `beam`",
    "guided_json": "use response_format",
    "guided_regex": "there are no patterns; response_format takes JSON schemas",
    "guided_grammar": "there are no grammars; response_format takes JSON schemas",
    "guided_choice": "use response_format",
    "structured_outputs": "use response_format",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "chat_template": "templates are not taken from requests",
    "chat_template_kwargs": "templates are not taken from requests",
    "documents": "use specsot.documents",
    "prompt_embeds": "tensors are not taken from requests",
    "logits_processors": "code is not taken from requests",
}
FREE_ONLY = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
UNDER_GRAMMAR = (*FREE_ONLY, "frequency_penalty")


def check_extras(fields: SamplingFields) -> list[str]:
    """Names of ignored fields; raises ApiError for fields that must not be ignored."""
    extras = fields.model_extra or {}
    for name, why in NOT_HERE.items():
        if extras.get(name):
            raise unsupported(name, why)
    if extras.get("tool_choice") not in (None, "none", "auto"):
        raise unsupported("tool_choice", "there are no tool calls")
    if extras.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", "answers are texts")
    return sorted(extras)


def conversation(messages: Sequence[ChatMessage]) -> tuple[str, list[list[str]], str]:
    """(question, past, rules) of a conversation; raises ApiError.

    Turns of one role that follow each other are one turn.
    """
    rules: list[str] = []
    turns: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        text = _content(message, f"messages.{number}.content")
        if message.role in ("system", "developer"):
            rules.append(text)
        elif turns and turns[-1][0] == message.role:
            turns[-1] = (message.role, f"{turns[-1][1]}\n\n{text}")
        else:
            turns.append((message.role, text))
    if not turns or turns[-1][0] != "user":
        raise invalid("messages: the last turn must be a user's", "messages")
    if turns[0][0] != "user":
        raise invalid("messages: the first turn must be a user's", "messages")
    texts = [text for _, text in turns]
    past = [list(pair) for pair in zip(texts[:-1:2], texts[1:-1:2], strict=True)]
    return texts[-1], past, "\n\n".join(rule for rule in rules if rule.strip())


def _content(message: ChatMessage, where: str) -> str:
    if isinstance(message.content, list):
        parts = []
        for part in message.content:
            if part.type != "text" or part.text is None:
                raise invalid(
                    f"{where}: only parts of type text are read, not {part.type[:40]!r}", "messages"
                )
            parts.append(part.text)
        return "".join(parts)
    if message.content is None and message.role != "assistant":
        raise invalid(f"{where}: must be a text", "messages")
    return message.content or ""


def chat_submits(
    fields: ChatRequest, graph: str, ids: Iterator[str], timeout: float
) -> list[Submit]:
    """The choices of a chat request; raises ApiError."""
    question, past, rules = conversation(fields.messages)
    for text in (question, rules, *(part for turn in past for part in turn)):
        check_text(text, "messages")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs: needs logprobs: true", "top_logprobs")
    top = (fields.top_logprobs or 0) if fields.logprobs else -1
    budget = fields.max_completion_tokens or fields.max_tokens
    schema = _schema(fields.response_format, fields)
    common = _common(fields, graph, timeout, top, budget)
    seed = _seed(fields)
    return [
        Submit(
            next(ids),
            question=question,
            past=past,
            rules=rules,
            max_tokens=budget,
            schema=schema,
            seed=seed + choice,
            **common,
        )
        for choice in range(fields.n)
    ]


def completion_submits(
    fields: CompletionRequest, graph: str, ids: Iterator[str], timeout: float
) -> list[Submit]:
    """The choices of every prompt of a completion request; raises ApiError."""
    if fields.best_of not in (None, fields.n):
        raise unsupported("best_of", "every choice is given back; ask for n of them")
    if fields.max_tokens == 0 and not fields.echo:
        raise invalid("max_tokens: 0 gives nothing without echo", "max_tokens")
    top = -1 if fields.logprobs is None else fields.logprobs
    common = _common(fields, graph, timeout, top, fields.max_tokens)
    seed = _seed(fields)
    submits = []
    for prompt in prompts_of(fields.prompt):
        prompt_field: dict[str, Any] = (
            {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        )
        if isinstance(prompt, str):
            check_text(prompt, "prompt", blank=True)
        submits += [
            Submit(
                next(ids),
                max_tokens=fields.max_tokens,
                echo=fields.echo,
                seed=seed + choice,
                **prompt_field,
                **common,
            )
            for choice in range(fields.n)
        ]
    return submits


def prompts_of(prompt: Any) -> list[Any]:
    """Every prompt: a text, or a list of ids."""
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    return list(prompt) if many else [prompt]


def check_text(text: str, param: str, *, blank: bool = False) -> None:
    """Raise ApiError for an empty text or one too long to tokenize."""
    if len(text) > MAX_CHARACTERS:
        raise invalid(
            f"{param}: {len(text)} characters, at most {MAX_CHARACTERS}",
            param,
            "context_length_exceeded",
        )
    if blank and not text:
        raise invalid(f"{param}: must not be empty", param)


def _common(
    fields: SamplingFields, graph: str, timeout: float, top: int, max_tokens: int | None
) -> dict[str, Any]:
    """What all choices of a request have in common."""
    if max_tokens is not None and fields.min_tokens > max_tokens:
        raise invalid(f"min_tokens: {fields.min_tokens}, more than max_tokens", "min_tokens")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options: needs stream: true", "stream_options")
    vendor: Vendor = fields.specsot
    documents = [
        ["", document] if isinstance(document, str) else [document.title, document.text]
        for document in vendor.documents
    ]
    return {
        "graph": graph,
        "sampling": dict(_sampling(fields)),
        "skeleton": vendor.skeleton,
        "stop": fields.stop,
        "stop_ids": fields.stop_token_ids,
        "ignore_eos": fields.ignore_eos,
        "cache_salt": fields.cache_salt or vendor.cache_salt,
        "documents": [[title or str(n), text] for n, (title, text) in enumerate(documents, 1)],
        "timeout": min(t for t in (timeout, vendor.timeout) if t is not None),
        "logprobs": top,
    }


def _sampling(fields: SamplingFields) -> Iterator[tuple[str, Any]]:
    """What a request says of drawing, under the names of `SamplingRules`."""
    if fields.temperature is not None:
        yield "temperature", 0.0 if fields.temperature < GREEDY else fields.temperature
    for name in UNDER_GRAMMAR:
        if (value := getattr(fields, name)) is not None:
            yield name, max(value, 0) if name == "top_k" else value
    if fields.logit_bias:
        yield "logit_bias", sorted([int(k), v] for k, v in fields.logit_bias.items())
    if fields.min_tokens:
        yield "min_new_tokens", fields.min_tokens


def _seed(fields: SamplingFields) -> int:
    return random.getrandbits(62) if fields.seed is None else fields.seed


def _schema(form: ResponseFormat | None, fields: SamplingFields) -> str | None:
    """The schema that a response format asks for, as JSON; raises ApiError."""
    if form is None or form.type == "text":
        return None
    for name in (*UNDER_GRAMMAR, "logit_bias", "min_tokens", "ignore_eos"):
        if getattr(fields, name):
            raise unsupported(name, "not with a response_format, whose tokens a grammar chooses")
    if form.type == "json_object":
        return ANY_OBJECT
    described: Mapping[str, Any] = form.json_schema or {}
    if not isinstance(schema := described.get("schema"), dict):
        raise invalid("response_format.json_schema.schema: must be an object", "response_format")
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise invalid("response_format: no JSON schema", "response_format") from None
