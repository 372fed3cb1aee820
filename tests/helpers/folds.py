"""Runs whose finished parts are combined: prompts as ids, and what a fold must consist of."""

from collections.abc import Sequence
from typing import Any

from helpers.reading import DocumentBook
from helpers.reading import session as reading
from helpers.support import Graphs, Halves, Tiny
from specsot.engine.models import Models
from specsot.engine.run.session import Session
from specsot.states.request import COMPLETE, Branch, Request
from specsot.states.text.outline import Outline, Point
from specsot.states.text.prompts import NOTHING
from specsot.states.text.tokens import PromptTokens

GRAPH = "bim_blend_merge"
REUSED = ("blend.ratios=[0.3]",)
SMALL = ("layout.kv_slots=2000", "skeleton.direct_tokens=13", "skeleton.max_tokens=20")


class FoldBook(DocumentBook):
    """What follows a part begins otherwise than what follows the prefix."""

    def branch(self, *given: Any, own: PromptTokens = NOTHING) -> Halves:
        hoist, rest = super().branch(*given)
        return hoist, PromptTokens((rest.ids[0],)) + own + rest[1:]

    def next_part(self, point: Point, outline: Outline) -> Halves:
        return PromptTokens((11, 12, 13)), self.branch(point, outline, ())[1]

    def combine(self) -> PromptTokens:
        return PromptTokens((14, 15, 16, 17))


class FrontBook(FoldBook):
    """A branch's documents stand before everything else of its prompt."""

    def branch(self, *given: Any, own: PromptTokens = NOTHING) -> Halves:
        hoist, rest = super().branch(*given)
        return hoist, own + rest


class OtherBook(FoldBook):
    """And what it says differs in the middle."""

    def next_part(self, point: Point, outline: Outline) -> Halves:
        before, own = super().next_part(point, outline)
        return before, PromptTokens((*own[: len(own) // 2], 18, 19, *own[len(own) // 2 :]))


def book_of(made: Tiny, share: str = "outline", stop_ids: Sequence[int] = ()) -> FoldBook:
    return FoldBook(made.models.target.vocab_size, share, stop_ids)


def session(
    graphs: Graphs,
    made: Tiny,
    *sets: str,
    outline: Outline,
    book: Any = None,
    models: Models | None = None,
    budget: int = 14,
    graph: str = GRAPH,
) -> Session:
    """A session on the shipped graph that combines, with a small pool."""
    book = book or book_of(made)
    more: Any = {"models": models, "outline": outline, "budget": budget, "book": book}
    return reading(graphs, made, graph, *SMALL, *sets, share=book.share, **more)


def combined_of(request: Request) -> Branch:
    """The branch that combines a request's parts: the last one, and the only one."""
    found = [branch for branch in request.branches if branch.combines]
    assert found == request.branches[-1:], "the parts are combined last, once"
    return found[0]


def fold_of(request: Request, book: Any) -> list[int]:
    """What must stand behind the prefix: finished parts in reading order, and the question."""
    assert request.outline is not None
    found: list[int] = []
    for branch in request.branches:
        if branch.point is None or branch.finish not in COMPLETE:
            continue
        before, own = book.next_part(branch.point, request.outline)
        if not found:
            before, own = NOTHING, book.branch(branch.point, request.outline, ())[1]
        found += [*before, *own, *branch.tokens]
    return [*found, *book.combine()]
