"""Training of EAGLE drafters: drafted steps, unrolled and scored by the target.

At step i, row j holds the drafter's feature for token j + i and the true token j + i + 1 and
predicts token j + i + 2. It sees the rows of step 0 that a causal mask allows and, of later steps,
only itself. The loss of EAGLE-1 and EAGLE-2 is the papers' (arXiv 2401.15077): the distance to the
target's next feature, and a share of the cross-entropy with the target's distribution for it; true
features get some noise. EAGLE-3 learns the target's distribution alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.config import RopeConfig
from ...models.drafters.config import Eagle3Config, EagleConfig, default_taps
from ...models.drafters.eagle import Eagle, Eagle3
from ..errors import UsageError
from .data import GOLD, TrainingBatch
from .dataset import Dataset, HeldOutPrompt, frequent_ids
from .loop import LossReport, Trainer, load_checkpoint
from .settings import Eagle2Training, Eagle3Training, EagleTraining
from .teacher import Teacher, TeacherOutput, attend, copy_equal_, draw_

AnyEagle = Eagle | Eagle3


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleInputs:
    """A batch with the target's outputs. Of token j: taps_BSF, its tapped hidden states, and its
    position, int64; of token j + 1: the token, int64, and the target's likeliest token after it.

    goals_BSG: what row j learns: for EAGLE-1 and EAGLE-2 the target's last hidden state of token
        j + 1; for EAGLE-3 its distribution after that token, over the draft vocabulary.
    counted_BS: float, 1 where row j counts at step 0. visible_BSS: bool, True where row j (second
        axis) sees row k (third axis) of step 0.
    """

    taps_BSF: Tensor
    tokens_BS: Tensor
    best_BS: Tensor
    goals_BSG: Tensor
    counted_BS: Tensor
    positions_BS: Tensor
    visible_BSS: Tensor


Score = Callable[[EagleInputs, Tensor, int], tuple[Tensor, Tensor]]
"""score(inputs, hidden_BSH, step) -> the loss of a step's features, and the share of counted rows
whose best id is right."""


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Rows moved to the left along axis 1, zeros entering at the end."""
    if by == 0:
        return x
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


def unrolled_scores(
    drafter: AnyEagle, inputs: EagleInputs, steps: int, score: Score
) -> tuple[Tensor, Tensor]:
    """The losses and the accuracies of drafted steps, [K] both."""
    unrolled = enumerate(unroll(drafter, inputs, steps))
    losses, accuracies = zip(*(score(inputs, x_BSH, k) for k, x_BSH in unrolled), strict=True)
    return torch.stack(losses), torch.stack(accuracies)


def decayed_sum(losses_K: Tensor, decay: float) -> Tensor:
    """Sum of decay ** k times the loss of step k."""
    return (losses_K * decay ** torch.arange(len(losses_K), device=losses_K.device)).sum()


def unroll(drafter: AnyEagle, inputs: EagleInputs, steps: int) -> Iterator[Tensor]:
    """The hidden states of all rows after each step, [B, S, H]."""
    keys: list[Tensor] = []  # one [B * S, kv_heads, d] per step
    values: list[Tensor] = []
    layer = drafter.layer
    hidden_BSH = drafter.fuse(inputs.taps_BSF)
    shape = hidden_BSH.shape
    visible_BSS = inputs.visible_BSS
    same_BSS = torch.eye(shape[1], device=visible_BSS.device).bool().expand_as(visible_BSS)
    # Of step 0 the visible rows and, of later steps, the row itself.
    masks = [visible_BSS] + [same_BSS] * (steps - 1)
    for step in range(steps):
        tokens_BS = shift(inputs.tokens_BS, step)
        angles = drafter.angles((inputs.positions_BS + step).flatten())
        embedded_NH = drafter.embed_tokens(tokens_BS.flatten()).to(drafter.fc.weight.dtype)
        mixed_NW, residual_NH = drafter.mix(embedded_NH, hidden_BSH.flatten(0, 1))
        q, k, v = layer.project(mixed_NW, angles)
        keys.append(k)
        values.append(v)
        attended_NW = attend(q, keys, values, torch.cat(masks[: step + 1], -1))
        hidden_BSH = drafter.to_features(layer.finish(residual_NH, attended_NW)).view(shape)
        yield hidden_BSH


