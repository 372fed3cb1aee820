"""Documents in prompts: as chunks of token ids, and which branch gets which of them.

The ids of a document depend on the document alone, so that it has the same chunks wherever it
stands. They are joined with what stands around them as ids, never as text.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from ..text.documents import Document, DocumentSearch, split_ids
from ..text.outline import Point
from ..text.prompt_tokens import PromptTokens

SEARCH = "Search"  # the tool of an outline's part that is to be answered from what is found


class Writer(Protocol):
    """What is used of a `PromptBook`."""

    @property
    def gap(self) -> PromptTokens: ...
    def document(self, title: str, text: str) -> list[int]: ...


def chunks_of(
    document: Document, prompts: Writer, most: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and token ids of a document's chunks of at most ``most`` tokens."""
    parts = split_ids(prompts.document(document.title, document.text), most)
    for number, ids in enumerate(parts, 1):
        yield document.title if len(parts) == 1 else f"{document.title} {number}/{len(parts)}", ids


def in_front(documents: Iterable[Document], prompts: Writer, most: int) -> PromptTokens:
    """Documents before a text: each with the gap behind it."""
    written = PromptTokens()
    for document in documents:
        written += _one(document, prompts, most) + prompts.gap
    return written


def behind(documents: Iterable[Document], prompts: Writer, most: int) -> PromptTokens:
    """Documents after a text: each with the gap before it."""
    written = PromptTokens()
    for document in documents:
        written = written + prompts.gap + _one(document, prompts, most)
    return written


def _one(document: Document, prompts: Writer, most: int) -> PromptTokens:
    written = PromptTokens()
    for name, ids in chunks_of(document, prompts, most):
        written += PromptTokens.chunk(ids, name)
    return written


def search_all(
    points: Sequence[Point], documents: Sequence[Document], limit: int
) -> tuple[tuple[Document, ...], list[tuple[Document, ...]]]:
    """What the parts of an outline are to be answered from.

    A part with the tool `Search` gets the documents that its title finds, at most ``limit``, in the
    order in which the request has them. What every part of several gets is shared.

    Returns:
        The shared documents, and for each part its own.
    """
    search = DocumentSearch(documents)
    found = [
        {hit.index for hit in search.find(point.title, limit)} if point.tool == SEARCH else set()
        for point in points
    ]
    shared = set.intersection(*found) if len(found) > 1 else set()
    own = [tuple(documents[i] for i in sorted(one - shared)) for one in found]
    return tuple(documents[i] for i in sorted(shared)), own


def search_question(
    question: str, documents: Sequence[Document], limit: int
) -> tuple[Document, ...]:
    """What an answer without an outline is to be given from, in the request's order."""
    hits = DocumentSearch(documents).find(question, limit)
    return tuple(documents[i] for i in sorted(hit.index for hit in hits))
