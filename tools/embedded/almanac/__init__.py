"""The almanac: everyday subjects, each with aspects that serve as plan items."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

FOLDER = Path(__file__).resolve().parent
WORDING = "wording.yaml"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Aspect:
    """One plan item of a subject: its title, questions it answers, a sentence and a body."""

    title: str
    ask: tuple[str, ...]
    short: str
    sentences: tuple[str, ...]

    @property
    def body(self) -> str:
        """The full text of this part."""
        return " ".join(self.sentences)


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject with its aspects in their fixed order."""

    name: str
    verb: str
    hint: str
    aspects: tuple[Aspect, ...]
    is_plan: bool

    @property
    def usual_parts(self) -> int:
        """Number of parts of an outline when the question names no number."""
        return min(len(self.aspects), 4 + bucket(self.name, 2))


def bucket(text: str, buckets: int) -> int:
    """A stable number in ``range(buckets)`` for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % buckets


@cache
def load_almanac(folder: Path = FOLDER) -> tuple[Subject, ...]:
    """All subjects of all almanac files, in file order."""
    subjects: list[Subject] = []
    for path in sorted(folder.glob("*.yaml")):
        if path.name == WORDING:
            continue
        rows = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        subjects += [_subject(row, path.stem.startswith("plans")) for row in rows]
    return tuple(subjects)


def _subject(row: dict[str, object], is_plan: bool) -> Subject:
    aspects = row["aspects"]
    assert isinstance(aspects, list)
    return Subject(
        name=str(row["subject"]),
        verb=str(row["verb"]),
        hint=str(row["hint"]),
        aspects=tuple(
            Aspect(a["title"], tuple(a["ask"]), a["short"], tuple(a["body"])) for a in aspects
        ),
        is_plan=is_plan,
    )
