"""What a drafter is trained on: the embedded family's corpus, or a file of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

from ..corpus.corpus import Corpus
from ..corpus.heldout import probes
from ..corpus.pieces import END, USER, Pieces, branch_turn
from ..corpus.tokenizer_training import VOCABULARY
from ..errors import UsageError
from .answers import Regeneration
from .chats import ChatCoder, CompactSample, read_conversations
from .data import Encode, Source, Tokens, corpus_source
from .held_out import HeldOutPrompt
from .loop import DrafterTraining
from .quality import outline_titles
from .teacher import Teacher

DRAFTED = {
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
PARTS = 2


@dataclass(frozen=True, slots=True)
class Lessons:
    """source: the samples. distinct: how many differ, None without end. held: for measuring."""

    source: Source
    distinct: int | None
    held: list[HeldOutPrompt]


def lessons(config: DrafterTraining, teacher: Teacher) -> Lessons:
    """What ``config`` asks for.

    Raises:
        UsageError: a file that cannot be used, or none for a target that needs one.
    """
    if config.prompts is not None:
        return _of_file(config, config.prompts, teacher)
    encode = lru_cache(1 << 16)(teacher.encode)
    if not _is_embedded(teacher):
        raise UsageError(
            f"{config.target} has another tokenizer than the embedded family, whose texts are"
            " generated: give --prompts FILE"
        )
    corpus = Corpus(lambda text: len(encode(text)), seed=config.seed, mixture=DRAFTED)
    held = _of_corpus(teacher, encode, config.held_out) if config.held_out else []
    return Lessons(corpus_source(corpus, encode), None, held)


def _of_file(config: DrafterTraining, file: Path, teacher: Teacher) -> Lessons:
    """Conversations in an order of their own in every epoch; some of them are held out."""
    coder = ChatCoder(teacher.folder, teacher.tokenizer, teacher.stops)
    found = read_conversations(file, regenerate=config.regenerate)
    order = Random(f"held:{config.seed}").sample(range(len(found)), len(found))
    kept = min(config.held_out, max(len(found) // 10, 1)) if len(found) > 1 else 0
    chosen = set(order[:kept])
    trained = [c for i, c in enumerate(found) if i not in chosen]
    asked = [coder.prompt(found[i].question) for i in sorted(chosen)]
    if config.regenerate:
        trained = Regeneration(config, teacher, coder).answered(trained)
    samples = [
        CompactSample.of(tokens) for c in trained for tokens in coder.samples(c, config.length)
    ]
    if not samples:
        raise UsageError(f"{file}: no answer of two tokens or more within {config.length} tokens")

    @lru_cache(2)
    def shuffled(epoch: int) -> list[int]:
        return Random(f"{config.seed}:{epoch}").sample(range(len(samples)), len(samples))

    def sample(index: int) -> Tokens:
        epoch, place = divmod(index, len(samples))
        return samples[shuffled(epoch)[place]].tokens

    short = [ids for ids in asked if len(ids) < config.length]
    return Lessons(sample, len(samples), _ask(teacher, "prompt", short, config.length))


def _is_embedded(teacher: Teacher) -> bool:
    marks = teacher.encode(USER[: USER.index("user")] + END)
    return len(teacher.tokenizer) == VOCABULARY and marks == [1, 2]


def _of_corpus(teacher: Teacher, encode: Encode, limit: int) -> list[HeldOutPrompt]:
    """Held-out outlines, their first parts, and answers from documents, as the target writes."""
    outlines = _ask(teacher, "outline", [_ids(p.pieces, encode) for p in probes("outline", limit)])
    turns = []
    for outline in outlines:
        text = teacher.tokenizer.decode(outline.ids[outline.first :], skip_special_tokens=True)
        for number, title in list(enumerate(outline_titles(text) or (), 1))[:PARTS]:
            turns.append([*outline.ids, *_ids(branch_turn(number, title), encode)])
    reading = [_ids(p.pieces, encode) for p in probes("one_hop", limit)]
    return [*outlines, *_ask(teacher, "part", turns), *_ask(teacher, "reading", reading)]


def _ids(pieces: Pieces, encode: Encode) -> list[int]:
    return [i for piece in pieces for i in encode(piece.text)]


def _ask(
    teacher: Teacher, kind: str, prompts: list[list[int]], length: int | None = None
) -> list[HeldOutPrompt]:
    if not prompts:
        return []
    limit = ANSWER_TOKENS if length is None else length - max(map(len, prompts))
    return [
        HeldOutPrompt(kind, (*prompt, *answer), len(prompt))
        for prompt, answer in zip(prompts, teacher.answer(prompts, limit), strict=True)
    ]
