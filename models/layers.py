"""The parts of a decoder layer, on flat rows [N, ...] with N = B * Q."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention.backends import Attend, to_bias
from ..ops.attention.metadata import AttentionMetadata
from ..ops.kv.pool import KVCache
from ..ops.kv.slots import SlotRun
from .config import DecoderConfig
from .rope import rotate


class GroupInputs(NamedTuple):
    """What a layer needs to know of an `AttentionGroup`: bias_G1qK is its mask, query groups folded
    in, as `to_bias` makes it."""

    rows_Gq: Tensor | None
    keys: SlotRun | Tensor
    bias_G1qK: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What every layer of one forward needs to know about its rows.

    cos, sin: [N, 1, head_dim]; slots_N: flat slots the rows are written to.
    """

    groups: tuple[GroupInputs, ...]
    cos_N1d: Tensor
    sin_N1d: Tensor
    slots_N: Tensor


Narrow = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What a layer sees of mask_GqK, given positions_Gq of its rows and positions_GK of the slots."""


def group_inputs(
    attention: AttentionMetadata,
    positions_N: Tensor,
    groups: int,
    dtype: torch.dtype,
    narrow: Narrow | None = None,
) -> tuple[GroupInputs, ...]:
    """A forward's groups for layers with so many query groups for each key head.

    Args:
        narrow: what layers with a window leave of the masks; None leaves everything.
    """
    inputs = []
    for group in attention.groups:
        mask_GqK = group.mask_GqK
        if narrow is not None:
            mask_GqK = narrow(mask_GqK, group.of_rows(positions_N), group.positions_GK)
        inputs.append(GroupInputs(group.rows_Gq, group.keys, to_bias(mask_GqK, groups, dtype)))
    return tuple(inputs)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation, in float32 for every dtype, as in transformers."""
    if x.dtype == torch.float32:  # the same in fewer kernels
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def add_linear(residual_NH: Tensor, x_NI: Tensor, linear: nn.Linear) -> Tensor:
    """residual + linear(x), in one kernel where there is no bias."""
    if linear.bias is None:
        return torch.addmm(residual_NH, x_NI, linear.weight.t())
    return residual_NH + F.linear(x_NI, linear.weight, linear.bias)


def attend_pool(
    q_Nhd: Tensor, layer: int, inputs: AttentionInputs, kv: KVCache, attend: Attend
) -> Tensor:
    """Every group attends to its own slots of one layer -> [N, heads * head_dim]."""
    if len(inputs.groups) == 1 and inputs.groups[0].rows_Gq is None:
        return _attend_group(q_Nhd, layer, inputs.groups[0], kv, attend)
    out_NI = q_Nhd.new_zeros(len(q_Nhd), q_Nhd[0].numel())
    for group in inputs.groups:
        assert group.rows_Gq is not None
        rows_M = group.rows_Gq.flatten()
        group_MI = _attend_group(q_Nhd.index_select(0, rows_M), layer, group, kv, attend)
        out_NI.index_copy_(0, rows_M, group_MI)
    return out_NI


def _attend_group(
    q_Mhd: Tensor, layer: int, group: GroupInputs, kv: KVCache, attend: Attend
) -> Tensor:
    keys, values = kv.get_valid(layer, group.keys)
    q_Gqhd = q_Mhd.view(len(keys), -1, *q_Mhd.shape[1:])
    return attend(q_Gqhd, keys, values, group.bias_G1qK).flatten(2).flatten(0, 1)


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU, the projections fused: fewer kernels, which is what counts
    for small models on a CPU."""

    def __init__(self, config: DecoderConfig, attend: Attend) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.eps, self.attend = config.eps, attend
        hidden, inner = config.hidden_size, config.intermediate_size
        width, total = self.heads * self.head_dim, self.heads + 2 * self.kv_heads
        self.input_norm = RMSNorm(hidden, config.eps)
        self.qkv = nn.Linear(hidden, total * self.head_dim, bias=config.qkv_bias)
        self.o = nn.Linear(width, hidden, bias=config.o_bias)
        self.post_norm = RMSNorm(hidden, config.eps)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.qk_norm = nn.Parameter(torch.empty(2, self.head_dim)) if config.qk_norm else None

    def forward(self, x_NH: Tensor, layer: int, inputs: AttentionInputs, kv: KVCache) -> Tensor:
        """Write the rows' keys and values into the pool, then attend and transform."""
        qk_Nhd, v_Ngd = self.project(x_NH)
        return self.finish(x_NH, self.see(qk_Nhd, v_Ngd, layer, inputs, kv))

    def project(self, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before RoPE [N, heads + kv_heads, d], and values [N, kv_heads, d]."""
        all_Nhd = self.qkv(self.input_norm(x_NH)).view(len(x_NH), -1, self.head_dim)
        split = self.heads + self.kv_heads
        qk_Nhd, v_Ngd = all_Nhd[:, :split], all_Nhd[:, split:]
        return (qk_Nhd if self.qk_norm is None else self._norm(qk_Nhd, self.qk_norm)), v_Ngd

    def see(
        self, qk_Nhd: Tensor, v_Ngd: Tensor, layer: int, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """Write what `project` found into the pool and attend -> [N, heads * d]."""
        qk_Nhd = rotate(qk_Nhd, inputs.cos_N1d, inputs.sin_N1d)
        q_Nhd, k_Ngd = qk_Nhd[:, : self.heads], qk_Nhd[:, self.heads :]
        kv.write_(layer, inputs.slots_N, k_Ngd.transpose(0, 1), v_Ngd.transpose(0, 1))
        return attend_pool(q_Nhd, layer, inputs, kv, self.attend)

    def finish(self, x_NH: Tensor, seen_NI: Tensor) -> Tensor:
        """What a layer makes of its rows and of what they saw."""
        x_NH = add_linear(x_NH, seen_NI, self.o)
        gate, up = self.gate_up(self.post_norm(x_NH)).chunk(2, -1)
        return add_linear(x_NH, F.silu(gate) * up, self.down)

    def _norm(self, qk_Nhd: Tensor, weight_2d: Tensor) -> Tensor:
        q, k = qk_Nhd[:, : self.heads], qk_Nhd[:, self.heads :]
        q_weight, k_weight = weight_2d.unbind()
        return torch.cat((rms_norm(q, q_weight, self.eps), rms_norm(k, k_weight, self.eps)), 1)

    def published(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face's names, without the layer's prefix."""
        q, k, v = self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2
        found: dict[str, Tensor] = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_norm.weight,
        }
        parts = (
            (self.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, k, v)),
            (self.o, ("self_attn.o_proj",), (self.o.out_features,)),
            (self.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (self.down.in_features,) * 2),
            (self.down, ("mlp.down_proj",), (self.down.out_features,)),
        )
        for linear, names, sizes in parts:
            for kind, value in linear.named_parameters():
                found |= zip(
                    (f"{n}.{kind}" for n in names), torch.split(value, list(sizes)), strict=True
                )
        if self.qk_norm is not None:
            found |= zip(
                ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
                self.qk_norm.unbind(),
                strict=True,
            )
        return found


class DecoderParts(Protocol):
    """What a forward on a blended cache uses of a decoder."""

    config: DecoderConfig
    num_layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    embed: nn.Parameter
    layers: nn.ModuleList
    norm: RMSNorm
    frequencies: Tensor
    rope_scaling: float

    def attention_inputs(
        self, positions_BQ: Tensor, slots_BQ: Tensor, attention: AttentionMetadata
    ) -> dict[bool, AttentionInputs]: ...

    def logits(self, x_RH: Tensor) -> Tensor: ...
