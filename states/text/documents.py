"""Documents that a request brings: validity, chunks, and a search in them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .tokens import PromptError, check_question

MAX_TITLE = 200
WORD = re.compile(r"\w+")
K1 = 1.5
B = 0.75
CHUNK_TOKENS = 512  # maximum tokens of a chunk; another value gives other chunks in a cache


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a title; two with the same title and text are the same document."""

    title: str
    text: str


def check_document(document: Document) -> None:
    """Raise PromptError as `check_question`, or for a blank, long or unprintable title."""
    check_question(document.text, "document")
    title = document.title
    if not title.strip() or len(title) > MAX_TITLE or not title.isprintable():
        limit = f"1 to {MAX_TITLE} printable characters"
        raise PromptError(f"the title of the document must be {limit}, it is {title[:80]!r}")


def split_ids(token_ids: Sequence[int], most: int) -> tuple[tuple[int, ...], ...]:
    """Token ids cut into as few chunks as possible, the same in every prompt, of even lengths up to
    ``most``: the first rows of a chunk are the least exact."""
    if most < 1:
        raise ValueError(f"chunks of at most {most} tokens")
    count = -(-len(token_ids) // most)
    cuts = [len(token_ids) * i // count for i in range(count + 1)] if count else []
    return tuple(tuple(token_ids[begin:end]) for begin, end in pairwise(cuts))


class DocumentSearch:
    """The tool `Search`: BM25 in Lucene's form (bm25s, arXiv 2407.03618) over titles and texts. A
    word is a run of letters, digits and underscores, in folded case; no stop words, no stems."""

    def __init__(self, documents: Sequence[Document]) -> None:
        words = [WORD.findall(f"{one.title}\n{one.text}".casefold()) for one in documents]
        self._index = None
        if any(words):
            # Imported here, because it takes 0.1 s and few runs search.
            import bm25s  # type: ignore[import-untyped]

            self._index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
            self._index.index(words, show_progress=False)

    def find(self, query: str, limit: int) -> dict[int, float]:
        """By index the scores of documents with words of the query; equal ones keep their order."""
        words = WORD.findall(query.casefold())
        if self._index is None or not words:
            return {}
        scores = self._index.get_scores(words)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: max(limit, 0)]
        return {i: float(scores[i]) for i in order if scores[i] > 0}
