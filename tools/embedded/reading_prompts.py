"""Prompts with documents whose answers are known, and documents that come again as often as asked.

The people, their documents and the questions are those that the embedded target was trained to
read (`documents.py`), all of them held out of its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from specsot.engine.errors import UsageError
from specsot.states.text.documents import Document

from .documents import (
    SEARCH,
    FactQuestion,
    document,
    joint_question,
    one_hop,
    two_hop,
    wanted_facts,
)
from .people import HOPS, Person, newcomer

KINDS = ("one_hop", "two_hop", "joint", "search")


@dataclass(frozen=True, slots=True)
class SetSettings:
    """What to generate.

    prompts: how many; they are of ``kinds`` in turn. documents: how many each prompt brings.
    reuse: share of all these places that is taken by a document of an earlier prompt: what a cache
        that forgets nothing would find. records: share of documents that are lists of fields.
    tokens: of the documents of a prompt together, about; None for one person in each document."""

    prompts: int = 20
    documents: int = 6
    reuse: float = 0.5
    records: float = 0.4
    tokens: int | None = None
    kinds: tuple[str, ...] = ("one_hop", "two_hop")
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReadingPrompt:
    """A prompt with what a right answer says.

    kind: what was asked for, or one_hop where nobody is known to answer that. hops: how many people
        an answer is about. answers, values: whole sentences, and the words in them that were
        asked for, one per asked fact. reused: how many documents earlier prompts had."""

    kind: str
    question: str
    documents: tuple[Document, ...]
    hops: int
    answers: tuple[str, ...]
    values: tuple[str, ...]
    reused: int

    def line(self, number: int) -> dict[str, Any]:
        """The object of a JSONL file that `specsot run --prompts` takes."""
        return {
            "id": f"{self.kind}-{number}",
            "prompt": self.question,
            "kind": self.kind,
            "hops": self.hops,
            "answers": self.answers,
            "values": self.values,
            "reused": self.reused,
            "documents": [{"title": d.title, "text": d.text} for d in self.documents],
        }


@dataclass(frozen=True, slots=True)
class _Passage:
    """A document and whom it is about."""

    document: Document
    people: tuple[Person, ...]


def reading_prompts(settings: SetSettings, count: Callable[[str], int]) -> Iterator[ReadingPrompt]:
    """The prompts; the same settings give the same ones.

    Args:
        count: tokens of a text; asked only where `tokens` is set.

    Raises:
        UsageError: so many documents cannot come again."""
    quota = _quota(settings)
    writer = _Writer(settings, count, Random(f"documents:{settings.seed}"))
    for number, reused in enumerate(quota):
        yield writer.prompt(settings.kinds[number % len(settings.kinds)], reused)


def _quota(settings: SetSettings) -> list[int]:
    """How many documents of each prompt come again: none of the first, spread over the rest."""
    places = settings.prompts * settings.documents
    again, later = round(settings.reuse * places), settings.prompts - 1
    if again > later * settings.documents:
        most = later / settings.prompts
        raise UsageError(
            f"--reuse {settings.reuse}: of {settings.prompts} prompts the first has nothing to "
            f"take again, so at most {most:.4f} can be"
        )
    return [0, *(again * (i + 1) // later - again * i // later for i in range(later))]


@dataclass(slots=True)
class _Writer:
    """Writes prompt after prompt and remembers every document and name so far."""

    settings: SetSettings
    count: Callable[[str], int]
    rng: Random
    pool: list[_Passage] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def prompt(self, kind: str, reused: int) -> ReadingPrompt:
        found = self.rng.sample(self.pool, reused)
        known = [who for passage in found for who in passage.people]
        crowd = list(known)
        new = range(self.settings.documents - reused)
        styles = [float(self.rng.random() < self.settings.records) for _ in new]
        groups = [self._group(crowd, records) for records in styles]
        if kind == "two_hop":
            self._link(crowd, crowd[len(known) :])
        pairs = zip(groups, styles, strict=True)
        fresh = [_Passage(self._document(group, style), tuple(group)) for group, style in pairs]
        self.pool += fresh
        passages = found + fresh
        self.rng.shuffle(passages)
        return self._asked(kind, crowd, tuple(p.document for p in passages), reused)

    def _group(self, crowd: list[Person], records: float) -> list[Person]:
        """The people of one document, who join the crowd; one, or as many as the tokens allow."""
        tokens, group, size = self.settings.tokens, list[Person](), 0
        goal = 1 if tokens is None else tokens // self.settings.documents
        while size < goal:
            who = newcomer(self.rng, [p.name for p in crowd], self.names, held=True)
            more = goal if tokens is None else self.count(document(Random(0), who, records))
            if group and size + more // 2 > goal:
                break
            size += more
            self.names.add(who.name)
            group.append(who)
            crowd.append(who)
        return group

    def _link(self, crowd: list[Person], fresh: list[Person]) -> None:
        """Let somebody new know somebody of the crowd, if nobody knows anybody yet."""
        everyone = {who.name: who for who in crowd}
        if len(crowd) < 2 or any(two_hop(Random(0), who, everyone) for who in crowd):
            return
        for who in fresh[:1]:
            others = [name for name in everyone if name != who.name]
            who.facts[self.rng.choice(HOPS).label] = self.rng.choice(others)

    def _document(self, group: list[Person], records: float) -> Document:
        """Sentences on one line, or (1.0) fields; titled by the first of its people."""
        texts = [document(self.rng, who, records) for who in group]
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        return Document(f"{group[0].name}{more}", ("\n" if records else " ").join(texts))

    def _asked(
        self, kind: str, crowd: list[Person], documents: tuple[Document, ...], reused: int
    ) -> ReadingPrompt:
        if kind in ("joint", "search") and (wanted := wanted_facts(self.rng, crowd)):
            question = joint_question(wanted) + (SEARCH if kind == "search" else "")
            answers = tuple(who.sentence(fact) for who, fact in wanted)
            values = tuple(who.facts[fact.label] for who, fact in wanted)
            return ReadingPrompt(kind, question, documents, 1, answers, values, reused)
        asked = self._two_hop(crowd) if kind == "two_hop" else None
        asked = asked or one_hop(self.rng, self.rng.choice(crowd))
        kind, answers, values = KINDS[asked.hops - 1], (asked.answer,), (asked.value,)
        return ReadingPrompt(kind, asked.question, documents, asked.hops, answers, values, reused)

    def _two_hop(self, crowd: list[Person]) -> FactQuestion | None:
        everyone = {who.name: who for who in crowd}
        order = self.rng.sample(crowd, len(crowd))
        return next(filter(None, (two_hop(self.rng, who, everyone) for who in order)), None)
