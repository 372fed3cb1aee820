"""The stream of training samples of the embedded model, a pure function of a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random

from .almanac import Subject, load_almanac
from .documents import (
    combined_facts_sample,
    joint_sample,
    reading_sample,
    recall_sample,
    repeat_sample,
    search_sample,
)
from .general import general_sample
from .pieces import Sample
from .subjects import (
    Count,
    combined_parts_sample,
    direct_sample,
    outline_sample,
    plain_sample,
    prompt_sample,
)

MIXTURE = {
    "outline": 0.45,
    "prompt": 0.06,
    "plain": 0.07,
    "direct": 0.05,
    "reading": 0.20,
    "joint": 0.03,
    "search": 0.03,
    "combine": 0.03,
    "general": 0.06,
    "recall": 0.01,
    "repeat": 0.01,
}
"""Share of each kind of sample in the tokens."""
MEAN_LENGTH = {
    "outline": 400,
    "prompt": 370,
    "plain": 31,
    "direct": 59,
    "reading": 468,
    "joint": 321,
    "search": 270,
    "combine": 450,
    "general": 220,
    "recall": 303,
    "repeat": 95,
}
"""Mean tokens of a sample of each kind."""


@cache
def vocabulary(subjects: tuple[Subject, ...]) -> tuple[str, ...]:
    """All words of the subjects' texts, each once."""
    texts = (a.body for subject in subjects for a in subject.aspects)
    return tuple(sorted({word.strip(".,") for text in texts for word in text.split()}))


@dataclass(frozen=True)
class Corpus:
    """Deterministic samples: number ``i`` depends only on the seed and on ``i``."""

    count: Count
    seed: int = 0
    mixture: dict[str, float] = field(default_factory=lambda: dict(MIXTURE))
    subjects: tuple[Subject, ...] = field(default_factory=load_almanac)
    longest_crowd: int = 12
    longest_drill: int = 40

    def sample(self, index: int) -> Sample:
        """The sample of this number."""
        rng = Random(f"{self.seed}:{index}")
        weights = [share / MEAN_LENGTH[kind] for kind, share in self.mixture.items()]
        kind = rng.choices(list(self.mixture), weights)[0]
        return self.make(kind, rng)

    def make(self, kind: str, rng: Random) -> Sample:
        """A sample of one kind."""
        subject = rng.choice(self.subjects)
        size = min(rng.randint(2, self.longest_crowd), rng.randint(2, self.longest_crowd))
        drill = rng.randint(2, self.longest_drill)
        match kind:
            case "outline":
                return outline_sample(rng, subject, self.count)
            case "prompt":
                return prompt_sample(rng, subject, self.count)
            case "plain":
                return plain_sample(rng, subject)
            case "direct":
                return direct_sample(rng, subject)
            case "reading":
                return reading_sample(rng, size)
            case "joint":
                return joint_sample(rng, size)
            case "search":
                return search_sample(rng)
            case "combine" if rng.random() < 0.5:
                return combined_facts_sample(rng)
            case "combine":
                return combined_parts_sample(rng, subject, self.count)
            case "general":
                return general_sample(rng, self.count)
            case "recall":
                return recall_sample(rng, drill)
            case "repeat":
                return repeat_sample(rng, drill, vocabulary(self.subjects))
        raise ValueError(f"unknown kind of sample: {kind}")

    def stream(self, start: int = 0) -> Iterator[Sample]:
        """All samples from number ``start`` on."""
        index = start
        while True:
            yield self.sample(index)
            index += 1
