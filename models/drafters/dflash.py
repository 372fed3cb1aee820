"""The DFlash drafter (arXiv 2602.06036), under its published parameter names.

It drafts a block at once: [anchor, mask, mask, ...], every row of which sees the whole block and
the context before it. The context has no rows of its own in the network: each layer's keys and
values for it are projected from the target's hidden states, so it is written into the pool and
never asked anything. Arithmetic follows z-lab/dflash.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.attention.backends import Attend, dense, window_mask
from ...ops.attention.metadata import AttentionMetadata
from ...ops.kv.pool import KVCache
from ..layers import AttentionInputs, RMSNorm, add_linear, attend_pool, group_inputs
from ..rope import inverse_frequencies, rotate, rotation
from .dflash_config import DFlashConfig, Reach

Angles = tuple[Tensor, Tensor]
"""cos and signed sin, each [N, 1, head_dim]."""


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What a drafter uses of its target and never trains: embed_VH and head_VH, [V, H]."""

    embed_VH: Tensor
    head_VH: Tensor


class DFlashAttention(nn.Module):
    """Queries come from block rows only; keys and values from block rows and from the context."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * dim, hidden, bias=bias)
        self.q_norm = RMSNorm(dim, config.eps)
        self.k_norm = RMSNorm(dim, config.eps)

    def queries(self, x_NH: Tensor, angles: Angles) -> Tensor:
        """[N, H] -> rotated [N, heads, d]."""
        q_Nhd = self.q_proj(x_NH).view(len(x_NH), -1, self.head_dim)
        return rotate(self.q_norm(q_Nhd), *angles)

    def keys_values(self, x_NH: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[N, H] -> rotated keys and values, each [N, kv_heads, d]."""
        k_Ngd = self.k_proj(x_NH).view(len(x_NH), -1, self.head_dim)
        v_Ngd = self.v_proj(x_NH).view(len(x_NH), -1, self.head_dim)
        return rotate(self.k_norm(k_Ngd), *angles), v_Ngd


class DFlashMLP(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class DFlashLayer(nn.Module):
    """One decoder layer in two halves, between which a forward or a training step attends."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)

    def project(self, x_NH: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Block rows [N, H] -> queries [N, heads, d], keys and values [N, kv_heads, d]."""
        normed_NH = self.input_layernorm(x_NH)
        keys, values = self.self_attn.keys_values(normed_NH, angles)
        return self.self_attn.queries(normed_NH, angles), keys, values

    def finish(self, x_NH: Tensor, attended_ND: Tensor) -> Tensor:
        """Everything after attention: output projection, residual, SwiGLU."""
        x_NH = add_linear(x_NH, attended_ND, self.self_attn.o_proj)
        y_NH = self.post_attention_layernorm(x_NH)
        inner_NI = F.silu(self.mlp.gate_proj(y_NH)) * self.mlp.up_proj(y_NH)
        return add_linear(x_NH, inner_NI, self.mlp.down_proj)


class DFlashDraftModel(nn.Module):
    """Implements `BlockDrafter`. Its parameters are exactly the tensors of a published file.

    Attributes:
        ends: the target's embedding and head; no parameters of this module.
        notes: what the loader found worth telling.
    """

    def __init__(self, config: DFlashConfig, ends: TargetEnds, attend: Attend = dense) -> None:
        super().__init__()
        self.config, self.ends, self.attend = config, ends, attend
        self.num_layers, self.kv_heads = config.num_layers, config.kv_heads
        self.head_dim, self.tap_ids = config.head_dim, config.tap_ids
        self.block_size, self.mask_token_id = config.block_size, config.mask_token_id
        self.notes: tuple[str, ...] = config.notes
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.eps)
        # On the CPU even inside a meta-device build: it is computed, not loaded.
        with torch.device("cpu"):
            frequencies, self.rope_scaling = inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    @property
    def stack(self) -> tuple[DFlashLayer, ...]:
        """The layers, under their type."""
        return cast(tuple[DFlashLayer, ...], tuple(self.layers))

    def angles(self, positions_N: Tensor) -> Angles:
        """cos and signed sin of these positions."""
        return rotation(positions_N, self.frequencies, self.rope_scaling, self.fc.weight.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> [..., H], the target's embedding in the drafter's dtype."""
        return F.embedding(tokens, self.ends.embed_VH).to(self.fc.weight.dtype)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """See `BlockDrafter.fuse`."""
        taps_RF = taps_RF.to(self.fc.weight.dtype)
        order = self.config.tap_order
        if order != tuple(range(len(self.tap_ids))):
            parts = taps_RF.chunk(len(self.tap_ids), -1)
            taps_RF = torch.cat([parts[tap] for tap in order], -1)
        context_RH: Tensor = self.hidden_norm(self.fc(taps_RF))
        return context_RH

    def write_context_(
        self, context_RH: Tensor, positions_R: Tensor, slots_R: Tensor, kv: KVCache
    ) -> None:
        """See `BlockDrafter.write_context_`. No layer's input norm touches the context."""
        angles = self.angles(positions_R)
        for index, layer in enumerate(self.stack):
            k, v = layer.self_attn.keys_values(context_RH, angles)
            kv.write_(index, slots_R, k.transpose(0, 1), v.transpose(0, 1))

    def forward(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionMetadata,
        kv: KVCache,
    ) -> Tensor:
        """See `BlockDrafter.forward`."""
        inputs_of = self._inputs(positions_BQ, slots_BQ, attention)
        x_NH = self.embed(tokens_BQ.flatten())
        for index, layer in enumerate(self.stack):
            inputs = inputs_of[self.config.reaches[index]]
            q, k, v = layer.project(x_NH, (inputs.cos_N1d, inputs.sin_N1d))
            kv.write_(index, inputs.slots_N, k.transpose(0, 1), v.transpose(0, 1))
            x_NH = layer.finish(x_NH, attend_pool(q, index, inputs, kv, self.attend))
        return torch.unflatten(self.norm(x_NH), 0, tokens_BQ.shape)

    def _inputs(
        self, positions_BQ: Tensor, slots_BQ: Tensor, attention: AttentionMetadata
    ) -> dict[Reach, AttentionInputs]:
        """What the layers see, by how far they reach; only reaches that exist."""
        config, positions_N = self.config, positions_BQ.flatten()
        groups, dtype = config.heads // config.kv_heads, self.fc.weight.dtype
        angles, slots_N = self.angles(positions_N), slots_BQ.flatten()
        return {
            reach: AttentionInputs(
                group_inputs(attention, positions_N, groups, dtype, partial(within, reach=reach)),
                *angles,
                slots_N,
            )
            for reach in set(config.reaches)
        }

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """See `BlockDrafter.logits`; float64 drafters return float64."""
        head_VH = self.ends.head_VH.to(hidden_RH.dtype)
        logits_RV = F.linear(hidden_RH, head_VH)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def published(self) -> dict[str, Tensor]:
        """The parameters under their published names."""
        return dict(self.named_parameters())


def within(
    mask_BQK: Tensor, positions_BQ: Tensor, key_positions_BK: Tensor, reach: Reach
) -> Tensor:
    """bool [B, Q, K]: what a layer of this reach sees of what a row may see at all.

    A block's own rows count with their true positions, like all others.
    """
    if reach.window is not None:
        mask_BQK = window_mask(mask_BQK, positions_BQ, key_positions_BK, reach.window)
    ahead_BQK = key_positions_BK[:, None, :] - positions_BQ[:, :, None]
    if reach.causal:
        return mask_BQK & (ahead_BQK <= 0)
    return mask_BQK if reach.window is None else mask_BQK & (ahead_BQK < reach.window)
