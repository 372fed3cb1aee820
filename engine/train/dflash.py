"""Training of a DFlash drafter: many blocks of each sequence at once (arXiv 2602.06036, section 4).

Anchors are sampled among the assistant's tokens. Each starts a block [token, mask, mask, ...] that
sees the target's features before the anchor and itself, but no other block; row k predicts the
token at its own position. The arithmetic follows SpecForge (`dflash_family_model.py`). Shape
letters: S tokens and M blocks of a sequence, P rows of a block; keys of a row are [S context tokens
| M * P block rows], queries the M * P block rows."""

from dataclasses import dataclass
from typing import NamedTuple

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

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # block size -> decay, from the paper


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a batch, whose sequences may hold several texts that share beginnings.
    anchors_BM: int64, places in their sequences. valid_BM: bool, False for padding blocks, which
    see nothing and count nothing. size: P."""

    batch: TrainingBatch
    anchors_BM: Tensor
    valid_BM: Tensor
    size: int

    @classmethod
    def sample(cls, batch: TrainingBatch, count: int, size: int, coins_BC: Tensor) -> "Blocks":
        """At most `count` blocks a sequence: of the assistant's tokens that another one follows
        those with the lowest coins (uniform, for each token but the last). ValueError if none."""
        written_BS = batch.written() > 0.5
        candidates_BC = written_BS[:, :-1] & written_BS[:, 1:]
        count_B1 = candidates_BC.sum(1, keepdim=True)
        width = min(count, int(count_B1.max()))
        if width == 0:
            raise ValueError("no sequence of the batch has two consecutive supervised tokens")
        order_BC = coins_BC.masked_fill(~candidates_BC, 2.0).argsort(1)
        valid_BM = torch.arange(width, device=written_BS.device) < count_B1
        last = written_BS.shape[1]  # sorts padding behind every anchor
        anchors_BM = order_BC[:, :width].where(valid_BM, last).sort(1).values
        return cls(batch, anchors_BM.where(valid_BM, 0), valid_BM, size)

    @property
    def length(self) -> int:
        return self.batch.ids.shape[1]

    @property
    def places_BMP(self) -> Tensor:
        """int64, what the blocks' rows draft; they may run past the sequence's end."""
        return self.anchors_BM[:, :, None] + self._rows_P

    @property
    def positions_BMP(self) -> Tensor:
        return self.batch.positions.gather(1, self.anchors_BM)[:, :, None] + self._rows_P

    @property
    def _rows_P(self) -> Tensor:
        return torch.arange(self.size, device=self.anchors_BM.device)

    def at(self, value_BS: Tensor) -> Tensor:
        """A value of every token -> [B, M, P]; past the end, the last token's."""
        index_BMP = self.places_BMP.clamp(max=self.length - 1)
        return value_BS.gather(1, index_BMP.flatten(1)).view(index_BMP.shape)

    def noise(self, mask_token_id: int) -> Tensor:
        """int64 [B, M * P]: each anchor's token, then masks; a padding block is all masks."""
        tokens_BMP = torch.full_like(self.positions_BMP, mask_token_id)
        anchor_BM = self.batch.ids.gather(1, self.anchors_BM)
        tokens_BMP[:, :, 0] = anchor_BM.where(self.valid_BM, mask_token_id)
        return tokens_BMP.flatten(1)

    def counted(self) -> Tensor:
        """bool [B, M, P]: rows that are drafted, behind the anchor in its text, the assistant's."""
        place_BMP = self.places_BMP.clamp(max=self.length - 1)
        pair_BMP = place_BMP * self.length + self.anchors_BM[:, :, None]
        follows_BN = self.batch.mask.flatten(1).gather(1, pair_BMP.flatten(1))
        near_BMP = self.at(self.batch.positions) == self.positions_BMP
        inside_BMP = (self.places_BMP < self.length) & near_BMP & follows_BN.view(place_BMP.shape)
        drafted_BMP = self.valid_BM[:, :, None] & (self._rows_P > 0)
        return (self.at(self.batch.written()) > 0.5) & inside_BMP & drafted_BMP

    def mask(self, reach: Reach) -> Tensor:
        """bool [B, M * P, S + M * P]: where a row may attend. Windows narrow the context only."""
        position_BQ1 = self.positions_BMP.flatten(1)[:, :, None]
        anchors_BM1 = self.anchors_BM[:, :, None]
        context_S = torch.arange(self.length, device=anchors_BM1.device)
        text_BMS = self.batch.mask[:, 0].gather(1, anchors_BM1.expand(-1, -1, self.length))
        before_BQS = (text_BMS & (context_S < anchors_BM1)).repeat_interleave(self.size, 1)
        if reach.window is not None:
            before_BQS &= position_BQ1 - self.batch.positions[:, None] < reach.window
        row_Q = torch.arange(position_BQ1.shape[1], device=position_BQ1.device)
        same_block_QQ = row_Q[:, None] // self.size == row_Q // self.size
        if reach.causal:
            same_block_QQ &= row_Q <= row_Q[:, None]
        visible_BQK = torch.cat((before_BQS, same_block_QQ.expand(len(before_BQS), -1, -1)), -1)
        return visible_BQK & self.valid_BM.repeat_interleave(self.size, 1)[:, :, None]

    def hidden(self, drafter: DFlashDraftModel, taps_BSF: Tensor) -> Tensor:
        """The drafter's output [B, M * P, H], from the target's hidden states of its `tap_ids`."""
        masks = {reach: self.mask(reach) for reach in set(drafter.config.reaches)}
        context_RH = drafter.fuse(taps_BSF.flatten(0, 1))
        context_angles = drafter.angles(self.batch.positions.flatten())
        block_angles = drafter.angles(self.positions_BMP.flatten())
        x_NH = drafter.embed(self.noise(drafter.mask_token_id).flatten())
        for layer, reach in zip(drafter.stack, drafter.config.reaches, strict=True):
            _, *context_kv = layer.project(context_RH, context_angles)
            q, *block_kv = layer.project(layer.input_layernorm(x_NH), block_angles)
            keys, values = zip(context_kv, block_kv, strict=True)
            x_NH = layer.finish(x_NH, attend(q, keys, values, masks[reach]))
        return torch.unflatten(drafter.norm(x_NH), 0, (len(taps_BSF), -1))


