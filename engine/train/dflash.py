"""Training of a DFlash drafter: many blocks of each sequence at once (arXiv 2602.06036, section 4).

Anchors are sampled among the assistant's tokens. Each starts a block [token, mask, mask, ...] that
sees the target's features before the anchor and itself, but no other block; row k predicts the
token at its own position. The arithmetic follows SpecForge (`dflash_family_model.py`). Shape
letters: S tokens and M blocks of a sequence, P rows of a block; keys of a row are [S context tokens
| M * P block rows], queries the M * P block rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.drafters.config import DFlashConfig, Reach, default_layer_ids
from ...models.drafters.dflash import DFlashDraftModel, TargetEnds
from ...models.layers import wide_logits
from ..errors import UsageError
from .data import TrainingBatch
from .dataset import HeldOutPrompt
from .loop import LossReport, Trainer
from .settings import DFlashTraining
from .teacher import Teacher, attend, copy_equal_, draw_


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a batch, whose sequences may hold several texts that share beginnings.

    anchors_BM: int64, places in their sequences. valid_BM: bool, False for padding blocks, which
    see nothing and count nothing. size: P. positions_BS: int64, of each token in its own text.
    visible_BSS: bool, True where token q (second axis) follows on token k (third axis) or is it.
    """

    anchors_BM: Tensor
    valid_BM: Tensor
    size: int
    positions_BS: Tensor
    visible_BSS: Tensor

    @property
    def length(self) -> int:
        return self.positions_BS.shape[1]

    @property
    def places_BMP(self) -> Tensor:
        """int64, what the blocks' rows draft; they may run past the sequence's end."""
        return self.anchors_BM[:, :, None] + self._rows_P

    @property
    def positions_BMP(self) -> Tensor:
        return self.positions_BS.gather(1, self.anchors_BM)[:, :, None] + self._rows_P

    @property
    def _rows_P(self) -> Tensor:
        return torch.arange(self.size, device=self.anchors_BM.device)

    def at(self, value_BS: Tensor) -> Tensor:
        """A value of every token -> [B, M, P]; past the end, the last token's."""
        index_BMP = self.places_BMP.clamp(max=self.length - 1)
        return value_BS.gather(1, index_BMP.flatten(1)).view(index_BMP.shape)

    def noise(self, input_ids_BS: Tensor, mask_token_id: int) -> Tensor:
        """int64 [B, M * P]: each anchor's token, then masks; a padding block is all masks."""
        tokens_BMP = torch.full_like(self.positions_BMP, mask_token_id)
        anchor_BM = input_ids_BS.gather(1, self.anchors_BM)
        tokens_BMP[:, :, 0] = anchor_BM.where(self.valid_BM, mask_token_id)
        return tokens_BMP.flatten(1)

    def counted(self, loss_mask_BS: Tensor) -> Tensor:
        """bool [B, M, P]: rows that are drafted, behind the anchor in its text, the assistant's."""
        place_BMP = self.places_BMP.clamp(max=self.length - 1)
        pair_BMP = place_BMP * self.length + self.anchors_BM[:, :, None]
        follows_BN = self.visible_BSS.flatten(1).gather(1, pair_BMP.flatten(1))
        near_BMP = self.at(self.positions_BS) == self.positions_BMP
        inside_BMP = (self.places_BMP < self.length) & near_BMP & follows_BN.view(place_BMP.shape)
        drafted_BMP = self.valid_BM[:, :, None] & (self._rows_P > 0)
        return (self.at(loss_mask_BS) > 0.5) & inside_BMP & drafted_BMP


def sample_anchors(loss_mask_BS: Tensor, count: int, coins_BC: Tensor) -> tuple[Tensor, Tensor]:
    """`Blocks.anchors_BM` and `Blocks.valid_BM`: assistant tokens that an assistant token follows,
    those with the lowest coins (uniform, for each token but the last). ValueError without any."""
    assistant_BS = loss_mask_BS > 0.5
    candidates_BC = assistant_BS[:, :-1] & assistant_BS[:, 1:]
    count_B1 = candidates_BC.sum(1, keepdim=True)
    width = min(count, int(count_B1.max()))
    if width == 0:
        raise ValueError("no sequence of the batch has two consecutive supervised tokens")
    order_BC = coins_BC.masked_fill(~candidates_BC, 2.0).argsort(1)
    valid_BM = torch.arange(width, device=loss_mask_BS.device) < count_B1
    last = loss_mask_BS.shape[1]  # sorts padding behind every anchor
    anchors_BM = order_BC[:, :width].where(valid_BM, last).sort(1).values
    return anchors_BM.where(valid_BM, 0), valid_BM


