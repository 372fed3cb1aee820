"""Builds the prompts of branches, with the documents of their request. The ids of a document depend
on the document alone, so its chunks are the same in every prompt."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .request import Branch, Request
from .text.documents import CHUNK_TOKENS, Document, DocumentSearch, split_ids
from .text.outline import Point
from .text.prompts import PromptBook
from .text.tokens import Chunk, PromptTokens

SEARCH = "Search"  # the tool of an outline's part that is to be answered from what is found


def chunks_of(
    document: Document, prompts: PromptBook, most: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and token ids of a document's chunks of at most ``most`` tokens."""
    parts = split_ids(prompts.document(document.title, document.text), most)
    for number, ids in enumerate(parts, 1):
        yield document.title if len(parts) == 1 else f"{document.title} {number}/{len(parts)}", ids


def search_all(
    points: Sequence[Point], documents: Sequence[Document], limit: int
) -> tuple[tuple[Document, ...], list[tuple[Document, ...]]]:
    """The documents that every part of several is to be answered from, and for each part its own. A
    part with the tool `Search` finds at most ``limit`` by its title, in the request's order."""
    search = DocumentSearch(documents)
    hits = [set(search.find(p.title, limit) if p.tool == SEARCH else ()) for p in points]
    shared = set.intersection(*hits) if len(hits) > 1 else set()
    own = [tuple(documents[i] for i in sorted(one - shared)) for one in hits]
    return tuple(documents[i] for i in sorted(shared)), own


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Builds prompts, with at most `found` documents of a search, in chunks of `most` tokens."""

    prompts: PromptBook
    found: int = 2
    most: int = CHUNK_TOKENS

    def check(self, documents: Iterable[Document]) -> None:
        """Raise PromptError for a text that this tokenizer cannot write into a prompt."""
        for document in documents:
            self.prompts.document(document.title, document.text)

    def in_front(self, documents: Iterable[Document]) -> PromptTokens:
        """Documents before a text: each with the gap behind it."""
        return sum((self._one(d) + self.prompts.gap for d in documents), PromptTokens())

    def behind(self, documents: Iterable[Document]) -> PromptTokens:
        """Documents after a text: each with the gap before it."""
        return sum((self.prompts.gap + self._one(d) for d in documents), PromptTokens())

    def _one(self, document: Document) -> PromptTokens:
        chunks = chunks_of(document, self.prompts, self.most)
        parts = (PromptTokens(ids, (Chunk(0, ids, name),)) for name, ids in chunks)
        return sum(parts, PromptTokens())

    def shared(self, request: Request) -> tuple[PromptTokens, list[tuple[Document, ...]]]:
        """What all branches' prompts begin with, and the documents that each has for itself."""
        assert request.outline is not None
        together, own = search_all(request.outline.points, request.documents, self.found)
        front = (self.in_front if self.prompts.share == "outline" else self.behind)(together)
        return self.prompts.branch(request.outline.points[0], request.outline, (), front)[0], own

    def branch(self, branch: Branch) -> PromptTokens:
        point = branch.point
        request = branch.request
        assert point is not None and request.outline is not None
        done = {b.point.id: b.tokens for b in request.branches if b.point is not None}
        quoted = [(dep, done[dep]) for dep in point.deps]
        own = self.behind(branch.documents)
        return self.prompts.branch(point, request.outline, quoted, own=own)[1]

    def direct(self, request: Request) -> PromptTokens:
        hits = DocumentSearch(request.documents).find(request.question, self.found)
        found = [request.documents[i] for i in sorted(hits)]
        return self.prompts.direct(documents=self.behind(found))
