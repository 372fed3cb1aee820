"""Prompts, documents and conversations, and the settings of each request."""

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field

from ...ops.sampling.settings import SamplingRules
from ...states.request import MigratedRequest
from ...states.text.documents import Document, check_document
from ...states.text.prompts import PastTurn
from ...states.text.tokens import PromptError, check_question, check_unicode
from ...states.yaml.spec import Int
from ..errors import UsageError

MAX_BYTES = 64 << 20  # of a file
TEXT_KEYS = ("prompt", "question", "turns", "task")
ID_KEYS = ("id", "question_id", "task_id")
PROMPT_KEYS = {
    *(*TEXT_KEYS, *ID_KEYS),
    *("seed", "max_new_tokens", "documents", "cache_salt", "category"),
}
FOR_ALL = {  # what others' files say of a prompt's decoding, and what says it here
    "max_tokens": "'max_new_tokens' is the name here",
    "max_completion_tokens": "'max_new_tokens' is the name here",
    **{
        name: f"--set sampling.{name}=... sets it for all prompts"
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias")
    },
    "stop_token_ids": "--stop-id sets it for all prompts",
}
OTHERS = (".csv", ".tsv", ".json", ".yaml", ".yml", ".xml", ".parquet", ".xlsx", ".docx", ".pdf")
PACKED = ".gz"
MAX_ID = 200
MAX_NAMED = 8  # of keys in a note
MAX_DOCUMENTS = 10_000  # of one file, or of one prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question; without `seed`, its seed is derived from the run's seed and `key`. documents:
    the context of the question, in prompt order. cache_salt: prompts share cached KV rows only with
    prompts of the same salt. category: of a benchmark's question. past: earlier turns of the
    conversation. rules: the system message. A run.yaml has these fields under the names of a
    prompts file."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    key: Annotated[str, Field(alias="id")]
    text: Annotated[str, Field(alias="prompt")]
    seed: Int | None = None
    max_new_tokens: Int | None = None
    documents: tuple[Document, ...] = ()
    cache_salt: str = ""
    category: str = ""
    past: tuple[PastTurn, ...] = ()
    rules: str = ""


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings of one request; the defaults leave everything to the graph.

    token_ids: the whole prompt, without a template or an outline. skeleton: False for one plain
    answer, whatever the graph does. stop_ids: more ids that end an answer. ignore_eos: none ends it
    but these; an outline ends all the same. answer_tokens: budget of the whole answer: of an
    outline, which takes at most half of it, and of all parts together; `Prompt.max_new_tokens` is
    the budget of each of them. grammar: of a plain answer, as `states.text.grammar` makes them.
    prefill: the beginning of a plain answer, which is continued. contexts: events report the
    context of each branch. handed: the part of a migrated request that this engine decodes.
    resumed: tokens that another engine wrote, by branch index; -1 is the outline."""

    sampling: SamplingRules | None = None
    token_ids: tuple[int, ...] = ()
    skeleton: bool = True
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    answer_tokens: int | None = None
    grammar: str | None = None
    prefill: str = ""
    contexts: bool = False
    handed: MigratedRequest | None = None
    resumed: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the request never has an outline."""
        no_room = self.answer_tokens is not None and self.answer_tokens < 2
        return bool(self.token_ids or self.grammar or self.prefill) or not self.skeleton or no_room


AS_THE_GRAPH = RequestSettings()


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a run, and what a reader of the file should know about them."""

    items: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()


def read_prompts(prompt: str | None, file: Path | None, default: str) -> Prompts:
    """The prompts that the command line asks for; `-` reads one prompt from standard input. Raises
    UsageError, PromptError: with the file and the line where there is one."""
    if prompt is not None and file is not None:
        raise UsageError("give either a PROMPT or --prompts FILE, not both")
    if file is not None:
        return read_file(file)
    if prompt == "-":
        prompt = _decoded(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input").strip("\n")
    text = default if prompt is None else prompt
    check_question(text)
    return Prompts((Prompt("1", text),))


def read_file(file: Path, check: Callable[[dict[str, Any]], None] = lambda fields: None) -> Prompts:
    """One prompt per line: plain text, or JSON objects if the name ends in .jsonl. The keys of
    plain lines are their line numbers; an object has its own `id`, or else its line number too.
    check: raises UsageError for an object."""
    if file.suffix.lower() in OTHERS:
        raise UsageError(f"{file}: prompts are read from text, one per line, or from .jsonl")
    lines = numbered_lines(read_text(file))
    if not lines:
        raise UsageError(f"{file}: no prompts in it")
    prompts: list[Prompt] = []
    numbers: dict[str, int] = {}
    notes: list[str] = []
    unused: set[str] = set()
    for number, line in lines:
        place = f"{file}:{number}"
        plain = ("prompt", {"prompt": line.strip()})
        name, fields = json_object(line, place, TEXT_KEYS) if is_jsonl(file) else plain
        with _at(place):
            check(fields)
            prompt = _prompt(fields, name, number)
            if (same := numbers.setdefault(prompt.key, number)) != number:
                raise UsageError(f"id {prompt.key!r} is that of line {same} too")
            check_question(prompt.text)
        prompts.append(prompt)
        unused |= fields.keys() - PROMPT_KEYS
        if (turns := fields.get("turns")) and len(turns) > 1 and prompt.text == turns[0]:
            notes.append(f"{place}: only the first of {len(turns)} turns is used")
    if unused:
        notes.append(f"{file}: not used: {', '.join(sorted(unused)[:MAX_NAMED])}")
    return Prompts(tuple(prompts), tuple(notes))


def json_object(line: str, place: str, keys: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The one of ``keys`` that a JSONL line's object has, and the object; raises UsageError."""
    value = _json_value(line, place)
    if not isinstance(value, dict):
        raise UsageError(f"{place}: a line is a JSON object with a key {' or '.join(keys)}")
    names = [key for key in keys if value.get(key) is not None]
    if len(names) != 1:
        which = f"has {' and '.join(names)}" if names else "has none"
        raise UsageError(f"{place}: needs one of {', '.join(keys)}; it {which}")
    return names[0], value


