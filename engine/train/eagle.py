"""What the trainings of all EAGLE drafters share: drafted steps, unrolled and scored by the target.

At step i, row j holds the drafter's own feature for token j + i beside the true token j + i + 1 and
predicts token j + i + 2. It sees the rows of step 0 that a causal mask allows and, of later steps,
only itself: the tree mask of an unrolled chain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.drafters.eagle import Eagle, Eagle3
from .data import GOLD, TrainingBatch, by_head
from .files import export_drafter
from .lessons import HeldOutPrompt
from .loop import LossReport
from .optim import MuonAdamW
from .settings import EagleTraining
from .teacher import Teacher, Told

AnyEagle = Eagle | Eagle3


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleLesson(ABC):
    """What the target said about a batch of sequences; all but `taps` already shifted by one.

    taps_BSF: the target's tapped hidden states of token j.
    tokens_BS: int64, token j + 1.
    best_BS: int64, the target's likeliest token after token j + 1.
    counted_BS: float, 1 where row j counts at step 0.
    positions_BS: int64, the position of token j.
    visible_BSS: bool, True where row j (second axis) sees row k (third axis) of step 0.
    """

    taps_BSF: Tensor
    tokens_BS: Tensor
    best_BS: Tensor
    counted_BS: Tensor
    positions_BS: Tensor
    visible_BSS: Tensor

    @abstractmethod
    def score(self, drafter: AnyEagle, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss of a step's features, and the share of counted rows whose best id is right."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """losses: one scalar per step; accuracies: share of counted rows whose best id is right."""

    losses: tuple[Tensor, ...]
    accuracies: tuple[Tensor, ...]

    def total(self, decay: float = 0.8) -> Tensor:
        """Sum of decay ** i times the loss of step i."""
        weighted = [loss * decay**i for i, loss in enumerate(self.losses)]
        return torch.stack(weighted).sum()


def chain_tau(accuracies: list[Tensor]) -> Tensor:
    """Tokens per verification of a chain of drafts, from the accuracy of each step."""
    return 1.0 + torch.stack(list(accumulate(accuracies, mul))).sum()


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Rows moved to the left along axis 1, zeros entering at the end."""
    if by == 0:
        return x
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


def rehearse(drafter: AnyEagle, lesson: EagleLesson, steps: int) -> LossTerms:
    """Unroll `steps` drafted steps; gradients flow through the fed-back features."""
    unrolled = enumerate(unroll(drafter, lesson, steps))
    scores = [lesson.score(drafter, hidden_BSH, step) for step, hidden_BSH in unrolled]
    return LossTerms(*zip(*scores, strict=True))


def unroll(drafter: AnyEagle, lesson: EagleLesson, steps: int) -> Iterator[Tensor]:
    """The hidden states of all rows after each step, [B, S, H]."""
    keys: list[Tensor] = []  # one [B, heads, S, d] per step
    values: list[Tensor] = []
    visible = lesson.visible_BSS
    layer = drafter.layer
    zeros_BSS = torch.zeros(visible.shape, device=visible.device)
    bias_B1SS = zeros_BSS.masked_fill(~visible, float("-inf"))[:, None]
    hidden_BSH = drafter.fuse(lesson.taps_BSF)
    shape = hidden_BSH.shape
    for step in range(steps):
        tokens_BS = shift(lesson.tokens_BS, step)
        angles = drafter.angles((lesson.positions_BS + step).flatten())
        embedded_NH = drafter.embed_tokens(tokens_BS.flatten()).to(drafter.fc.weight.dtype)
        mixed_NW, residual_NH = drafter.mix(embedded_NH, hidden_BSH.flatten(0, 1))
        q, k, v = layer.self_attn.project(mixed_NW, angles)
        groups = q.shape[1] // k.shape[1]
        keys.append(by_head(k.repeat_interleave(groups, 1), shape[0]))
        values.append(by_head(v.repeat_interleave(groups, 1), shape[0]))
        attended_BhSd = _attend(by_head(q, shape[0]), keys, values, bias_B1SS)
        attended_NW = attended_BhSd.transpose(1, 2).flatten(2).flatten(0, 1)
        hidden_BSH = drafter.to_features(layer.finish(residual_NH, attended_NW)).view(shape)
        yield hidden_BSH


