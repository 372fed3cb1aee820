"""Training a DFlash drafter: many blocks of every sequence at once (arXiv 2602.06036, section 4).

Anchors are drawn among the assistant's tokens. Each starts a block [token, mask, mask, ...] that
sees the target's features strictly before the anchor, itself, and no other block; row k predicts
the token at its own position. Arithmetic follows SpecForge (`dflash_family_model.py`).

Further shape letters are those of `dflash_blocks`.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.drafters.dflash import DFlashDraftModel
from ...models.layers import wide_logits
from .data import by_head
from .dflash_blocks import Blocks, Packing, block_mask, sample_anchors

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # block size -> decay, from the paper


def attend(q_BhQd: Tensor, k_BgKd: Tensor, v_BgKd: Tensor, mask_B1QK: Tensor) -> Tensor:
    """Grouped-query attention -> [B, heads, Q, d]; rows that see nothing give zeros."""
    return F.scaled_dot_product_attention(q_BhQd, k_BgKd, v_BgKd, mask_B1QK, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What one training step reports.

    loss: the weighted mean, to be differentiated. accuracy: share of counted rows whose best id is
    right. loss_sum, weight: its numerator and denominator, for a mean over several batches.
    """

    loss: Tensor
    accuracy: Tensor
    loss_sum: Tensor
    weight: Tensor


def decay_of(block_size: int) -> float:
    """The paper's decay of the block size it is given for that lies nearest."""
    return GAMMAS[min(GAMMAS, key=lambda known: abs(known - block_size))]


class OnlineDFlashModel(nn.Module):
    """A drafter with what its training needs; its parameters are the drafter's.

    Args:
        num_anchors: blocks per sequence, drawn anew for every batch.
        gamma: row k counts exp(-(k - 1) / gamma); infinity for no decay, None for `decay_of`.
        candidates: int64 [D], the ids that compete in the loss beside those that are right; None
            for all.
        distillation: share of what a row should say that is the target's distribution after the
            true tokens before it; the rest is the token itself, as in the paper.
    """

    def __init__(
        self,
        draft_model: DFlashDraftModel,
        num_anchors: int = 512,
        gamma: float | None = None,
        *,
        candidates: Tensor | None = None,
        distillation: float = 0.0,
    ) -> None:
        super().__init__()
        self.candidates = candidates
        self.distillation = distillation
        self.draft_model = draft_model
        self.num_anchors = num_anchors
        self.block_size = draft_model.block_size
        self.gamma = decay_of(self.block_size) if gamma is None else gamma

    def forward(
        self,
        input_ids_BS: Tensor,
        hidden_states_BSF: Tensor,
        loss_mask_BS: Tensor,
        blocks: Blocks | None = None,
        generator: torch.Generator | None = None,
        packing: Packing | None = None,
        told_BSH: Tensor | None = None,
    ) -> TrainingStep:
        """One step on sequences padded at the right.

        Args:
            input_ids_BS: int64.
            hidden_states_BSF: the target's features of every token, as `tap_ids` asks for them.
            loss_mask_BS: 1 on the assistant's tokens, 0 on all others and on padding.
            blocks: fixed blocks instead of drawn ones.
            generator: on the inputs' device; where the anchors' coins come from.
            packing: for sequences of several texts, whose blocks see their own text only.
            told_BSH: the input of the target's head at every token, to be distilled from.
        """
        if blocks is None:
            shape = loss_mask_BS[:, 1:].shape
            device = loss_mask_BS.device
            coins_BC = torch.rand(shape, generator=generator, device=device)
            sampled = sample_anchors(loss_mask_BS, self.num_anchors, self.block_size, coins_BC)
            blocks = replace(sampled, packing=packing)
        hidden_RH = self.hidden(input_ids_BS, hidden_states_BSF, blocks).flatten(0, 1)
        labels_R = blocks.at(input_ids_BS).flatten()
        # What does not count is left out: the head is the largest product here.
        rows = blocks.counted(loss_mask_BS).flatten().nonzero().flatten()
        before_RH = None if told_BSH is None else blocks.before(told_BSH)[rows]
        return self._score(hidden_RH[rows], labels_R[rows], rows % self.block_size, before_RH)

    def hidden(self, input_ids_BS: Tensor, hidden_states_BSF: Tensor, blocks: Blocks) -> Tensor:
        """The drafter's output [B, M * P, H] of all blocks."""
        draft = self.draft_model
        batch = len(input_ids_BS)
        masks = {reach: block_mask(blocks, reach) for reach in set(draft.config.reaches)}
        context_RH = draft.fuse(hidden_states_BSF.flatten(0, 1))
        before = draft.angles(blocks.sources_BS.flatten())
        own = draft.angles(blocks.positions_BMP.flatten())
        x_NH = draft.embed(blocks.noise(input_ids_BS, draft.mask_token_id).flatten())
        for layer, reach in zip(draft.stack, draft.config.reaches, strict=True):
            sources = layer.self_attn.keys_values(context_RH, before)
            q, *mine = layer.self_attn.project(layer.input_layernorm(x_NH), own)
            keys, values = (
                torch.cat((by_head(c, batch), by_head(m, batch)), 2)
                for c, m in zip(sources, mine, strict=True)
            )
            attended = attend(by_head(q, batch), keys, values, masks[reach])
            x_NH = layer.finish(x_NH, attended.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.unflatten(draft.norm(x_NH), 0, (batch, -1))

    def _score(
        self, hidden_RH: Tensor, labels_R: Tensor, place_R: Tensor, told_RH: Tensor | None
    ) -> TrainingStep:
        """Decayed cross-entropy with the tokens themselves, or with what the target said there."""
        head_KH, labels_R = self._competing(labels_R)
        logits_RK = wide_logits(hidden_RH, head_KH.to(hidden_RH.dtype))
        decay_R = torch.exp(-(place_R - 1) / self.gamma)
        losses_R = F.cross_entropy(logits_RK, labels_R, reduction="none")
        if told_RH is not None:
            with torch.no_grad():
                wanted_RK = wide_logits(told_RH.to(head_KH.dtype), head_KH).softmax(-1)
            soft_R = F.cross_entropy(logits_RK, wanted_RK, reduction="none")
            losses_R = torch.lerp(losses_R, soft_R, self.distillation)
        loss_sum = (losses_R * decay_R).sum()
        weight = decay_R.sum()
        right_R = (logits_RK.argmax(-1) == labels_R).float()
        tiny = torch.finfo(weight.dtype).tiny  # fixed blocks may count nothing
        accuracy = right_R.sum() / max(len(labels_R), 1)
        return TrainingStep(loss_sum / weight.clamp_min(tiny), accuracy, loss_sum, weight)

    def _competing(self, labels_R: Tensor) -> tuple[Tensor, Tensor]:
        """The head's rows of what competes, and where among them the right ids are."""
        head_VH = self.draft_model.ends.head_VH
        if self.candidates is None:
            return head_VH, labels_R
        both = torch.cat((self.candidates.to(labels_R.device), labels_R))
        ids_K: Tensor = both.unique()  # type: ignore[no-untyped-call]
        return head_VH[ids_K], torch.searchsorted(ids_K, labels_R)