class BlockLoss(NamedTuple):
    """The mean over counted rows, whose weights sum to `weight`; accuracy: of their best ids."""

    loss: Tensor
    accuracy: Tensor
    weight: Tensor


def decay_of(block_size: int) -> float:
    """The paper's decay for the nearest block size."""
    return GAMMAS[min(GAMMAS, key=lambda size: abs(size - block_size))]


def block_loss(
    drafter: DFlashDraftModel,
    taps_BSF: Tensor,
    blocks: Blocks,
    *,
    distillation: float = 0.0,
    teacher_BSH: Tensor | None = None,
) -> BlockLoss:
    """The loss of one step; row k has weight exp(-(k - 1) / `decay_of`). distillation: share of the
    target's distribution in a row's label, from the inputs of its head (teacher_BSH)."""
    # Only counted rows: the head is the largest product.
    rows = blocks.counted().flatten().nonzero().flatten()
    labels_R = blocks.at(blocks.batch.ids).flatten()[rows]
    logits_RV = drafter.logits(blocks.hidden(drafter, taps_BSF).flatten(0, 1)[rows])
    losses_R = F.cross_entropy(logits_RV, labels_R, reduction="none")
    if teacher_BSH is not None:
        with torch.no_grad():
            # The target predicts a row's token after the token before it.
            before_BR = (blocks.places_BMP - 1).clamp(0, blocks.length - 1).flatten(1)
            first_B1 = blocks.length * torch.arange(len(before_BR), device=rows.device)[:, None]
            before_RH = teacher_BSH.flatten(0, 1)[(first_B1 + before_BR).flatten()[rows]]
            head_VH = drafter.ends.head_VH
            teacher_RV = wide_logits(before_RH.to(head_VH.dtype), head_VH).softmax(-1)
        soft_R = F.cross_entropy(logits_RV, teacher_RV, reduction="none")
        losses_R = torch.lerp(losses_R, soft_R, distillation)
    decay_R = torch.exp(-(rows % blocks.size - 1) / decay_of(blocks.size))
    weight = decay_R.sum()
    right = (logits_RV.argmax(-1) == labels_R).sum()
    # Fixed blocks may count nothing.
    loss = (losses_R * decay_R).sum() / weight.clamp_min(torch.finfo(weight.dtype).tiny)
    return BlockLoss(loss, right / max(len(labels_R), 1), weight)