class EagleTrainer(Trainer):
    """Common to the trainers of all EAGLE drafters."""

    settings: EagleTraining
    model: AnyEagle
    noise = 0.0  # half the width of the features' uniform noise, for texts of 512 tokens

    @abstractmethod
    def goals(self, output: TeacherOutput) -> Tensor:
        """`EagleInputs.goals_BSG`."""

    @abstractmethod
    def score(self, inputs: EagleInputs, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """See `Score`."""

    def inputs(
        self, batch: TrainingBatch, *, exact: bool = False, noise: torch.Generator | None = None
    ) -> EagleInputs:
        """A batch of packed rows with the target's outputs, in float32 if `exact`. Branches of one
        sample share the row that pairs the trunk's last token with their first token, which is the
        same for all after an outline."""
        output = self.teacher.read(batch, self.model.config.taps, best=True, exact=exact)
        taps_BSF = output.features_BSF
        with torch.no_grad(), self.teacher.low_precision():
            goals_BSG = self.goals(output)
        if noise is not None and self.noise:  # less for longer texts
            coins = torch.rand(taps_BSF.shape, generator=noise).to(taps_BSF.device)
            taps_BSF = taps_BSF + (coins - 0.5) * (2 * self.noise * 512 / taps_BSF.shape[1])
        return EagleInputs(
            taps_BSF=taps_BSF,
            tokens_BS=batch.labels,
            best_BS=shift(output.best_BS),
            goals_BSG=goals_BSG,
            counted_BS=(shift(batch.weights) >= GOLD).float(),
            positions_BS=batch.positions,
            visible_BSS=batch.mask[:, 0],
        )

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> LossReport:
        inputs = self.inputs(batch, noise=generator)
        with self.teacher.low_precision():
            scores = unrolled_scores(self.model, inputs, self.settings.unroll, self.score)
        losses_K, accuracies_K = scores
        loss = decayed_sum(losses_K, self.settings.decay)
        steps = {f"acc{i}": accuracy for i, accuracy in enumerate(accuracies_K)}
        tau = 1.0 + accuracies_K.cumprod(0).sum()  # of a chain with these drafts
        figures = {"accuracy": accuracies_K[0], **steps, "tau": tau}
        return loss / inputs.counted_BS.mean().clamp_min(1e-3), figures

    def draft_hits(self, sample: HeldOutPrompt) -> Tensor:
        steps = self.settings.unroll
        inputs = self.inputs(sample.batch(self.teacher.device), exact=True)
        right_SK = inputs.tokens_BS.new_zeros((len(sample.ids), steps), dtype=torch.bool)
        # Each step drafts what a chain would draft if its earlier drafts were right.
        for step, hidden_BSH in enumerate(unroll(self.model, inputs, steps)):
            drafts_S = self.model.to_target(self.model.logits(hidden_BSH[0]).argmax(-1))
            labels_S = inputs.tokens_BS[0, step + 1 :]  # row j drafts after the root token j + 1
            right_SK[1 : len(labels_S) + 1, step] = drafts_S[: len(labels_S)] == labels_S
        return right_SK


def drafter_sizes(settings: Eagle2Training | Eagle3Training, teacher: Teacher) -> dict[str, Any]:
    """The fields that both configurations share: the target's width and heads."""
    target = teacher.config
    rope = RopeConfig("default", target.rope.theta, {}, target.rope.trained)
    changes = {"path": settings.out / "config.json", "intermediate_size": settings.intermediate}
    return target.sizes() | changes | {"rope": rope}


@torch.no_grad()
def initialise_(drafter: AnyEagle, teacher: Teacher, seed: int) -> None:
    """Random weights; the layer a copy of the target's last one where shapes are equal."""
    draw_(drafter.published(), seed)
    drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
    source = dict(teacher.model.base_model.layers[-1].named_parameters())
    source["hidden_norm.weight"] = source.pop("input_layernorm.weight")
    wide = drafter.config.hidden_size if isinstance(drafter, Eagle3) else 0
    copy_equal_(drafter.layer.published(), source, skip=wide)
    drafter.to(teacher.device)
    drafter.embed_tokens.weight = nn.Parameter(teacher.embedding, requires_grad=False)


class Eagle2Trainer(EagleTrainer):
    """Trains an EAGLE-1 or EAGLE-2 head, which has the target's embedding and head."""

    name = "eagle2"
    settings: Eagle2Training
    noise = 0.1

    def __init__(self, settings: Eagle2Training, teacher: Teacher) -> None:
        sizes = drafter_sizes(settings, teacher)
        head = Eagle(EagleConfig(**sizes, taps=(teacher.config.num_layers,)))
        initialise_(head, teacher, settings.seed)
        head.lm_head.weight = nn.Parameter(teacher.head, requires_grad=False)
        super().__init__(settings, teacher, head)

    def goals(self, output: TeacherOutput) -> Tensor:
        return shift(output.features_BSF)

    def score(self, inputs: EagleInputs, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Smooth L1 with the feature plus weighted cross-entropy with its logits."""
        counted_BS = shift(inputs.counted_BS, step)
        rows = counted_BS.flatten().nonzero().flatten()
        hidden_RH = hidden_BSH.flatten(0, 1)[rows]
        target_RH = shift(inputs.goals_BSG, step).flatten(0, 1)[rows]
        near_R = F.smooth_l1_loss(hidden_RH.float(), target_RH.float(), reduction="none").mean(-1)
        logits_RV = self.model.logits(hidden_RH)
        with torch.no_grad():
            teacher_RV = self.model.logits(target_RH.to(hidden_RH.dtype)).softmax(-1)
        distances_R = F.cross_entropy(logits_RV, teacher_RV, reduction="none")
        losses_R = near_R + self.settings.classification * distances_R
        right_R = logits_RV.argmax(-1) == shift(inputs.best_BS, step).flatten()[rows]
        accuracy = right_R.sum() / counted_BS.sum().clamp_min(1e-6)
        return losses_R.sum() / counted_BS.numel(), accuracy


def distribution_score(
    drafter: Eagle3, inputs: EagleInputs, hidden_BSH: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the target's distribution over the draft vocabulary; see `Score`."""
    best_BS = shift(inputs.best_BS, step)
    counted_BS = shift(inputs.counted_BS, step)
    draftable_BS = drafter.t2d[best_BS] * counted_BS
    rows = draftable_BS.flatten().nonzero().flatten()  # nothing else contributes
    teacher_RD = inputs.goals_BSG.flatten(0, 1)[rows + step].float()
    logits_RD = drafter.logits(hidden_BSH.flatten(0, 1)[rows])
    losses_R = -(teacher_RD * F.log_softmax(logits_RD, -1)).sum(-1)
    weights_R = draftable_BS.flatten()[rows]
    right_R = drafter.to_target(logits_RD.argmax(-1)) == best_BS.flatten()[rows]
    accuracy = (right_R * weights_R).sum() / counted_BS.sum().clamp_min(1e-6)
    return (losses_R * weights_R).sum() / draftable_BS.numel(), accuracy.detach()


@torch.no_grad()
def new_eagle3(settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> Eagle3:
    """An untrained drafter of these ids (increasing, int64); its head starts from the target's."""
    target = teacher.config
    config = Eagle3Config(
        **drafter_sizes(settings, teacher),
        draft_vocab_size=settings.draft_vocabulary,
        target_hidden_size=target.hidden_size,
        taps=default_taps(target.num_layers),
    )
    drafter = Eagle3(config)
    initialise_(drafter, teacher, settings.seed)
    drafter.lm_head.weight.copy_(teacher.head[ids])
    drafter.norm.weight.copy_(teacher.model.base_model.norm.weight)
    drafter.d2t.copy_(ids - torch.arange(len(ids)))
    drafter.t2d.fill_(False)[ids] = True
    return drafter


class Eagle3Trainer(EagleTrainer):
    name = "eagle3"
    settings: Eagle3Training
    model: Eagle3

    def __init__(self, settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> None:
        super().__init__(settings, teacher, new_eagle3(settings, teacher, ids))
        self.head_DH = teacher.head[ids]

    @classmethod
    def create(cls, settings: Eagle3Training, teacher: Teacher, dataset: Dataset) -> Eagle3Trainer:
        size = settings.draft_vocabulary
        whole = teacher.config.vocab_size
        if size > whole:
            raise UsageError(f"--draft-vocabulary {size}: the target has {whole}")
        if not (settings.resume and settings.checkpoint.exists()):
            return cls(settings, teacher, frequent_ids(dataset, size, whole))
        state = load_checkpoint(settings.checkpoint)
        ids: Tensor = state["model"].get("t2d", torch.zeros(0)).nonzero().flatten()
        if len(ids) != size:
            reason = f"of a training that drafts {len(ids)} different ids"
            raise UsageError(f"{settings.checkpoint}: {reason}")
        return cls(settings, teacher, ids)

    def goals(self, output: TeacherOutput) -> Tensor:
        return F.linear(shift(output.hidden_BSH), self.head_DH).softmax(-1)

    def score(self, inputs: EagleInputs, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return distribution_score(self.model, inputs, hidden_BSH, step)
