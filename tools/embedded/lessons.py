"""The corpus as a source of lessons for drafters of the embedded target."""

from __future__ import annotations

from functools import lru_cache

from specsot.engine.errors import UsageError
from specsot.engine.train.dataset import Dataset, HeldOutPrompt, held_out_prompts
from specsot.engine.train.settings import DrafterTraining
from specsot.engine.train.teacher import Teacher

from .corpus import Corpus
from .heldout import probes
from .pieces import END, USER, Pieces, branch_turn
from .quality import outline_titles
from .samples import Encode, corpus_source
from .tokenizer_training import VOCABULARY

MIXTURE = {
    "outline": 0.6,
    "prompt": 0.1,
    "plain": 0.08,
    "direct": 0.04,
    "reading": 0.1,
    "joint": 0.02,
    "search": 0.02,
    "general": 0.04,
}
"""Share of each kind of sample: the bodies of parts are the hardest to draft."""
ANSWER_TOKENS = 200
PARTS = 2  # of every held-out outline


def corpus_lessons(settings: DrafterTraining, teacher: Teacher) -> Dataset:
    """Generated texts without end, and held-out prompts of every kind that has long answers.

    Raises:
        UsageError: the target has another tokenizer than the embedded family."""
    encode = lru_cache(1 << 16)(teacher.encode)
    marks = encode(USER[: USER.index("user")] + END)
    if len(teacher.tokenizer) != VOCABULARY or marks != [1, 2]:
        raise UsageError(f"{settings.target} has another tokenizer than the embedded family")
    corpus = Corpus(lambda text: len(encode(text)), seed=settings.seed, mixture=MIXTURE)
    held_out = _held_out(teacher, encode, settings.held_out) if settings.held_out else []
    return Dataset(corpus_source(corpus, encode), None, held_out)


def _held_out(teacher: Teacher, encode: Encode, limit: int) -> list[HeldOutPrompt]:
    """Outlines, their first parts, and answers from documents, as the target writes them."""

    def answered(kind: str, prompts: list[list[int]]) -> list[HeldOutPrompt]:
        return held_out_prompts(teacher, kind, prompts, ANSWER_TOKENS)

    def prompts(kind: str) -> list[list[int]]:
        return [_ids(probe.pieces, encode) for probe in probes(kind, limit)]

    outlines, turns = answered("outline", prompts("outline")), []
    for outline in outlines:
        text = teacher.tokenizer.decode(outline.ids[outline.first :], skip_special_tokens=True)
        for number, title in list(enumerate(outline_titles(text) or (), 1))[:PARTS]:
            turns.append([*outline.ids, *_ids(branch_turn(number, title), encode)])
    return [*outlines, *answered("part", turns), *answered("reading", prompts("one_hop"))]


def _ids(pieces: Pieces, encode: Encode) -> list[int]:
    return [i for piece in pieces for i in encode(piece.text)]