def _attend(q_BhSd: Tensor, keys: list[Tensor], values: list[Tensor], bias_B1SS: Tensor) -> Tensor:
    """One softmax over the visible rows of step 0 and, of later steps, the row itself."""
    scale = q_BhSd.shape[-1] ** -0.5
    scores = [(q_BhSd @ keys[0].transpose(-1, -2)).float() * scale + bias_B1SS]
    scores += [(q_BhSd * k).sum(-1, keepdim=True).float() * scale for k in keys[1:]]
    weights = torch.cat(scores, -1).softmax(-1).to(values[0].dtype)
    length = q_BhSd.shape[2]
    out = weights[..., :length] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + weights[..., length + i, None] * value
    return out


@torch.no_grad()
def inherit(drafter: AnyEagle, teacher: Teacher, wide: int) -> None:
    """The layer begins as the target's last; what has another shape begins as chance has it.

    Args:
        wide: columns of the projections' inputs that stand before what the target's read.
    """
    theirs = dict(teacher.model.base_model.layers[-1].named_parameters())
    theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight")
    for name, own in drafter.layer.named_parameters():
        if (other := theirs.get(name)) is None:
            continue
        part = own[:, wide:] if wide and name.split(".")[1][0] in "qkv" else own
        if part.shape == other.shape:
            part.copy_(other)


class EagleCourse(ABC):
    """See `loop.Course`."""

    name: str

    def __init__(self, settings: EagleTraining, teacher: Teacher, model: AnyEagle) -> None:
        self.settings = settings
        self.teacher = teacher
        self.model = model
        self.optimizer = MuonAdamW(model, settings.lr, settings.head_lr)

    @abstractmethod
    def made(
        self, told: Told, common: dict[str, Tensor], noise: torch.Generator | None
    ) -> EagleLesson:
        """A lesson of what the target told; `common` is what all lessons hold."""

    def lesson(
        self, batch: TrainingBatch, *, exact: bool = False, noise: torch.Generator | None = None
    ) -> EagleLesson:
        """What the target says about a batch of packed rows.

        Branches of one sample share the row that pairs the trunk's end with their first token;
        after an outline that token is the same for all.

        Args:
            exact: hidden states in float32, as in a run.
            noise: where that of the features comes from, if a kind of drafter wants any.
        """
        told = self.teacher.look(batch, self.model.config.taps, best=True, exact=exact)
        common = {
            "tokens_BS": batch.labels,
            "best_BS": shift(told.best_BS),
            "counted_BS": (shift(batch.weights) >= GOLD).float(),
            "positions_BS": batch.positions,
            "visible_BSS": batch.mask[:, 0],
        }
        with torch.no_grad(), self.teacher.low_precision():
            return self.made(told, common, noise)

    def teach(self, batch: TrainingBatch, draw: torch.Generator) -> LossReport:
        lesson = self.lesson(batch, noise=draw)
        with self.teacher.low_precision():
            verdict = rehearse(self.model, lesson, self.settings.unroll)
        loss = verdict.total(self.settings.decay) / lesson.counted_BS.mean().clamp_min(1e-3)
        accuracies = list(verdict.accuracies)
        steps = {f"acc{i}": value for i, value in enumerate(accuracies)}
        figures = {"accuracy": accuracies[0], **steps, "tau": chain_tau(accuracies)}
        return loss, figures

    def hits(self, sample: HeldOutPrompt) -> Tensor:
        steps = self.settings.unroll
        lesson = self.lesson(sample.batch(self.teacher.device), exact=True)
        right_SK = lesson.tokens_BS.new_zeros((len(sample.ids), steps), dtype=torch.bool)
        # What is drafted at a step is what a chain of drafts would, if its earlier ones were right.
        for step, hidden_BSH in enumerate(unroll(self.model, lesson, steps)):
            drafts_S = self.model.to_target(self.model.logits(hidden_BSH[0]).argmax(-1))
            wanted_S = lesson.tokens_BS[0, step + 1 :]  # row j drafts behind the root token j + 1
            right_SK[1 : len(wanted_S) + 1, step] = drafts_S[: len(wanted_S)] == wanted_S
        return right_SK

    def export(self, out: Path) -> None:
        export_drafter(self.model, out)


def untrained(drafter: AnyEagle, seed: int) -> None:
    """Weights as chance has them; those of `ends` are the target's and come later."""
    torch.manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
        elif parameter.ndim == 1:
            nn.init.ones_(parameter)
        elif name not in drafter.ends:
            nn.init.normal_(parameter, std=0.02)
