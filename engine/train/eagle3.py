"""Training of an EAGLE-3 drafter: a few drafted steps unrolled, each scored by the target.

At step i, row j holds the drafter's own feature for token j + i beside the true token j + i + 1 and
predicts token j + i + 2. It sees the rows of step 0 that a causal mask allows and, of later steps,
only itself: the tree mask of an unrolled chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.drafters.eagle import Eagle3
from ...models.drafters.eagle_config import Eagle3Config, default_taps
from ...models.rope_config import RopeConfig
from ..errors import UsageError
from .data import GOLD, TrainingBatch, by_head
from .files import export_drafter, load_checkpoint
from .lessons import HeldOutPrompt, Lessons, LessonSource, frequent_ids
from .loop import LossReport, train
from .optim import MuonAdamW
from .settings import Eagle3Training
from .teacher import Teacher, load_teacher

WIDE = [f"self_attn.{name}_proj.weight" for name in "qkv"]  # they read the embedding too


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
    inherit(drafter, teacher)
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.t2d.fill_(False)[ids] = True
    drafter.to(teacher.device)
    drafter.embed_tokens.weight = nn.Parameter(teacher.embedding, requires_grad=False)
    return drafter


@torch.no_grad()
def inherit(drafter: Eagle3, teacher: Teacher) -> None:
    """The layer begins as the target's last, which reads the last tap, beside the embedding.

    What has another shape than the target's begins as chance has it.
    """
    target, mine = teacher.model.base_model, drafter.midlayer
    theirs = dict(target.layers[-1].named_parameters())
    theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight")
    drafter.norm.weight.copy_(target.norm.weight)
    drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
    for name, own in mine.named_parameters():
        other, wide = theirs.get(name, own), name in WIDE
        part = own[:, -other.shape[1] :] if wide else own  # behind the embedding
        if part.shape == other.shape:
            part.copy_(other)


def chain_tau(accuracies: list[Tensor]) -> Tensor:
    """Tokens per verification of a chain of drafts, from the accuracy of each step."""
    return 1.0 + torch.stack(list(accumulate(accuracies, mul))).sum()


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target said about a batch of sequences; all but `taps` already shifted by one.

    taps_BSF: the target's tapped hidden states of token j.
    tokens_BS: int64, token j + 1.
    wanted_BSD: what the target would say after token j + 1, its softmax over the draft vocabulary.
    best_BS: int64, its likeliest token there, of its whole vocabulary.
    counted_BS: float, 1 where row j counts at step 0.
    positions_BS: int64, the position of token j.
    visible_BSS: bool, True where row j (second axis) sees row k (third axis) of step 0.
    """

    taps_BSF: Tensor
    tokens_BS: Tensor
    wanted_BSD: Tensor
    best_BS: Tensor
    counted_BS: Tensor
    positions_BS: Tensor
    visible_BSS: Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """losses: one scalar per step; accuracies: share of counted rows whose best id is right."""

    losses: tuple[Tensor, ...]
    accuracies: tuple[Tensor, ...]

    def total(self, decay: float = 0.8) -> Tensor:
        """Sum of decay ** i times the loss of step i."""
        weighted = [loss * decay**i for i, loss in enumerate(self.losses)]
        return torch.stack(weighted).sum()


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Rows moved to the left along axis 1, zeros entering at the end."""
    if by == 0:
        return x
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


def rehearse(drafter: Eagle3, lesson: Lesson, steps: int) -> LossTerms:
    """Unroll `steps` drafted steps; gradients flow through the fed-back features."""
    unrolled = enumerate(unroll(drafter, lesson, steps))
    scores = [_score(drafter, hidden_BSH, lesson, step) for step, hidden_BSH in unrolled]
    return LossTerms(*zip(*scores, strict=True))


def _score(drafter: Eagle3, hidden_BSH: Tensor, lesson: Lesson, step: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the target's distribution over the draft vocabulary, and accuracy."""
    best_BS, counted_BS = shift(lesson.best_BS, step), shift(lesson.counted_BS, step)
    known_BS = drafter.t2d[best_BS] * counted_BS
    rows = known_BS.flatten().nonzero().flatten()  # nothing else contributes
    wanted_RD = lesson.wanted_BSD.flatten(0, 1)[rows + step].float()
    logits_RD = drafter.logits(hidden_BSH.flatten(0, 1)[rows])
    losses_R = -(wanted_RD * F.log_softmax(logits_RD, -1)).sum(-1)
    weights_R = known_BS.flatten()[rows]
    right_R = drafter.to_target(logits_RD.argmax(-1)) == best_BS.flatten()[rows]
    accuracy = (right_R * weights_R).sum() / counted_BS.sum().clamp_min(1e-6)
    return (losses_R * weights_R).sum() / known_BS.numel(), accuracy.detach()


