"""Prompts that training never shows, with what a right answer holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from .almanac import Subject, load_almanac
from .documents import FactQuestion, documents, one_hop, two_hop
from .general import unknown
from .people import people
from .pieces import ANSWER, Pieces, given, outline_turn
from .questions import BROAD, UNSEEN, UNSEEN_PLAN, cores, fill, held_out

KINDS = ("outline", "unseen", "one_hop", "two_hop", "unknown")


@dataclass(frozen=True, slots=True)
class Probe:
    """A held-out prompt: its pieces, and the gold subject, titles, answer and value."""

    kind: str
    question: str
    pieces: Pieces
    subject: str = ""
    titles: tuple[str, ...] = ()
    answer: str = ""
    value: str = ""
    documents: tuple[str, ...] = ()


def probes(kind: str, limit: int, seed: int = 0) -> list[Probe]:
    """Held-out prompts of one kind, in an order given by the seed."""
    if kind in ("one_hop", "two_hop"):
        return list(islice(_reading_probes(Random(f"{kind}:{seed}"), kind), limit))
    found = list(_unknown_probes() if kind == "unknown" else _subject_probes(kind))
    Random(f"{kind}:{seed}").shuffle(found)
    return found[:limit]


def _subject_probes(kind: str) -> Iterator[Probe]:
    for subject in load_almanac():
        for core in _cores(kind, subject):
            question = fill(core, subject.name, subject.verb)
            titles = tuple(a.title for a in subject.aspects)
            yield Probe(kind, question, outline_turn(question), subject.name, titles)


def _cores(kind: str, subject: Subject) -> list[str]:
    if kind == "unseen":
        return list(UNSEEN_PLAN if subject.is_plan else UNSEEN)
    return [core for core in cores(subject) if held_out(subject.name, core)]


def _unknown_probes() -> Iterator[Probe]:
    rng = Random("unknown")
    for _ in range(200):
        name = unknown(rng, project=False)
        question = fill(rng.choice(BROAD), name)
        yield Probe("unknown", question, outline_turn(question), name)


def _reading_probes(rng: Random, kind: str) -> Iterator[Probe]:
    while True:
        crowd = people(rng, rng.randint(2, 8), held=True)
        who = rng.choice(crowd)
        everyone = {p.name: p for p in crowd}
        asked = one_hop(rng, who) if kind == "one_hop" else two_hop(rng, who, everyone)
        if asked:
            yield _reading_probe(kind, documents(rng, crowd), asked)


def _reading_probe(kind: str, texts: list[str], asked: FactQuestion) -> Probe:
    pieces = given("<|im_start|>user\n")
    for text in texts:
        pieces += given("Document: ", text, "\n")
    pieces += given(asked.question, ANSWER)
    return Probe(
        kind,
        asked.question,
        pieces,
        answer=asked.answer,
        value=asked.value,
        documents=tuple(texts),
    )
