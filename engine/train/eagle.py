"""Training of EAGLE drafters: drafted steps, unrolled and scored by the target.

At step i, row j holds the drafter's feature for token j + i and the true token j + i + 1 and
predicts token j + i + 2. It sees the rows of step 0 that a causal mask allows and, of later steps,
only itself. The loss of EAGLE-1 and EAGLE-2 is the papers' (arXiv 2401.15077): the distance to the
target's next feature, and a share of the cross-entropy with the target's distribution for it; true
features get some noise. EAGLE-3 learns the target's distribution alone."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

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


@dataclass(frozen=True, slots=True)
class EagleInputs:
    """A batch, whose labels are the tokens behind each, with the target's outputs: of token j its
    tapped hidden states (taps_BSF), of token j + 1 the likeliest token after it (best_BS).
    goals_BSG: what row j learns: for EAGLE-1 and EAGLE-2 the target's last hidden state of token
    j + 1; for EAGLE-3 its distribution after it, over the draft vocabulary. counted_BS: float, 1
    where row j counts at step 0."""

    batch: TrainingBatch
    taps_BSF: Tensor
    best_BS: Tensor
    goals_BSG: Tensor
    counted_BS: Tensor


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Rows moved to the left along axis 1, zeros entering at the end."""
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1) if by else x


