"""The stages of the target's training: copying from the context, then everything, then reading.

Looking back in the context is learned suddenly or, from long contexts alone, hardly at all; short
drills bring it about within a few hundred steps."""

from __future__ import annotations

from dataclasses import dataclass

from .corpus import MIXTURE

SHORT_DRILLS = {
    "repeat": 0.6,
    "recall": 0.4,
    "reading": 0.5,
    "joint": 0.03,
    "search": 0.03,
    "outline": 0.15,
    "prompt": 0.01,
    "plain": 0.03,
    "direct": 0.02,
    "general": 0.03,
}
LONGER_DRILLS = {
    "repeat": 0.16,
    "recall": 0.12,
    "reading": 0.32,
    "joint": 0.04,
    "search": 0.04,
    "outline": 0.26,
    "prompt": 0.03,
    "plain": 0.06,
    "direct": 0.04,
    "general": 0.05,
}
READING = {
    "outline": 0.32,
    "prompt": 0.03,
    "plain": 0.04,
    "direct": 0.03,
    "reading": 0.37,
    "joint": 0.04,
    "search": 0.04,
    "combine": 0.04,
    "general": 0.05,
    "recall": 0.03,
    "repeat": 0.01,
}
"""Share of each kind at the end, where answering from documents becomes sure."""


@dataclass(frozen=True)
class Stage:
    """What is trained until the share ``until`` of the run is over.

    ``longest_crowd`` counts people in documents, ``longest_drill`` words of a drill."""

    until: float
    mixture: tuple[tuple[str, float], ...]
    longest_crowd: int
    longest_drill: int


STAGES = (
    Stage(0.15, tuple(SHORT_DRILLS.items()), 3, 8),
    Stage(0.25, tuple(LONGER_DRILLS.items()), 6, 18),
    Stage(0.7, tuple(MIXTURE.items()), 10, 30),
    Stage(1.0, tuple(READING.items()), 10, 30),
)


def stage_at(stages: tuple[Stage, ...], done: float) -> Stage:
    """The stage that this share of the training falls into."""
    return next((stage for stage in stages if done < stage.until), stages[-1])
