"""Training of an EAGLE-3 drafter: its steps learn the target's distribution, unrolled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.config import RopeConfig
from ...models.drafters.config import Eagle3Config, default_taps
from ...models.drafters.eagle import Eagle3
from ..errors import UsageError
from .eagle import AnyEagle, EagleCourse, EagleLesson, inherit, shift, untrained
from .files import load_checkpoint
from .lessons import Lessons, LessonSource, frequent_ids
from .loop import train
from .settings import Eagle3Training
from .teacher import Teacher, Told, load_teacher


def drafter_config(settings: Eagle3Training, teacher: Teacher) -> Eagle3Config:
    """The drafter's shape: the target's width and heads, one layer."""
    target = teacher.config
    file = settings.out / "config.json"
    rope = RopeConfig("default", target.rope.theta, {}, target.rope.trained)
    own = {"path": file, "intermediate_size": settings.intermediate, "rope": rope}
    return Eagle3Config(
        **target.sizes() | own,
        draft_vocab_size=settings.draft_vocabulary,
        target_hidden_size=target.hidden_size,
        taps=default_taps(target.num_layers),
    )


@torch.no_grad()
def new_drafter(settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> Eagle3:
    """An untrained drafter that shares the target's embedding; its head starts from the target's,
    its layer as the target's last, which reads the last tap, beside the embedding.

    Args:
        ids: what it can draft, increasing, int64 [draft vocabulary].
    """
    drafter = Eagle3(drafter_config(settings, teacher))
    untrained(drafter, settings.seed)
    drafter.lm_head.weight.copy_(teacher.head[ids])
    drafter.norm.weight.copy_(teacher.model.base_model.norm.weight)
    drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
    inherit(drafter, teacher, wide=drafter.config.hidden_size)
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.t2d.fill_(False)[ids] = True
    drafter.to(teacher.device)
    drafter.embed_tokens.weight = nn.Parameter(teacher.embedding, requires_grad=False)
    return drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Lesson(EagleLesson):
    """wanted_BSD: what the target would say after token j + 1, over the draft vocabulary."""

    wanted_BSD: Tensor

    def score(self, drafter: AnyEagle, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the target's distribution over the draft vocabulary, and accuracy."""
        assert isinstance(drafter, Eagle3)
        best_BS = shift(self.best_BS, step)
        counted_BS = shift(self.counted_BS, step)
        known_BS = drafter.t2d[best_BS] * counted_BS
        rows = known_BS.flatten().nonzero().flatten()  # nothing else contributes
        wanted_RD = self.wanted_BSD.flatten(0, 1)[rows + step].float()
        logits_RD = drafter.logits(hidden_BSH.flatten(0, 1)[rows])
        losses_R = -(wanted_RD * F.log_softmax(logits_RD, -1)).sum(-1)
        weights_R = known_BS.flatten()[rows]
        right_R = drafter.to_target(logits_RD.argmax(-1)) == best_BS.flatten()[rows]
        accuracy = (right_R * weights_R).sum() / counted_BS.sum().clamp_min(1e-6)
        return (losses_R * weights_R).sum() / known_BS.numel(), accuracy.detach()


class Eagle3Course(EagleCourse):
    """See `EagleCourse`."""

    name = "eagle3"

    def __init__(self, settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> None:
        super().__init__(settings, teacher, new_drafter(settings, teacher, ids))
        self.head_DH = teacher.head[ids]

    def made(
        self, told: Told, common: dict[str, Tensor], noise: torch.Generator | None
    ) -> Eagle3Lesson:
        wanted_BSD = F.linear(shift(told.hidden_BSH), self.head_DH).softmax(-1)
        return Eagle3Lesson(taps_BSF=told.features_BSF, wanted_BSD=wanted_BSD, **common)


def _vocabulary(settings: Eagle3Training, lessons: Lessons, whole: int) -> Tensor:
    """What it can draft: the checkpoint's ids, else the most frequent ones to be written."""
    size = settings.draft_vocabulary
    if settings.resume and settings.checkpoint.exists():
        state = load_checkpoint(settings.checkpoint)
        ids: Tensor = state["model"].get("t2d", torch.zeros(0)).nonzero().flatten()
        if len(ids) != size:
            raise UsageError(
                f"{settings.checkpoint}: of a training that drafts {len(ids)} different ids"
            )
        return ids
    return frequent_ids(lessons, size, whole)


def train_eagle3(settings: Eagle3Training, source: LessonSource) -> Path:
    """Train, saving now and then; returns the folder of the exported drafter."""
    teacher = load_teacher(settings)
    whole = teacher.config.vocab_size
    if settings.draft_vocabulary > whole:
        raise UsageError(f"--draft-vocabulary {settings.draft_vocabulary}: the target has {whole}")
    lessons = source(settings, teacher)
    course = Eagle3Course(settings, teacher, _vocabulary(settings, lessons, whole))
    return train(settings, course, lessons)
