"""Runs over documents with tiny models: prompts as ids, graphs with and without `blend`."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

from helpers.support import TREES, Graphs, Halves, Tiny, TokenBook, drive, start
from specsot.engine.chunks.store import ChunkStore
from specsot.engine.models import Models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.states.machine import OpRan
from specsot.states.round import BlendSummary, RoundSummary
from specsot.states.text.documents import Document
from specsot.states.text.outline import Outline, Point
from specsot.states.text.prompts import NOTHING
from specsot.states.text.tokens import PromptTokens

BLENDED = ("blend_eagle", "bim_blend_eagle")
TWINS = {"blend_eagle": "eagle", "bim_blend_eagle": "bim_eagle"}
WORDS = ("bees", "rain", "tea", "iron", "ferns", "chess", "salt", "moss")
DOCUMENTS = tuple(Document(word, f"all about {word} and everything") for word in WORDS)
# The session has its own budget.
SMALL = ("layout.kv_slots=3000", "limits.max_new_tokens=1", *TREES)


class DocumentBook(TokenBook):
    """Prompts with documents: ids drawn from their texts, 30 to 50 of each."""

    gap = PromptTokens((7,))

    def document(self, title: str, text: str) -> list[int]:
        return self.ids(f"document {title} {text}", 30, 50)

    def plain(self, question: str, documents: PromptTokens = NOTHING) -> PromptTokens:
        return _led(5, documents, super().plain(question))

    def skeleton(self, question: str, documents: PromptTokens = NOTHING) -> Halves:
        prefix, tail = super().skeleton(question)
        return _led(5, documents, prefix), tail

    def branch(
        self,
        point: Point,
        outline: Outline,
        dep_ids: Any,
        shared: PromptTokens = NOTHING,
        own: PromptTokens = NOTHING,
    ) -> Halves:
        hoist, rest = super().branch(point, outline, dep_ids)
        return _led(8, shared, hoist), _led(9, own, rest)

    def direct(self, share: str | None = None, documents: PromptTokens = NOTHING) -> PromptTokens:
        return super().direct(share) + documents


def _led(token: int, documents: PromptTokens, text: PromptTokens) -> PromptTokens:
    """A text with documents before it, and a token before these."""
    return PromptTokens((token,)) + documents + text if documents.ids else text


def book_of(made: Tiny, share: str = "outline", stop_ids: Sequence[int] = ()) -> DocumentBook:
    return DocumentBook(made.models.target.vocab_size, share, stop_ids)


def searching(parts: Sequence[str], deps: Iterable[int] = ()) -> Outline:
    """A given outline: each part searches for its words, and quotes the first part if named."""
    points = tuple(
        Point(i, 20, "Search" if words else None, (1,) if i in deps else (), words or "more")
        for i, words in enumerate(parts, 1)
    )
    return Outline("plan", points, (), "ok")


def asked(count: int = 2, documents: int = 4) -> list[Prompt]:
    """Prompts, each with some of the documents; the first ones are in all of them."""
    draw, found = random.Random(4), []
    for number in range(count):
        chosen = [*DOCUMENTS[:2], *draw.sample(DOCUMENTS[2:], documents - 2)]
        found.append(Prompt(str(number), f"question {number}", documents=tuple(chosen)))
    return found


def session(
    graphs: Graphs,
    made: Tiny,
    graph: str,
    *sets: str,
    models: Models | None = None,
    outline: Outline | None = None,
    budget: int = 14,
    share: str = "outline",
    chunks: ChunkStore | None = None,
    book: Any = None,
) -> Session:
    """A session on a shipped graph with a small pool; blending begins with the first token."""
    own = [*SMALL]
    if "blend" in graph:
        own.append("blend.min_tokens=0")
    if graph.startswith("bim"):
        own += [f"skeleton.share={share}", "skeleton.grammar=false"]
    kinds = [one for one in sets if one.startswith("drafter.kind=")]
    if kinds:
        own = [one for one in own if not one.startswith("drafter.")]
    program = open_graph(graph, (*own, *sets), graphs.table)
    given = outline if graph.startswith("bim") else None
    return Session(
        program,
        models or made.models,
        max_new_tokens=budget,
        outline=given,
        prompts=book or book_of(made, share),
        chunks=chunks,
    )


class Rounds:
    """A sink that keeps what every forward did."""

    def __init__(self) -> None:
        self.found: list[RoundSummary] = []
        self.run: EngineCore | None = None

    def __call__(self, event: Any) -> None:
        if isinstance(event, OpRan) and "committed" in event.results and self.run is not None:
            self.found.append(self.run.board["committed"])

    @property
    def blends(self) -> list[BlendSummary]:
        return [one.blend for one in self.found if one.blend is not None]


def watched(opened: Session, prompts: Any = None) -> tuple[EngineCore, Rounds]:
    """A whole run, checked after every phase, and what its forwards did."""
    sink = Rounds()
    sink.run = start(opened, prompts or asked(), sink)
    return drive(sink.run), sink
