"""Documents beside the prompts: text files, JSONL files of many, the field of a prompt's line."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from ...states.text.documents import Document, check_document
from ...states.text.encoder import PromptError
from ..errors import UsageError
from .texts import is_jsonl, json_value, lines_of, read_text

MANY = 10_000  # documents of one file, or of one prompt
FIELDS = ("title", "text")


def read_documents(files: Iterable[Path]) -> tuple[Document, ...]:
    """The documents of all files, each once, in the order given.

    A file is one document, titled by its name, in UTF-8; one whose name ends in .jsonl holds many,
    a line each (`document_of` says what a line may be).

    Raises:
        UsageError, PromptError: with the file, and the line where there is one.
    """
    return tuple(dict.fromkeys(document for file in files for document in _documents(file)))


def _documents(file: Path) -> Iterator[Document]:
    text = read_text(file).replace("\r\n", "\n")
    if not is_jsonl(file):
        name = file.name if file.name.isprintable() else file.name.encode("unicode_escape").decode()
        yield _checked(Document(name, text.strip("\n")), str(file))
        return
    lines = lines_of(text)
    if not lines:
        raise UsageError(f"{file}: no documents in it")
    _check_number(lines, str(file))
    for at, (number, line) in enumerate(lines, 1):
        place = f"{file}:{number}"
        yield document_of(json_value(line, place), at, place)


def documents_of(value: Mapping[str, Any], place: str) -> tuple[Document, ...]:
    """The field `documents` of a prompt's line: a list of what `document_of` takes."""
    documents = value.get("documents")
    if documents is None:
        return ()
    if not isinstance(documents, list):
        raise UsageError(f"{place}: 'documents' must be a list")
    _check_number(documents, place)
    numbers = enumerate(documents, 1)
    return tuple(document_of(one, n, f"{place}: document {n}") for n, one in numbers)


def _check_number(documents: Sized, place: str) -> None:
    if len(documents) > MANY:
        raise UsageError(f"{place}: {len(documents)} documents, at most {MANY}")


def document_of(value: Any, number: int, place: str) -> Document:
    """A document from JSON: its text, or an object with `text` and perhaps `title`.

    Without a title it is called by its ``number``.

    Raises:
        UsageError, PromptError: it is neither, or its text cannot stand in a prompt.
    """
    fields = {"text": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise UsageError(f"{place}: a document is a text, or an object with 'text' and 'title'")
    if unknown := sorted(set(fields) - set(FIELDS)):
        raise UsageError(f"{place}: a document has no {unknown[0]!r}, only 'text' and 'title'")
    title = fields.get("title")
    if title is not None and not isinstance(title, str):
        raise UsageError(f"{place}: 'title' must be a text")
    return _checked(Document(str(number) if title is None else title, fields["text"]), place)


def _checked(document: Document, place: str) -> Document:
    try:
        check_document(document)
    except PromptError as error:
        raise PromptError(f"{place}: {error}") from None
    return document