def _prompt(value: Mapping[str, Any], name: str, number: int) -> Prompt:
    """The prompt of one object, whose text is under this name; of several turns the first."""
    for other in FOR_ALL.keys() & value.keys():
        raise UsageError(f"{other!r} cannot be set for one prompt: {FOR_ALL[other]}")
    text = value[name]
    if isinstance(text, list) and text and name == "turns":
        text = text[0]
    salt = value.get("cache_salt") or ""
    category = value.get("category") or ""
    for field_name, content in ((name, text), ("cache_salt", salt), ("category", category)):
        if not isinstance(content, str):
            raise UsageError(f"{field_name!r} must be a text")
    check_unicode(salt, "cache_salt")
    key = next((value[k] for k in ID_KEYS if value.get(k) is not None), number)
    if isinstance(key, bool) or not isinstance(key, str | int) or not str(key).strip():
        raise UsageError("'id' must be a text or a number")
    if len(str(key)) > MAX_ID or not str(key).isprintable():
        raise UsageError(f"'id' must be at most {MAX_ID} printable characters")
    seed = value.get("seed")
    budget = value.get("max_new_tokens")
    for field_name, count, least in (("seed", seed, 0), ("max_new_tokens", budget, 1)):
        is_number = isinstance(count, int) and not isinstance(count, bool)
        if count is not None and not (is_number and least <= count < 1 << 63):
            raise UsageError(f"{field_name!r} must be a whole number from {least} on")
    documents = value.get("documents")
    if documents is not None and not isinstance(documents, list):
        raise UsageError("'documents' must be a list")
    _check_number(documents or ())
    own = []
    for n, document in enumerate(documents or (), 1):
        with _at(f"document {n}"):
            own.append(_document(document, n))
    return Prompt(
        str(key),
        text,
        seed,
        budget,
        documents=tuple(own),
        cache_salt=salt,
        category=category,
    )


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Give the place of what a prompt or a document cannot hold."""
    try:
        yield
    except (PromptError, UsageError) as error:
        raise type(error)(f"{place}: {error}") from None


# -- documents ------------------------------------------------------------------------------------


def read_documents(files: Iterable[Path]) -> tuple[Document, ...]:
    """The documents of all files, each once, in the order given. A file is one document, titled by
    its name, in UTF-8; one whose name ends in .jsonl holds many, a line each: its text, or an
    object with `text` and perhaps `title`. Raises UsageError, PromptError: with the file, and the
    line where there is one."""
    return tuple(dict.fromkeys(document for file in files for document in _documents(file)))


def _documents(file: Path) -> Iterator[Document]:
    text = read_text(file).replace("\r\n", "\n")
    if not is_jsonl(file):
        name = file.name if file.name.isprintable() else file.name.encode("unicode_escape").decode()
        with _at(str(file)):
            yield _document({"title": name, "text": text.strip("\n")}, 1)
        return
    lines = numbered_lines(text)
    with _at(str(file)):
        if not lines:
            raise UsageError("no documents in it")
        _check_number(lines)
    for at, (number, line) in enumerate(lines, 1):
        place = f"{file}:{number}"
        value = _json_value(line, place)
        with _at(place):
            yield _document(value, at)


def _check_number(documents: Sequence[Any]) -> None:
    if len(documents) > MAX_DOCUMENTS:
        raise UsageError(f"{len(documents)} documents, at most {MAX_DOCUMENTS}")


def _document(value: Any, number: int) -> Document:
    """A document from JSON, by default titled by its number."""
    fields = {"text": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise UsageError("a document is a text, or an object with 'text' and 'title'")
    if unknown := sorted(fields.keys() - {"text", "title"}):
        raise UsageError(f"a document has no {unknown[0]!r}, only 'text' and 'title'")
    title = fields.get("title")
    if title is not None and not isinstance(title, str):
        raise UsageError("'title' must be a text")
    document = Document(str(number) if title is None else title, fields["text"])
    check_document(document)
    return document


# -- files ----------------------------------------------------------------------------------------


def read_text(file: Path, most: int | None = MAX_BYTES) -> str:
    """A file's text, unpacked if its name ends in .gz, without a byte-order mark, of `most` bytes
    or fewer; raises UsageError, with the line where there is one."""
    try:
        with gzip.open(file) if file.suffix == PACKED else file.open("rb") as stream:
            data = stream.read(None if most is None else most + 1)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{file}: cannot be read: {reason}") from None
    return _decoded(data, str(file), most)


def _decoded(data: bytes, name: str, most: int | None = MAX_BYTES) -> str:
    if most is not None and len(data) > most:
        raise UsageError(f"{name}: more than {most} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{line}: not UTF-8") from None


def is_jsonl(file: Path) -> bool:
    return file.name.lower().removesuffix(PACKED).endswith((".jsonl", ".ndjson"))


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    return [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]


def _json_value(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}:{error.colno}: {error.msg}") from None
    except (RecursionError, ValueError):
        raise UsageError(f"{place}: no JSON that can be read") from None


class Fit(NamedTuple):
    """Tokens of a prompt, the most of a plain answer to it, and why they can never fit, else empty.
    answer: requested tokens, with the outline. longest: prompt and answer that fit."""

    prompt: int
    remaining: int
    why: str
    answer: int
    longest: int
