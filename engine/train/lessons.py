"""What a drafter is trained on, and what it is measured with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from ..errors import UsageError
from .answers import Written, is_answers, read_lines
from .chats import ChatCoder, read_conversations
from .data import GOLD, Source, Tokens, TrainingBatch, pack, trimmed
from .settings import ConversationFile, DrafterTraining
from .teacher import Teacher

COUNTED = 4000  # samples that frequent ids are counted in


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt with the target's greedy answer.

    kind: names its group in the log. ids: prompt and answer. first: where the answer begins.
    """

    kind: str
    ids: tuple[int, ...]
    first: int

    def batch(self, device: torch.device) -> TrainingBatch:
        """The sample alone, [1, S]; nothing in it has a weight."""
        tokens = Tokens.linear(list(self.ids), [0.0] * len(self.ids))
        return pack([[tokens]], len(self.ids)).to(device)


@dataclass(frozen=True, slots=True)
class Lessons:
    """source: the samples. distinct: how many differ, None without end. held_out: for measuring."""

    source: Source
    distinct: int | None
    held_out: list[HeldOutPrompt]


LessonSource = Callable[[DrafterTraining, Teacher], Lessons]
"""Makes the lessons of a training from its settings and its target."""


def conversation_lessons(
    file: ConversationFile, settings: DrafterTraining, teacher: Teacher
) -> Lessons:
    """Conversations in an order of their own in every epoch; some of each file are held out.

    Raises:
        UsageError: the file cannot be used.
        ModelError: the target has no chat format.
    """
    samples = list[Tokens]()
    held_out = list[HeldOutPrompt]()
    for path in file.prompts:
        learned, kept = (_answers if is_answers(path) else _chats)(path, settings, teacher)
        samples += learned
        held_out += kept
    samples = [trimmed(one, settings.length) for one in samples]
    samples = [one for one in samples if sum(weight >= GOLD for weight in one.weights) > 1]
    if not samples:
        names = ", ".join(map(str, file.prompts))
        raise UsageError(
            f"{names}: no answer of two tokens or more within {settings.length} tokens"
        )
    return Lessons(_epochs(samples, settings.seed), len(samples), held_out)


def _held_out(count: int, settings: DrafterTraining) -> set[int]:
    """Which lines of a file are not trained on: a tenth at most."""
    order = Random(f"held:{settings.seed}").sample(range(count), count)
    return set(order[: min(settings.held_out, max(count // 10, 1)) if count > 1 else 0])


def _answers(
    path: Path, settings: DrafterTraining, teacher: Teacher
) -> tuple[list[Tokens], list[HeldOutPrompt]]:
    """What the target has written already: it says itself what is to be drafted."""
    lines = read_lines(path)
    size = teacher.config.vocab_size
    aside = _held_out(len(lines), settings)
    kept = [prompt for at in sorted(aside) for one in lines[at] for prompt in _paths(one)]
    learned = [one.tokens() for at, line in enumerate(lines) if at not in aside for one in line]
    if any(token >= size for one in learned for token in one.ids):
        raise UsageError(f"{path}: has tokens that the target lacks; it has {size}")
    return learned, [one for one in kept if one.first < len(one.ids) <= settings.length]


def _paths(one: Written) -> Iterator[HeldOutPrompt]:
    """Every branch by itself; what is drafted is the last that it wrote."""
    for pieces in one.branches:
        ids = [*one.trunk, *(token for part, _ in pieces for token in part)]
        yield HeldOutPrompt(one.kind, tuple(ids), len(ids) - len(pieces[-1][0]))


def _chats(
    path: Path, settings: DrafterTraining, teacher: Teacher
) -> tuple[list[Tokens], list[HeldOutPrompt]]:
    """Conversations as they stand in a file; those that are held out are answered by the target."""
    coder = ChatCoder(teacher.folder, teacher.tokenizer, teacher.stops)
    conversations = read_conversations(path, questions=False)
    aside = _held_out(len(conversations), settings)
    trained = [c for i, c in enumerate(conversations) if i not in aside]
    learned = [one for c in trained for one in coder.samples(c, settings.length)]
    prompts = [coder.prompt(conversations[i].question) for i in sorted(aside)]
    prompts = [ids for ids in prompts if len(ids) < settings.length]
    room = settings.length - max(map(len, prompts), default=0)
    return learned, held_out_prompts(teacher, "prompt", prompts, room)


def _epochs(samples: list[Tokens], seed: int) -> Source:
    """All samples again and again, shuffled anew each time."""

    @lru_cache(2)
    def shuffled(epoch: int) -> list[int]:
        return Random(f"{seed}:{epoch}").sample(range(len(samples)), len(samples))

    def sample(index: int) -> Tokens:
        epoch, place = divmod(index, len(samples))
        return samples[shuffled(epoch)[place]]

    return sample


def held_out_prompts(
    teacher: Teacher, kind: str, prompts: list[list[int]], limit: int
) -> list[HeldOutPrompt]:
    """Prompts with the answers, of ``limit`` tokens at most, that the target writes to them."""
    answers = teacher.answer(prompts, limit) if prompts else []
    return [
        HeldOutPrompt(kind, (*prompt, *answer), len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def frequent_ids(lessons: Lessons, size: int, vocabulary: int) -> Tensor:
    """The ids that most often have to be written, increasing, int64 [size]."""
    counts: Counter[int] = Counter(dict.fromkeys(range(vocabulary), 0))
    for index in range(min(COUNTED, lessons.distinct or COUNTED)):
        tokens = lessons.source(index)
        counts.update(i for i, w in zip(tokens.ids, tokens.weights, strict=True) if w >= GOLD)
    return torch.tensor(sorted(i for i, _ in counts.most_common(size)))


def rounds(hits_SK: Tensor, first: int) -> list[int]:
    """Tokens that each round of a chain of drafts commits, the target's own included.

    Whether a draft is right matters only while all before it were, and then it was made behind the
    true tokens; so one look at every root gives the rounds that a run would take.
    """
    rows: list[list[bool]] = hits_SK.tolist()
    root = first
    last = len(rows) - 1
    gains = []
    while root < last:
        right = next((k for k, hit in enumerate(rows[root]) if not hit), len(rows[root]))
        gains.append(min(right + 1, last - root))
        root += gains[-1]
    return gains


@torch.no_grad()
def held_out_tau(
    samples: Iterable[HeldOutPrompt], hits: Callable[[HeldOutPrompt], Tensor]
) -> dict[str, float]:
    """Tokens per round over all samples, and for each kind of them; `hits` as in `loop.Course`."""
    gains: defaultdict[str, list[int]] = defaultdict(list)
    for sample in samples:
        tokens = rounds(hits(sample), sample.first)
        gains[f"held_{sample.kind}"] += tokens
        gains["held_tau"] += tokens
    return {kind: sum(tokens) / len(tokens) for kind, tokens in sorted(gains.items()) if tokens}
