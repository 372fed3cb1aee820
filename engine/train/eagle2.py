"""Training of a head for EAGLE-1 and EAGLE-2: it foresees the target's last hidden states.

Its loss is the papers' (arXiv 2401.15077): the distance to the target's next feature, and a share
(there a tenth) of the cross-entropy with what the target makes of it; true features get some noise.
Steps behind the first are unrolled as in EAGLE-3's training, where the papers take only the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.config import RopeConfig
from ...models.drafters.config import EagleConfig
from ...models.drafters.eagle import Eagle
from .eagle import AnyEagle, EagleCourse, EagleLesson, inherit, shift, untrained
from .lessons import LessonSource
from .loop import train
from .settings import Eagle2Training
from .teacher import Teacher, Told, load_teacher

NOISE = 0.1  # half the width of the uniform noise, for texts of 512 tokens; less for longer ones


def drafter_config(settings: Eagle2Training, teacher: Teacher) -> EagleConfig:
    """The head's shape: the target's width and heads, one layer."""
    target = teacher.config
    rope = RopeConfig("default", target.rope.theta, {}, target.rope.trained)
    file = settings.out / "config.json"
    own = {"path": file, "intermediate_size": settings.intermediate, "rope": rope}
    return EagleConfig(**target.sizes() | own, taps=(target.num_layers,))


@torch.no_grad()
def new_drafter(settings: Eagle2Training, teacher: Teacher) -> Eagle:
    """An untrained head with the target's embedding and head, its layer as the target's last."""
    drafter = Eagle(drafter_config(settings, teacher))
    untrained(drafter, settings.seed)
    drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
    inherit(drafter, teacher, wide=0)
    drafter.to(teacher.device)
    drafter.embed_tokens.weight = nn.Parameter(teacher.embedding, requires_grad=False)
    drafter.lm_head.weight = nn.Parameter(teacher.head, requires_grad=False)
    return drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle2Lesson(EagleLesson):
    """features_BSH: the target's last hidden state of token j + 1. weight: of the cross-entropy."""

    features_BSH: Tensor
    weight: float

    def score(self, drafter: AnyEagle, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Smooth L1 with the feature and cross-entropy with what follows from it; accuracy."""
        counted_BS = shift(self.counted_BS, step)
        rows = counted_BS.flatten().nonzero().flatten()
        found_RH = hidden_BSH.flatten(0, 1)[rows]
        wanted_RH = shift(self.features_BSH, step).flatten(0, 1)[rows]
        near_R = F.smooth_l1_loss(found_RH.float(), wanted_RH.float(), reduction="none").mean(-1)
        logits_RV = drafter.logits(found_RH)
        with torch.no_grad():
            said_RV = drafter.logits(wanted_RH.to(found_RH.dtype)).softmax(-1)
        losses_R = near_R + self.weight * F.cross_entropy(logits_RV, said_RV, reduction="none")
        right_R = logits_RV.argmax(-1) == shift(self.best_BS, step).flatten()[rows]
        accuracy = right_R.sum() / counted_BS.sum().clamp_min(1e-6)
        return losses_R.sum() / counted_BS.numel(), accuracy


class Eagle2Course(EagleCourse):
    """See `EagleCourse`."""

    name = "eagle2"

    def __init__(self, settings: Eagle2Training, teacher: Teacher) -> None:
        super().__init__(settings, teacher, new_drafter(settings, teacher))
        self.weight = settings.classification

    def made(
        self, told: Told, common: dict[str, Tensor], noise: torch.Generator | None
    ) -> Eagle2Lesson:
        taps_BSF = told.features_BSF
        if noise is not None:
            coins = torch.rand(taps_BSF.shape, generator=noise).to(taps_BSF.device)
            taps_BSF = taps_BSF + (coins - 0.5) * (2 * NOISE * 512 / taps_BSF.shape[1])
        features_BSH = shift(told.features_BSF)
        return Eagle2Lesson(
            taps_BSF=taps_BSF, features_BSH=features_BSH, weight=self.weight, **common
        )


def train_eagle2(settings: Eagle2Training, source: LessonSource) -> Path:
    """Train, saving now and then; returns the folder of the exported head."""
    teacher = load_teacher(settings)
    return train(settings, Eagle2Course(settings, teacher), source(settings, teacher))
