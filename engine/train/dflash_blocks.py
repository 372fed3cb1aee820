"""Blocks that start at anchors in packed texts, and what their rows may see.

Shape letters beside the usual ones: S tokens of a sequence, M blocks of a sequence, P rows of a
block. Keys of a row are [S context tokens | M * P block rows], queries the M * P block rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.drafters.config import Reach


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

    def before(self, value_BSH: Tensor) -> Tensor:
        """[B * M * P, H]: a value of the token before each row's place, in the order of rows."""
        index_BR1 = (self.places_BMP - 1).clamp(0, self.length - 1).flatten(1)[:, :, None]
        index_BRH = index_BR1.expand(-1, -1, value_BSH.shape[-1])
        return value_BSH.gather(1, index_BRH).flatten(0, 1)

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


def block_mask(blocks: Blocks, reach: Reach) -> Tensor:
    """bool [B, 1, M * P, S + M * P]: True where a row may attend.

    A window narrows the context only; no block is longer than it (`dflash_config`).
    """
    device = blocks.anchors_BM.device
    size = blocks.size
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