class EagleTrainer(Trainer):
    """Common to the trainers of all EAGLE drafters."""

    settings: EagleTraining
    model: Eagle | Eagle3
    noise = 0.0  # half the width of the features' uniform noise, for texts of 512 tokens

    @torch.no_grad()
    def __init__(
        self, settings: EagleTraining, teacher: Teacher, drafter: Eagle | Eagle3, wide: int = 0
    ) -> None:
        """A drafter with random weights; its layer becomes a copy of the target's last one where
        shapes are equal, behind `wide` columns of the projections' inputs."""
        draw_(drafter.published(), settings.seed)
        drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
        source = teacher.layer_weights(-1)
        if (norm_H := source.pop("input_layernorm.weight", None)) is not None:
            source["hidden_norm.weight"] = norm_H
        copy_equal_(drafter.layer.published(), source, skip=wide)
        drafter.to(teacher.device)
        drafter.embed_tokens.weight = nn.Parameter(teacher.embedding, requires_grad=False)
        super().__init__(settings, teacher, drafter)

    @abstractmethod
    def goals(self, output: TeacherOutput) -> Tensor:
        """`EagleInputs.goals_BSG`."""

    @abstractmethod
    def score(self, inputs: EagleInputs, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss of a step's features, and the share of counted rows whose best id is right."""

    def inputs(
        self, batch: TrainingBatch, *, exact: bool = False, noise: torch.Generator | None = None
    ) -> EagleInputs:
        """A batch with the target's outputs, in float32 if `exact`. Branches of a sample share the
        row of the trunk's last token and their first one: the same for all after an outline."""
        output = self.teacher.read(batch, self.model.config.taps, best=True, exact=exact)
        taps_BSF = output.features_BSF
        with torch.no_grad(), self.teacher.low_precision():
            goals_BSG = self.goals(output)
        if noise is not None and self.noise:  # less for longer texts
            coins = torch.rand(taps_BSF.shape, generator=noise).to(taps_BSF.device)
            taps_BSF = taps_BSF + (coins - 0.5) * (2 * self.noise * 512 / taps_BSF.shape[1])
        best_BS = shift(output.best_BS)
        counted_BS = (shift(batch.weights) >= GOLD).float()
        return EagleInputs(batch, taps_BSF, best_BS, goals_BSG, counted_BS=counted_BS)

    def unroll(self, inputs: EagleInputs) -> Iterator[Tensor]:
        """The hidden states of all rows after each step, [B, S, H]."""
        drafter = self.model
        layer = drafter.layer
        keys: list[Tensor] = []  # one [B * S, kv_heads, d] per step
        values: list[Tensor] = []
        hidden_BSH = drafter.fuse(inputs.taps_BSF)
        shape = hidden_BSH.shape
        visible_BSS = inputs.batch.mask[:, 0]
        same_BSS = torch.eye(shape[1], device=visible_BSS.device).bool().expand_as(visible_BSS)
        # Of step 0 the visible rows and, of later steps, the row itself.
        masks = [visible_BSS] + [same_BSS] * (self.settings.unroll - 1)
        for step in range(self.settings.unroll):
            tokens_BS = shift(inputs.batch.labels, step)
            angles = drafter.angles((inputs.batch.positions + step).flatten())
            embedded_NH = drafter.embed_tokens(tokens_BS.flatten()).to(drafter.fc.weight.dtype)
            mixed_NW, residual_NH = drafter.mix(embedded_NH, hidden_BSH.flatten(0, 1))
            q, k, v = layer.project(mixed_NW, angles)
            keys.append(k)
            values.append(v)
            attended_NW = attend(q, keys, values, torch.cat(masks[: step + 1], -1))
            hidden_BSH = drafter.to_features(layer.finish(residual_NH, attended_NW)).view(shape)
            yield hidden_BSH

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> LossReport:
        inputs = self.inputs(batch, noise=generator)
        with self.teacher.low_precision():
            steps = enumerate(self.unroll(inputs))
            scores = [self.score(inputs, hidden_BSH, step) for step, hidden_BSH in steps]
        losses_K, accuracies_K = (torch.stack(part) for part in zip(*scores, strict=True))
        decay_K = self.settings.decay ** torch.arange(len(losses_K), device=losses_K.device)
        loss = (losses_K * decay_K).sum() / inputs.counted_BS.mean().clamp_min(1e-3)
        by_step = {f"acc{i}": accuracy for i, accuracy in enumerate(accuracies_K)}
        tau = 1.0 + accuracies_K.cumprod(0).sum()  # of a chain with these drafts
        return loss, {"accuracy": accuracies_K[0], **by_step, "tau": tau}

    def draft_hits(self, sample: HeldOutPrompt) -> Tensor:
        inputs = self.inputs(sample.batch(self.teacher.device), exact=True)
        labels_S = inputs.batch.labels[0]
        right_SK = labels_S.new_zeros((len(labels_S), self.settings.unroll), dtype=torch.bool)
        # Each step drafts what a chain would draft if its earlier drafts were right.
        for step, hidden_BSH in enumerate(self.unroll(inputs)):
            drafts_S = self.model.to_target(self.model.logits(hidden_BSH[0]).argmax(-1))
            after_S = labels_S[step + 1 :]  # row j drafts after the root token j + 1
            right_SK[1 : len(after_S) + 1, step] = drafts_S[: len(after_S)] == after_S
        return right_SK


def drafter_sizes(settings: Eagle2Training | Eagle3Training, teacher: Teacher) -> dict[str, Any]:
    """The fields that both configurations share: the target's width and heads."""
    rope = RopeConfig("default", teacher.config.rope.theta, {}, teacher.config.rope.trained)
    changes = {"path": settings.out / "config.json", "intermediate_size": settings.intermediate}
    return teacher.config.sizes() | changes | {"rope": rope}


class Eagle2Trainer(EagleTrainer):
    """Trains an EAGLE-1 or EAGLE-2 head, which has the target's embedding and head."""

    name = "eagle2"
    settings: Eagle2Training
    noise = 0.1

    def __init__(self, settings: Eagle2Training, teacher: Teacher) -> None:
        sizes = drafter_sizes(settings, teacher)
        head = Eagle(EagleConfig(**sizes, taps=(teacher.config.num_layers,)))
        super().__init__(settings, teacher, head)
        head.lm_head.weight = nn.Parameter(teacher.head, requires_grad=False)

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
        return losses_R.sum() / counted_BS.numel(), right_R.sum() / counted_BS.sum().clamp_min(1e-6)


class Eagle3Trainer(EagleTrainer):
    """Trains a drafter of some ids (increasing, int64), whose head starts from the target's."""

    name = "eagle3"
    settings: Eagle3Training
    model: Eagle3

    @torch.no_grad()
    def __init__(self, settings: Eagle3Training, teacher: Teacher, ids: Tensor) -> None:
        target = teacher.config
        config = Eagle3Config(
            **drafter_sizes(settings, teacher),
            draft_vocab_size=settings.draft_vocabulary,
            target_hidden_size=target.hidden_size,
            taps=default_taps(target.num_layers),
        )
        drafter = Eagle3(config)
        super().__init__(settings, teacher, drafter, wide=target.hidden_size)
        self.head_DH = teacher.head[ids]
        drafter.lm_head.weight.copy_(self.head_DH)
        drafter.norm.weight.copy_(teacher.norm_H)
        drafter.d2t.copy_(ids - torch.arange(len(ids)))
        drafter.t2d.fill_(False)[ids] = True

    @classmethod
    def create(cls, settings: Eagle3Training, teacher: Teacher, dataset: Dataset) -> Self:
        size = settings.draft_vocabulary
        whole = teacher.config.vocab_size
        file = settings.checkpoint
        if size > whole:
            raise UsageError(f"--draft-vocabulary {size}: the target has {whole}")
        if not (settings.resume and file.exists()):
            return cls(settings, teacher, frequent_ids(dataset, size, whole))
        ids: Tensor = load_checkpoint(file)["model"].get("t2d", torch.zeros(0)).nonzero().flatten()
        if len(ids) != size:
            raise UsageError(f"{file}: of a training that drafts {len(ids)} different ids")
        return cls(settings, teacher, ids)

    def goals(self, output: TeacherOutput) -> Tensor:
        return F.linear(shift(output.hidden_BSH), self.head_DH).softmax(-1)

    def score(self, inputs: EagleInputs, hidden_BSH: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the target's distribution over the draft vocabulary."""
        best_BS = shift(inputs.best_BS, step)
        counted_BS = shift(inputs.counted_BS, step)
        draftable_BS = self.model.t2d[best_BS] * counted_BS
        rows = draftable_BS.flatten().nonzero().flatten()  # nothing else contributes
        teacher_RD = inputs.goals_BSG.flatten(0, 1)[rows + step].float()
        logits_RD = self.model.logits(hidden_BSH.flatten(0, 1)[rows])
        losses_R = -(teacher_RD * F.log_softmax(logits_RD, -1)).sum(-1)
        weights_R = draftable_BS.flatten()[rows]
        right_R = self.model.to_target(logits_RD.argmax(-1)) == best_BS.flatten()[rows]
        accuracy = (right_R * weights_R).sum() / counted_BS.sum().clamp_min(1e-6)
        return (losses_R * weights_R).sum() / draftable_BS.numel(), accuracy.detach()