def block_mask(blocks: Blocks, reach: Reach) -> Tensor:
    """bool [B, 1, M * P, S + M * P]: True where a row may attend. A window narrows the context
    only; no block is longer than it (`dflash_config`)."""
    size = blocks.size
    position_BQ1 = blocks.positions_BMP.flatten(1)[:, :, None]
    anchors_BM1 = blocks.anchors_BM[:, :, None]
    context_S = torch.arange(blocks.length, device=anchors_BM1.device)
    text_BMS = blocks.visible_BSS.gather(1, anchors_BM1.expand(-1, -1, blocks.length))
    before_BQS = (text_BMS & (context_S < anchors_BM1)).repeat_interleave(size, 1)
    if reach.window is not None:
        before_BQS &= position_BQ1 - blocks.positions_BS[:, None] < reach.window
    row_Q = torch.arange(position_BQ1.shape[1], device=position_BQ1.device)
    same_block_QQ = row_Q[:, None] // size == row_Q // size
    if reach.causal:
        same_block_QQ &= row_Q <= row_Q[:, None]
    visible_BQK = torch.cat((before_BQS, same_block_QQ.expand(len(before_BQS), -1, -1)), -1)
    valid_BQ1 = blocks.valid_BM.repeat_interleave(size, 1)[:, :, None]
    return (visible_BQK & valid_BQ1)[:, None]


GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # block size -> decay, from the paper


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """loss: loss_sum / weight. accuracy: share of counted rows whose best id is right."""

    loss: Tensor
    accuracy: Tensor
    loss_sum: Tensor
    weight: Tensor


def decay_of(block_size: int) -> float:
    """The paper's decay for the nearest block size."""
    return GAMMAS[min(GAMMAS, key=lambda size: abs(size - block_size))]


@dataclass(slots=True)
class OnlineDFlashModel:
    """The training forward of a drafter.

    num_anchors: blocks per sequence, sampled for every batch. gamma: row k has weight
    exp(-(k - 1) / gamma); infinity: no decay, None: `decay_of`. distillation: share of the target's
    distribution in a row's label; the rest is the token itself, as in the paper.
    """

    draft_model: DFlashDraftModel
    num_anchors: int = 512
    gamma: float | None = None
    distillation: float = 0.0

    def __call__(
        self,
        input_ids_BS: Tensor,
        hidden_states_BSF: Tensor,
        loss_mask_BS: Tensor,
        blocks: Blocks,
        teacher_BSH: Tensor | None = None,
    ) -> TrainingStep:
        """One step on sequences of int64 ids with the target's hidden states of `tap_ids`; the mask
        is 1 on the assistant's tokens. teacher_BSH: inputs of the target's head, to distil."""
        # Only counted rows: the head is the largest product.
        rows = blocks.counted(loss_mask_BS).flatten().nonzero().flatten()
        hidden_RH = self.hidden(input_ids_BS, hidden_states_BSF, blocks).flatten(0, 1)[rows]
        labels_R = blocks.at(input_ids_BS).flatten()[rows]
        head_VH = self.draft_model.ends.head_VH
        logits_RV = wide_logits(hidden_RH, head_VH.to(hidden_RH.dtype))
        losses_R = F.cross_entropy(logits_RV, labels_R, reduction="none")
        if teacher_BSH is not None:
            with torch.no_grad():
                # The target predicts a row's token after the token before it.
                before_BR = (blocks.places_BMP - 1).clamp(0, blocks.length - 1).flatten(1)
                first_B1 = blocks.length * torch.arange(len(before_BR), device=rows.device)[:, None]
                before_RH = teacher_BSH.flatten(0, 1)[(first_B1 + before_BR).flatten()[rows]]
                teacher_RV = wide_logits(before_RH.to(head_VH.dtype), head_VH).softmax(-1)
            soft_R = F.cross_entropy(logits_RV, teacher_RV, reduction="none")
            losses_R = torch.lerp(losses_R, soft_R, self.distillation)
        gamma = decay_of(blocks.size) if self.gamma is None else self.gamma
        decay_R = torch.exp(-(rows % blocks.size - 1) / gamma)
        loss_sum = (losses_R * decay_R).sum()
        weight = decay_R.sum()
        right = (logits_RV.argmax(-1) == labels_R).sum()
        tiny = torch.finfo(weight.dtype).tiny  # fixed blocks may count nothing
        accuracy = right / max(len(labels_R), 1)
        return TrainingStep(loss_sum / weight.clamp_min(tiny), accuracy, loss_sum, weight)

    def sample_blocks(
        self,
        loss_mask_BS: Tensor,
        positions_BS: Tensor,
        visible_BSS: Tensor,
        generator: torch.Generator,
    ) -> Blocks:
        """New blocks of a batch; the generator is on the CPU."""
        coins_BC = torch.rand(loss_mask_BS[:, 1:].shape, generator=generator)
        coins_BC = coins_BC.to(loss_mask_BS.device)
        anchors_BM, valid_BM = sample_anchors(loss_mask_BS, self.num_anchors, coins_BC)
        return Blocks(
            anchors_BM,
            valid_BM,
            size=self.draft_model.block_size,
            positions_BS=positions_BS,
            visible_BSS=visible_BSS,
        )

    def hidden(self, input_ids_BS: Tensor, hidden_states_BSF: Tensor, blocks: Blocks) -> Tensor:
        """The drafter's output [B, M * P, H] of all blocks."""
        draft = self.draft_model
        masks = {reach: block_mask(blocks, reach) for reach in set(draft.config.reaches)}
        context_RH = draft.fuse(hidden_states_BSF.flatten(0, 1))
        context_angles = draft.angles(blocks.positions_BS.flatten())
        block_angles = draft.angles(blocks.positions_BMP.flatten())
        x_NH = draft.embed(blocks.noise(input_ids_BS, draft.mask_token_id).flatten())
        for layer, reach in zip(draft.stack, draft.config.reaches, strict=True):
            _, *context_kv = layer.project(context_RH, context_angles)
            q, *block_kv = layer.project(layer.input_layernorm(x_NH), block_angles)
            keys, values = zip(context_kv, block_kv, strict=True)
            x_NH = layer.finish(x_NH, attend(q, keys, values, masks[reach][:, 0]))
        return torch.unflatten(draft.norm(x_NH), 0, (len(input_ids_BS), -1))


