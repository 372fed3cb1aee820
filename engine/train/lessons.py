"""What a drafter is trained on, and what it is measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from ..errors import UsageError
from .answers import Regeneration
from .chats import ChatCoder, CompactSample, read_conversations
from .data import Source, Tokens
from .held_out import HeldOutPrompt
from .settings import ConversationFile, DrafterTraining
from .teacher import Teacher


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
    """Conversations in an order of their own in every epoch; some of them are held out.

    Raises:
        UsageError: the file cannot be used.
        ModelError: the target has no chat format.
    """
    coder = ChatCoder(teacher.folder, teacher.tokenizer, teacher.stops)
    conversations = read_conversations(file.prompts, regenerate=file.regenerate)
    count = len(conversations)
    order = Random(f"held:{settings.seed}").sample(range(count), count)
    kept = set(order[: min(settings.held_out, max(count // 10, 1)) if count > 1 else 0])
    trained = [c for i, c in enumerate(conversations) if i not in kept]
    prompts = [coder.prompt(conversations[i].question) for i in sorted(kept)]
    if file.regenerate:
        trained = Regeneration(settings, teacher, coder).answered(trained)
    samples = [
        CompactSample.of(tokens) for c in trained for tokens in coder.samples(c, settings.length)
    ]
    if not samples:
        raise UsageError(
            f"{file.prompts}: no answer of two tokens or more within {settings.length} tokens"
        )
    prompts = [ids for ids in prompts if len(ids) < settings.length]
    room = settings.length - max(map(len, prompts), default=0)
    held_out = held_out_prompts(teacher, "prompt", prompts, room)
    return Lessons(_epochs(samples, settings.seed), len(samples), held_out)


def _epochs(samples: list[CompactSample], seed: int) -> Source:
    """All samples again and again, shuffled anew each time."""

    @lru_cache(2)
    def shuffled(epoch: int) -> list[int]:
        return Random(f"{seed}:{epoch}").sample(range(len(samples)), len(samples))

    def sample(index: int) -> Tokens:
        epoch, place = divmod(index, len(samples))
        return samples[shuffled(epoch)[place]].tokens

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
