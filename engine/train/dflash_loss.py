"""Training a DFlash drafter: many blocks of every sequence at once (arXiv 2602.06036, section 4).

Anchors are drawn among the assistant's tokens. Each starts a block [token, mask, mask, ...] that
sees the target's features strictly before the anchor, itself, and no other block; row k predicts
the token at its own position. Arithmetic follows SpecForge (`dflash_family_model.py`).

Further shape letters: S tokens of a sequence, M blocks of a sequence, P rows of a block. The keys
of a row are [S context tokens | M * P block rows], the queries the M * P block rows.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ...models.drafters.dflash import DFlashDraftModel
from ...models.drafters.dflash_config import Reach
from .data import by_head

GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}  # block size -> decay, from the paper
Mask = Tensor | BlockMask


@dataclass(frozen=True, slots=True)
class Packing:
    """Several texts in one sequence, which may share a beginning: a trunk and its branches.

    positions_BS: int64, each token's position in its own text. visible_BSS: bool, True where token
    q (second axis) follows on token k (third axis) or is it; never True for k > q.
    """

    positions_BS: Tensor
    visible_BSS: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the blocks of a batch start.

    anchors_BM: int64, the anchors' places in their sequences. kept_BM: bool, False for padding
    blocks, which see nothing and count nothing. size: P. length: S. packing: None where every
    sequence is one text, so that a token's place is its position.
    """

    anchors_BM: Tensor
    kept_BM: Tensor
    size: int
    length: int
    packing: Packing | None = None

    @property
    def places_BMP(self) -> Tensor:
        """int64, what the blocks' rows draft; they may run past the sequence's end."""
        return self._from(self.anchors_BM)

    @property
    def positions_BMP(self) -> Tensor:
        """int64, positions of the blocks' rows."""
        return self._from(self.sources_BS.gather(1, self.anchors_BM))

    @property
    def sources_BS(self) -> Tensor:
        """int64, positions of the context tokens."""
        if self.packing is not None:
            return self.packing.positions_BS
        device = self.anchors_BM.device
        return torch.arange(self.length, device=device).expand(len(self.anchors_BM), -1)

    @property
    def before_BMS(self) -> Tensor:
        """bool, the context of every block: the tokens before its anchor in the anchor's text."""
        context_S = torch.arange(self.length, device=self.anchors_BM.device)
        before_BMS = context_S < self.anchors_BM[:, :, None]
        if self.packing is None:
            return before_BMS
        index_BMS = self.anchors_BM[:, :, None].expand(-1, -1, self.length)
        return before_BMS & self.packing.visible_BSS.gather(1, index_BMS)

    def _from(self, start_BM: Tensor) -> Tensor:
        return start_BM[:, :, None] + torch.arange(self.size, device=start_BM.device)

    def at(self, value_BS: Tensor) -> Tensor:
        """A value of every token -> [B, M, P]; past the end, the last token's."""
        index_BMP = self.places_BMP.clamp(max=self.length - 1)
        return value_BS.gather(1, index_BMP.flatten(1)).view(index_BMP.shape)

    def noise(self, input_ids_BS: Tensor, mask_token_id: int) -> Tensor:
        """int64 [B, M * P]: each anchor's token, then masks; a padding block is all masks."""
        tokens_BMP = torch.full_like(self.positions_BMP, mask_token_id)
        anchor_BM = input_ids_BS.gather(1, self.anchors_BM)
        tokens_BMP[:, :, 0] = anchor_BM.where(self.kept_BM, mask_token_id)
        return tokens_BMP.flatten(1)

    def counted(self, loss_mask_BS: Tensor) -> Tensor:
        """bool [B, M, P]: rows that are drafted, inside the anchor's text, and the assistant's."""
        inside_BMP = self.places_BMP < self.length
        if self.packing is not None:
            inside_BMP &= self._follow(self.packing)
        drafted_P = torch.arange(self.size, device=self.anchors_BM.device) > 0
        assistant_BMP = self.at(loss_mask_BS) > 0.5
        return assistant_BMP & inside_BMP & drafted_P & self.kept_BM[:, :, None]

    def _follow(self, packing: Packing) -> Tensor:
        """bool [B, M, P]: the token there follows on the anchor in its text, so many places on."""
        place_BMP = self.places_BMP.clamp(max=self.length - 1)
        pair_BMP = place_BMP * self.length + self.anchors_BM[:, :, None]
        seen_BN = packing.visible_BSS.flatten(1).gather(1, pair_BMP.flatten(1))
        near_BMP = self.at(packing.positions_BS) == self.positions_BMP
        return near_BMP & seen_BN.view(place_BMP.shape)


def sample_anchors(loss_mask_BS: Tensor, num_anchors: int, size: int, coins_BC: Tensor) -> Blocks:
    """The candidates with the lowest coins: assistant tokens that an assistant token follows.

    Args:
        coins_BC: one uniform number per token but the last, [B, S - 1].

    Raises:
        ValueError: no sequence of the batch has a candidate.
    """
    assistant_BS = loss_mask_BS > 0.5
    candidates_BC = assistant_BS[:, :-1] & assistant_BS[:, 1:]
    count_B1 = candidates_BC.sum(1, keepdim=True)
    width = min(num_anchors, int(count_B1.max()))
    if width == 0:
        raise ValueError("no two supervised tokens stand side by side in any sequence of the batch")
    order_BC = coins_BC.masked_fill(~candidates_BC, 2.0).argsort(1)
    kept_BM = torch.arange(width, device=loss_mask_BS.device) < count_B1
    last = loss_mask_BS.shape[1]  # sorts padding behind every anchor
    anchors_BM = order_BC[:, :width].where(kept_BM, last).sort(1).values
    return Blocks(anchors_BM.where(kept_BM, 0), kept_BM, size, last)


