"""The DFlash drafter (arXiv 2602.06036), under its published parameter names.

It drafts a block [anchor, mask, mask, ...] at once, every row of which sees the whole block and the
context before it. The context has no rows in the network: its keys and values are projected from
the target's hidden states and written into the pool. Arithmetic follows z-lab/dflash."""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.attention.backends import AttentionPlan
from ...ops.kv.pool import KVCache
from ..layers import DecoderLayer, LayerKind, PoolModel, RMSNorm, wide_logits
from ..linear import Linear
from ..packed import Product
from .config import DFlashConfig, Reach


class TargetEnds(NamedTuple):
    """What a drafter uses of its target and never trains: embed_VH and head_VH, [V, H]."""

    embed_VH: Tensor
    head_VH: Tensor


class DFlashDraftModel(PoolModel):
    """Fills a whole block [root token, mask, mask, ...] in one forward. Row k of the output is its
    guess of the token at its own position; row 0 is not used.

    Its parameters are exactly the tensors of a published file; the target's `ends` are none of
    them. head: the product of the target's head, if by a kernel."""

    head: Product | None = None

    def __init__(self, config: DFlashConfig, ends: TargetEnds) -> None:
        narrows = {reach: partial(within, reach=reach) for reach in set(config.reaches)}
        super().__init__(config, tuple(map(LayerKind, config.reaches)), narrows)
        self.tap_ids = config.tap_ids
        self.config = config
        self.ends = ends
        self.block_size = config.block_size
        self.mask_token_id = config.mask_token_id
        hidden = config.hidden_size
        self.fc = Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in config.reaches)
        self.norm = RMSNorm(hidden, config.eps)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> [..., H], the target's embedding in the drafter's dtype."""
        return F.embedding(tokens, self.ends.embed_VH).to(self.dtype)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """Target features [R, F] -> the context [R, H] of `write_context_`."""
        taps_RF = taps_RF.to(self.dtype)
        order = tuple(self.tap_ids.index(layer + 1) for layer in self.config.layer_ids)
        if order != tuple(range(len(self.tap_ids))):
            parts = taps_RF.chunk(len(self.tap_ids), -1)
            taps_RF = torch.cat([parts[tap] for tap in order], -1)
        return self.hidden_norm.forward(self.fc.forward(taps_RF))

    def write_context_(
        self, context_RH: Tensor, positions_R: Tensor, slots_R: Tensor, kv: KVCache
    ) -> None:
        """K and V of committed tokens, all before a block's root, into every layer of `kv`."""
        angles = self.angles(positions_R)
        for index, layer in enumerate(self.stack):
            _, k, v = layer.project(context_RH, angles)
            kv.write_(index, slots_R, k.transpose(0, 1), v.transpose(0, 1))

    def forward(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionPlan,
        kv: KVCache,
    ) -> Tensor:
        """Blocks -> hidden_BQH for `logits`; writes their rows into `kv`, where they are temporary.
        A row sees its branch's context and its whole block; causal and windowed layers less."""
        x_NH = self.embed(tokens_BQ.flatten())
        if self.compiled is not None and self.compiled.takes(attention):
            (x_NH,) = self.compiled.run(x_NH, positions_BQ, slots_BQ, attention, kv=kv)
        else:
            inputs_of = self.attention_inputs(positions_BQ, slots_BQ, attention)
            for index, layer in enumerate(self.stack):
                inputs = inputs_of[self.kinds[index]]
                x_NH = layer.forward(layer.input_layernorm(x_NH), x_NH, index, inputs, kv=kv)
        return torch.unflatten(self.norm(x_NH), 0, tokens_BQ.shape)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, H] of `forward` -> float32 [R, vocabulary]."""
        if self.head is not None:
            return self.head.product(hidden_RH, None, torch.float32)
        return wide_logits(hidden_RH, self.ends.head_VH.to(hidden_RH.dtype))


def within(mask_BQK: Tensor, positions_BQ: Tensor, keys_BK: Tensor, reach: Reach) -> Tensor:
    """bool [B, Q, K]: what a layer of this reach sees of what a row may see at all."""
    ahead_BQK = keys_BK[:, None, :] - positions_BQ[:, :, None]
    if reach.window is not None:
        mask_BQK = mask_BQK & (-ahead_BQK < reach.window)
    limit = 1 if reach.causal else reach.window
    return mask_BQK if limit is None else mask_BQK & (ahead_BQK < limit)
