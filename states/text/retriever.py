"""The tool `Search`: documents ranked by BM25 over their words. Nothing leaves the machine."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .documents import Document

WORD = re.compile(r"\w+")
K1, B = 1.5, 0.75


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found: its index among those searched, and its score above 0."""

    index: int
    score: float
    document: Document


class DocumentSearch:
    """Ranks documents by BM25 in Lucene's form (bm25s, arXiv 2407.03618) with k1 1.5 and b 0.75.

    A word is a run of letters, digits and underscores (Unicode), in folded case; there are no stop
    words and no stems, so nothing depends on a language. Titles are searched as well. A word that
    a query repeats counts once for each time.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)
        words = [words_of(f"{one.title}\n{one.text}") for one in self.documents]
        self._index = None
        if any(words):
            # Here and not above: only runs that search pay for it (0.1 s).
            import bm25s  # type: ignore[import-untyped]

            self._index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
            self._index.index(words, show_progress=False)

    def find(self, query: str, limit: int) -> tuple[Hit, ...]:
        """At most ``limit`` documents that share a word with the query, best first.

        Equal scores keep the order in which the documents were given.
        """
        scores = self._scores(words_of(query))
        order = np.argsort(-scores, kind="stable")[: max(limit, 0)]
        return tuple(
            Hit(int(i), float(scores[i]), self.documents[i]) for i in order if scores[i] > 0
        )

    def _scores(self, words: list[str]) -> npt.NDArray[np.float32]:
        if self._index is None or not words:
            return np.zeros(len(self.documents), np.float32)
        return np.asarray(self._index.get_scores(words), np.float32)


def words_of(text: str) -> list[str]:
    """The words of a text, in order."""
    return WORD.findall(text.casefold())