def dense_mask(blocks: Blocks, reach: Reach) -> Tensor:
    """bool [B, 1, M * P, S + M * P], the reference: True where a row may attend.

    A window narrows the context only; no block is longer than it (`dflash_config`).
    """
    device, size = blocks.anchors_BM.device, blocks.size
    position_BQ1 = blocks.positions_BMP.flatten(1)[:, :, None]
    before_BQS = blocks.before_BMS.repeat_interleave(size, 1)
    if reach.window is not None:
        before_BQS &= position_BQ1 - blocks.sources_BS[:, None] < reach.window
    row_Q = torch.arange(position_BQ1.shape[1], device=device)
    own_QQ = row_Q[:, None] // size == row_Q // size
    if reach.causal:
        own_QQ &= row_Q <= row_Q[:, None]
    seen_BQK = torch.cat((before_BQS, own_QQ.expand(len(before_BQS), -1, -1)), -1)
    kept_BQ1 = blocks.kept_BM.repeat_interleave(size, 1)[:, :, None]
    return (seen_BQK & kept_BQ1)[:, None]


def flex_mask(blocks: Blocks, reach: Reach, tile: int = 128) -> BlockMask:
    """The same for flex_attention, which skips tiles that nobody sees."""
    kept_BM, size, length = blocks.kept_BM, blocks.size, blocks.length
    before_BMS, sources_BS = blocks.before_BMS, blocks.sources_BS
    starts_BM = blocks.positions_BMP[:, :, 0]
    window = math.inf if reach.window is None else reach.window

    def visible(b: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block, row = q // size, k - length
        context = k.clamp(max=length - 1)
        near = starts_BM[b, block] + q % size - sources_BS[b, context] < window
        before = (row < 0) & before_BMS[b, block, context] & near
        own = (row >= 0) & (row // size == block)
        if reach.causal:
            own = own & (row <= q)
        return (before | own) & kept_BM[b, block]

    batch, many = kept_BM.shape
    rows = many * size
    device = str(kept_BM.device)
    return create_block_mask(
        visible, batch, None, rows, length + rows, device=device, BLOCK_SIZE=tile
    )


def attend(q_BhQd: Tensor, k_BgKd: Tensor, v_BgKd: Tensor, mask: Mask) -> Tensor:
    """Grouped-query attention -> [B, heads, Q, d]; rows that see nothing give zeros."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q_BhQd, k_BgKd, v_BgKd, mask, enable_gqa=True)
    out = flex_attention(q_BhQd, k_BgKd, v_BgKd, block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


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
        flex: attend through flex_attention, which is only sparse under torch.compile and only has
            gradients on a GPU; else densely.
    """

    def __init__(
        self,
        draft_model: DFlashDraftModel,
        num_anchors: int = 512,
        gamma: float | None = None,
        *,
        flex: bool = False,
    ) -> None:
        super().__init__()
        self.draft_model, self.num_anchors, self.flex = draft_model, num_anchors, flex
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
    ) -> TrainingStep:
        """One step on sequences padded at the right.

        Args:
            input_ids_BS: int64.
            hidden_states_BSF: the target's features of every token, as `tap_ids` asks for them.
            loss_mask_BS: 1 on the assistant's tokens, 0 on all others and on padding.
            blocks: fixed blocks instead of drawn ones.
            generator: on the inputs' device; where the anchors' coins come from.
            packing: for sequences of several texts, whose blocks see their own text only.
        """
        if blocks is None:
            shape, device = loss_mask_BS[:, 1:].shape, loss_mask_BS.device
            coins_BC = torch.rand(shape, generator=generator, device=device)
            sampled = sample_anchors(loss_mask_BS, self.num_anchors, self.block_size, coins_BC)
            blocks = replace(sampled, packing=packing)
        hidden_BQH = self.hidden(input_ids_BS, hidden_states_BSF, blocks)
        return self._score(hidden_BQH, blocks.at(input_ids_BS), blocks.counted(loss_mask_BS))

    def hidden(self, input_ids_BS: Tensor, hidden_states_BSF: Tensor, blocks: Blocks) -> Tensor:
        """The drafter's output [B, M * P, H] of all blocks."""
        draft, batch = self.draft_model, len(input_ids_BS)
        build = flex_mask if self.flex else dense_mask
        masks = {reach: build(blocks, reach) for reach in set(draft.config.reaches)}
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

    def _score(self, hidden_BQH: Tensor, labels_BMP: Tensor, counted_BMP: Tensor) -> TrainingStep:
        """Decayed cross-entropy with the tokens themselves, on the rows that count."""
        rows = counted_BMP.flatten().nonzero().flatten()  # the head is the largest product here
        labels_R = labels_BMP.flatten()[rows]
        logits_RV = self.draft_model.logits(hidden_BQH.flatten(0, 1)[rows])
        decay_R = torch.exp(-(rows % self.block_size - 1) / self.gamma)
        loss_sum = (F.cross_entropy(logits_RV, labels_R, reduction="none") * decay_R).sum()
        weight = decay_R.sum()
        right_R = (logits_RV.argmax(-1) == labels_R).float()
        tiny = torch.finfo(weight.dtype).tiny  # fixed blocks may count nothing
        accuracy = right_R.sum() / max(len(rows), 1)
        return TrainingStep(loss_sum / weight.clamp_min(tiny), accuracy, loss_sum, weight)