def drafter_config(settings: DFlashTraining, teacher: Teacher) -> DFlashConfig:
    """The drafter's shape: the target's width, heads and positions. Masks are the tokenizer's, else
    an unused row of the embedding, else the pad or end token."""
    target = teacher.config
    ids = settings.layer_ids or default_layer_ids(target.num_layers, settings.layers)
    if not 0 <= min(ids) <= max(ids) < target.num_layers:
        raise UsageError(f"--target-layer-ids {ids}: the target has {target.num_layers} layers")
    tokenizer = teacher.tokenizer
    unused = len(tokenizer) if len(tokenizer) < target.vocab_size else None
    ends = (tokenizer.pad_token_id, tokenizer.eos_token_id, *teacher.stops)
    usable = (settings.mask_token_id, tokenizer.mask_token_id, unused, *ends)
    mask = next(int(token) for token in usable if token is not None)
    if not 0 <= mask < target.vocab_size:
        raise UsageError(f"--mask-token-id {mask}: the target has {target.vocab_size} tokens")
    changes = {"path": settings.out / "config.json", "intermediate_size": settings.intermediate}
    return DFlashConfig(
        **target.sizes() | changes,
        reaches=(Reach(),) * settings.layers,
        layer_ids=ids,
        block_size=settings.block_size,
        mask_token_id=mask,
        target_layers=target.num_layers,
    )


@torch.no_grad()
def new_drafter(settings: DFlashTraining, teacher: Teacher) -> DFlashDraftModel:
    """An untrained drafter; what has the shape of the target's last layers starts as a copy."""
    ends = TargetEnds(teacher.embedding, teacher.head)
    drafter = DFlashDraftModel(drafter_config(settings, teacher), ends)
    draw_(drafter.published(), settings.seed)
    target = teacher.model.base_model
    drafter.norm.weight.copy_(target.norm.weight)
    drafter.hidden_norm.weight.copy_(target.layers[-1].input_layernorm.weight)
    drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
    for layer, target_layer in zip(reversed(drafter.stack), reversed(target.layers), strict=False):
        copy_equal_(layer.published(), dict(target_layer.named_parameters()))
    return drafter.to(teacher.device)


class DFlashTrainer(Trainer):
    name = "dflash"
    model: DFlashDraftModel

    def __init__(self, settings: DFlashTraining, teacher: Teacher) -> None:
        super().__init__(settings, teacher, new_drafter(settings, teacher))
        self.online = OnlineDFlashModel(
            self.model, num_anchors=settings.num_anchors, distillation=settings.distillation
        )

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> LossReport:
        output = self.teacher.read(batch, self.model.tap_ids)
        written_BS = batch.written()
        blocks = self.online.sample_blocks(written_BS, batch.positions, batch.mask[:, 0], generator)
        with self.teacher.low_precision():
            step = self.online(
                batch.ids,
                output.features_BSF,
                written_BS,
                blocks,
                teacher_BSH=output.hidden_BSH if self.online.distillation else None,
            )
        return step.loss, {"accuracy": step.accuracy}

    def draft_hits(self, sample: HeldOutPrompt) -> Tensor:
        batch = sample.batch(self.teacher.device)
        features_BSF = self.teacher.read(batch, self.model.tap_ids, exact=True).features_BSF
        roots = torch.arange(sample.first, batch.ids.shape[1], device=batch.ids.device)[None]
        blocks = Blocks(
            roots,
            roots >= 0,
            size=self.model.block_size,
            positions_BS=batch.positions,
            visible_BSS=batch.mask[:, 0],
        )
        hidden_BQH = self.online.hidden(batch.ids, features_BSF, blocks)
        drafts_Q = self.model.logits(hidden_BQH[0]).argmax(-1)
        inside_MP = (blocks.places_BMP < blocks.length)[0]
        right_MP = (drafts_Q.view(inside_MP.shape) == blocks.at(batch.ids)[0]) & inside_MP
        before = right_MP.new_zeros(sample.first, right_MP.shape[1])
        return torch.cat((before, right_MP))[:, 1:]