class DFlashTrainer(Trainer):
    name = "dflash"
    settings: DFlashTraining
    model: DFlashDraftModel

    @torch.no_grad()
    def __init__(self, settings: DFlashTraining, teacher: Teacher) -> None:
        """A drafter with the target's width, heads and positions, of which what has the shape of
        the target's last layers starts as a copy. Masks are the tokenizer's, else an unused row of
        the embedding, else the pad or end token."""
        shape = teacher.config
        ids = settings.layer_ids or default_layer_ids(shape.num_layers, settings.layers)
        if not 0 <= min(ids) <= max(ids) < shape.num_layers:
            raise UsageError(f"--target-layer-ids {ids}: the target has {shape.num_layers} layers")
        tokenizer = teacher.tokenizer
        unused = len(tokenizer) if len(tokenizer) < shape.vocab_size else None
        ends = (tokenizer.pad_token_id, tokenizer.eos_token_id, *teacher.stops)
        usable = (settings.mask_token_id, tokenizer.mask_token_id, unused, *ends)
        mask = next(int(token) for token in usable if token is not None)
        if not 0 <= mask < shape.vocab_size:
            raise UsageError(f"--mask-token-id {mask}: the target has {shape.vocab_size} tokens")
        changes = {"path": settings.out / "config.json", "intermediate_size": settings.intermediate}
        config = DFlashConfig(
            **shape.sizes() | changes,
            reaches=(Reach(),) * settings.layers,
            layer_ids=ids,
            block_size=settings.block_size,
            mask_token_id=mask,
            target_layers=shape.num_layers,
        )
        drafter = DFlashDraftModel(config, TargetEnds(teacher.embedding, teacher.head))
        draw_(drafter.published(), settings.seed)
        drafter.norm.weight.copy_(teacher.norm_H)
        if (norm_H := teacher.layer_weights(-1).get("input_layernorm.weight")) is not None:
            drafter.hidden_norm.weight.copy_(norm_H)
        drafter.fc.weight[:, -len(drafter.fc.weight) :].fill_diagonal_(1.0)
        count = min(len(drafter.stack), shape.num_layers)
        for index in range(-1, -1 - count, -1):
            copy_equal_(drafter.stack[index].published(), teacher.layer_weights(index))
        super().__init__(settings, teacher, drafter.to(teacher.device))

    def loss(self, batch: TrainingBatch, generator: torch.Generator) -> LossReport:
        features_BSF, hidden_BSH, _ = self.teacher.read(batch, self.model.tap_ids)
        coins_BC = torch.rand(batch.ids[:, 1:].shape, generator=generator).to(batch.ids.device)
        blocks = Blocks.sample(batch, self.settings.num_anchors, self.model.block_size, coins_BC)
        share = self.settings.distillation
        soft_BSH = hidden_BSH if share else None
        with self.teacher.low_precision():
            loss, accuracy, _ = block_loss(
                self.model, features_BSF, blocks, distillation=share, teacher_BSH=soft_BSH
            )
        return loss, {"accuracy": accuracy}

    def draft_hits(self, sample: HeldOutPrompt) -> Tensor:
        batch = sample.batch(self.teacher.device)
        features_BSF = self.teacher.read(batch, self.model.tap_ids, exact=True).features_BSF
        roots = torch.arange(sample.first, batch.ids.shape[1], device=batch.ids.device)[None]
        blocks = Blocks(batch, roots, roots >= 0, self.model.block_size)
        drafts_Q = self.model.logits(blocks.hidden(self.model, features_BSF)[0]).argmax(-1)
        inside_MP = (blocks.places_BMP < blocks.length)[0]
        right_MP = (drafts_Q.view(inside_MP.shape) == blocks.at(batch.ids)[0]) & inside_MP
        return F.pad(right_MP, (0, 0, sample.first, 0))[:, 1:]