def unroll(drafter: Eagle3, lesson: Lesson, steps: int) -> Iterator[Tensor]:
    """The hidden states of all rows after each step, [B, S, H]."""
    keys: list[Tensor] = []  # one [B, heads, S, d] per step
    values: list[Tensor] = []
    visible = lesson.visible_BSS
    zeros_BSS = torch.zeros(visible.shape, device=visible.device)
    bias_B1SS = zeros_BSS.masked_fill(~visible, float("-inf"))[:, None]
    hidden_BSH = drafter.fuse(lesson.taps_BSF)
    shape = hidden_BSH.shape
    for step in range(steps):
        tokens_BS = shift(lesson.tokens_BS, step)
        angles = drafter.angles((lesson.positions_BS + step).flatten())
        embedded_NH = drafter.embed_tokens(tokens_BS.flatten()).to(drafter.fc.weight.dtype)
        mixed_NW, residual_NH = drafter.midlayer.mix(embedded_NH, hidden_BSH.flatten(0, 1))
        q, k, v = drafter.midlayer.self_attn.project(mixed_NW, angles)
        groups = q.shape[1] // k.shape[1]
        keys.append(by_head(k.repeat_interleave(groups, 1), shape[0]))
        values.append(by_head(v.repeat_interleave(groups, 1), shape[0]))
        attended_BhSd = _attend(by_head(q, shape[0]), keys, values, bias_B1SS)
        attended_NW = attended_BhSd.transpose(1, 2).flatten(2).flatten(0, 1)
        out_NH = drafter.midlayer.finish(residual_NH, attended_NW)
        hidden_BSH = (drafter.norm(out_NH) if drafter.config.norm_output else out_NH).view(shape)
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


class Eagle3Course:
    """See `loop.Course`."""

    name = "eagle3"

    def __init__(self, settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> None:
        self.settings, self.teacher = settings, teacher
        self.model = new_drafter(settings, teacher, ids)
        self.head_DH = teacher.head[ids]
        self.optimizer = MuonAdamW(self.model, settings.lr, settings.head_lr)

    def lesson(self, batch: TrainingBatch, *, exact: bool = False) -> Lesson:
        """What the target says about a batch of packed rows.

        Branches of one sample share the row that pairs the trunk's end with their first token;
        after an outline that token is the same for all.

        Args:
            exact: hidden states in float32, as in a run.
        """
        taps = self.model.config.taps
        told = self.teacher.look(batch, taps, best=True, exact=exact)
        with torch.no_grad(), self.teacher.low_precision():
            wanted_BSD = F.linear(shift(told.hidden_BSH), self.head_DH).softmax(-1)
        return Lesson(
            taps_BSF=told.features_BSF,
            tokens_BS=batch.labels,
            wanted_BSD=wanted_BSD,
            best_BS=shift(told.best_BS),
            counted_BS=(shift(batch.weights) >= GOLD).float(),
            positions_BS=batch.positions,
            visible_BSS=batch.mask[:, 0],
        )

    def teach(self, batch: TrainingBatch, draw: torch.Generator) -> LossReport:
        lesson = self.lesson(batch)
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
