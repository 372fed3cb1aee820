"""Training of an EAGLE-3 drafter: a few drafted steps unrolled behind every token."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.config import RopeConfig
from ...models.drafters.eagle import Eagle3
from ...models.drafters.eagle_config import Eagle3Config, default_taps
from ..errors import UsageError
from .data import GOLD, Batch, Source
from .eagle3_loss import Lesson, guesses, rehearse, shift
from .files import export_drafter, load_checkpoint
from .held_out import HeldOutPrompt
from .lessons import Lessons, LessonSource
from .loop import LossReport, train
from .optim import MuonAdamW
from .settings import Eagle3Training
from .teacher import Teacher, load_teacher

COUNTED = 4000  # samples that the draft vocabulary is chosen from


def draft_vocabulary(source: Source, samples: int, size: int, vocabulary: int) -> Tensor:
    """The most frequent ids of the texts to be written, increasing, int64 [size]."""
    counts: Counter[int] = Counter(dict.fromkeys(range(vocabulary), 0))
    for index in range(samples):
        tokens = source(index)
        counts.update(i for i, w in zip(tokens.ids, tokens.weights, strict=True) if w >= GOLD)
    return torch.tensor(sorted(i for i, _ in counts.most_common(size)))


def drafter_config(settings: Eagle3Training, teacher: Teacher) -> Eagle3Config:
    """The drafter's shape: the target's width and heads, one layer."""
    target = teacher.config
    own = {
        "path": settings.out / "config.json",
        "intermediate_size": settings.intermediate,
        "rope": RopeConfig("default", target.rope.theta, {}, target.rope.trained),
    }
    return Eagle3Config(
        **target.sizes() | own,
        draft_vocab_size=settings.draft_vocabulary,
        target_hidden_size=target.hidden_size,
        taps=default_taps(target.num_layers),
    )


def new_drafter(settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> Eagle3:
    """An untrained drafter that shares the target's embedding; its head starts from the target's.

    Args:
        ids: what it can draft, increasing, int64 [draft vocabulary].
    """
    torch.manual_seed(settings.seed)
    drafter = Eagle3(drafter_config(settings, teacher))
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
        elif name != "embed_tokens.weight":
            nn.init.normal_(parameter, std=0.02)
    drafter.lm_head.weight.data.copy_(teacher.head[ids])
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.t2d.fill_(False)[ids] = True
    drafter.to(teacher.device)
    drafter.embed_tokens.weight = nn.Parameter(teacher.embedding, requires_grad=False)
    return drafter


def chain_tau(accuracies: list[Tensor]) -> Tensor:
    """Tokens per verification of a chain of drafts, from the accuracy of each step."""
    return 1.0 + torch.stack(list(accumulate(accuracies, mul))).sum()


class Eagle3Course:
    """See `loop.Course`."""

    name = "eagle3"

    def __init__(self, settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> None:
        self.settings, self.teacher = settings, teacher
        self.model = new_drafter(settings, teacher, ids)
        self.optimizer = MuonAdamW(self.model, settings.lr, settings.head_lr)

    def lesson(self, batch: Batch, *, exact: bool = False) -> Lesson:
        """What the target says about a batch of packed rows.

        Branches of one sample share the row that pairs the trunk's end with their first token;
        after an outline that token is the same for all.

        Args:
            exact: hidden states in float32, as in a run.
        """
        seen = self.teacher.look(batch, self.model.config.taps, exact=exact)
        return Lesson(
            taps_BSF=seen.features_BSF,
            tokens_BS=batch.labels,
            teacher_BSV=shift(self.teacher.logits(seen.hidden_BSH)),
            counted_BS=(shift(batch.weights) >= GOLD).float(),
            positions_BS=batch.positions,
            visible_BSS=batch.mask[:, 0],
        )

    def teach(self, batch: Batch, draw: torch.Generator) -> LossReport:
        lesson = self.lesson(batch)
        with self.teacher.low_precision():
            verdict = rehearse(self.model, lesson, self.settings.unroll)
        loss = verdict.total(self.settings.decay) / lesson.counted_BS.mean().clamp_min(1e-3)
        accuracies = list(verdict.accuracies)
        steps = {f"acc{i}": value for i, value in enumerate(accuracies)}
        figures = {"accuracy": accuracies[0], **steps, "tau": chain_tau(accuracies)}
        return LossReport(loss, figures)

    def hits(self, sample: HeldOutPrompt) -> Tensor:
        lesson = self.lesson(sample.batch(self.teacher.device), exact=True)
        steps = self.settings.unroll
        drafts_SK = guesses(self.model, lesson, steps)[0]
        right_SK = torch.zeros_like(drafts_SK, dtype=torch.bool)
        for step in range(steps):  # row j drafts behind the root token j + 1
            wanted_S = lesson.tokens_BS[0, step + 1 :]
            right_SK[1 : len(wanted_S) + 1, step] = drafts_SK[: len(wanted_S), step] == wanted_S
        return right_SK

    def export(self, out: Path) -> None:
        export_drafter(self.model.published(), self.model.config.to_json(), out)


def _vocabulary(settings: Eagle3Training, lessons: Lessons, whole: int) -> Tensor:
    """As the checkpoint has it, else counted."""
    if settings.resume and settings.checkpoint.exists():
        state: dict[str, Any] = load_checkpoint(settings.checkpoint)
        ids: Tensor = state["model"].get("t2d", torch.zeros(0)).nonzero().flatten()
        if len(ids) != settings.draft_vocabulary:
            raise UsageError(
                f"{settings.checkpoint}: of a training that drafts {len(ids)} different ids"
            )
        return ids
    samples = min(COUNTED, lessons.distinct or COUNTED)
    return draft_vocabulary(lessons.source, samples, settings.draft_vocabulary, whole)


def train_eagle3(settings: Eagle3Training, source: LessonSource) -> Path:
    """Train, saving now and then; returns the folder of the exported drafter."""
    teacher = load_teacher(settings)
    whole = teacher.config.vocab_size
    if settings.draft_vocabulary > whole:
        raise UsageError(f"--draft-vocabulary {settings.draft_vocabulary}: the target has {whole}")
    lessons = source(settings, teacher)
    course = Eagle3Course(settings, teacher, _vocabulary(settings, lessons, whole))
    return train(settings, course, lessons)
