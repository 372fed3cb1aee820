"""What the layers of all models are made of, on flat rows [N, ...] with N = B * Q."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention.backends import Attend, dense, to_bias, with_sums
from ..ops.attention.metadata import AttentionMetadata
from ..ops.kv.pool import KVCache
from ..ops.kv.slots import SlotRun
from .config import DecoderConfig, DecoderShape
from .linear import Linear, linear
from .norm import RMSNorm, normed
from .rope import Angles, inverse_frequencies, rotate, rotation


class GroupInputs(NamedTuple):
    """What a layer needs to know of an `AttentionGroup`: bias_G1qK is its mask, query groups folded
    in, as `to_bias` makes it."""

    rows_Gq: Tensor | None
    keys: SlotRun | Tensor
    bias_G1qK: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What every layer of one forward needs to know about its rows.

    cos, sin: [N, 1, head_dim]; slots_N: flat slots the rows are written to. merged: whether rows
        are in several groups, see `AttentionMetadata`.
    """

    groups: tuple[GroupInputs, ...]
    cos_N1d: Tensor
    sin_N1d: Tensor
    slots_N: Tensor
    merged: bool = False


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


def wide_logits(x_RH: Tensor, head: Tensor | Linear) -> Tensor:
    """[R, H] -> [R, V], float32; of a float64 model float64."""
    logits_RV = linear(x_RH, head) if isinstance(head, Tensor) else head.forward(x_RH)
    return logits_RV if logits_RV.dtype in (torch.float32, torch.float64) else logits_RV.float()


def attend_pool(
    q_Nhd: Tensor, layer: int, inputs: AttentionInputs, kv: KVCache, attend: Attend = dense
) -> Tensor:
    """Every group attends to its own slots of one layer -> [N, heads * head_dim]."""
    if inputs.merged:
        return _attend_merged(q_Nhd, layer, inputs.groups, kv)
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
    rows, heads, dim = q_Mhd.shape
    q_Gqhd = q_Mhd.view(keys.shape[0], -1, heads, dim)
    return attend(q_Gqhd, keys, values, group.bias_G1qK).reshape(rows, -1)


def _attend_merged(q_Nhd: Tensor, layer: int, groups: Sequence[GroupInputs], kv: KVCache) -> Tensor:
    """The same where rows are in several groups: softmax over all their slots is the mean of the
    groups' results, weighted by the sums of their exponentials. At least float32 throughout."""
    wide = torch.promote_types(q_Nhd.dtype, torch.float32)
    out_Nhd = torch.zeros_like(q_Nhd, dtype=wide)
    sums_Nh = out_Nhd.new_full(q_Nhd.shape[:2], torch.finfo(wide).min)
    for group in groups:
        rows_M = slice(None) if group.rows_Gq is None else group.rows_Gq.flatten()
        keys, values = kv.get_valid(layer, group.keys)
        q_Gqhd = q_Nhd[rows_M].view(len(keys), -1, *q_Nhd.shape[1:])
        more_Gqhd, more_Gqh = with_sums(q_Gqhd, keys, values, group.bias_G1qK)
        old_Mh = sums_Nh[rows_M]
        new_Mh = more_Gqh.flatten(0, 1)
        both_Mh = torch.logaddexp(old_Mh, new_Mh)
        merged_Mhd = out_Nhd[rows_M] * (old_Mh - both_Mh).exp()[..., None]
        merged_Mhd += more_Gqhd.flatten(0, 1) * (new_Mh - both_Mh).exp()[..., None]
        out_Nhd[rows_M] = merged_Mhd
        sums_Nh[rows_M] = both_Mh
    return out_Nhd.flatten(1).to(q_Nhd.dtype)


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU, the projections fused: fewer kernels, which is what counts
    for small models on a CPU."""

    kind_h: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.eps = config.eps
        hidden = config.hidden_size
        inner = config.intermediate_size
        self.inner = inner
        width = self.heads * self.head_dim
        total = self.heads + 2 * self.kv_heads
        self.input_norm = RMSNorm(hidden, config.eps)
        self.qkv = Linear(hidden, total * self.head_dim, bias=config.qkv_bias)
        self.o = Linear(width, hidden, bias=config.o_bias)
        self.post_norm = RMSNorm(hidden, config.eps)
        self.gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = Linear(inner, hidden, bias=config.mlp_bias)
        self.qk_norm = nn.Parameter(torch.empty(2, self.head_dim)) if config.qk_norm else None
        with torch.device("cpu"):  # which of the two norms each head has
            kind_h = torch.tensor([0] * self.heads + [1] * self.kv_heads)
        self.register_buffer("kind_h", kind_h, persistent=False)
        self.norm_hd: Tensor | None = None  # of each head, once the weights stay as they are

    def settle_(self) -> None:
        """The weights stay as they are from now on."""
        if self.qk_norm is not None:
            self.norm_hd = self.qk_norm.detach().index_select(0, self.kind_h)

    def forward(self, x_NH: Tensor, layer: int, inputs: AttentionInputs, kv: KVCache) -> Tensor:
        """Write the rows' keys and values into the pool, then attend and transform."""
        if not self.kv_heads:  # one rank of more than there are heads
            return self.finish(x_NH, x_NH[:, :0])
        qk_Nhd, v_Ngd = self.project(x_NH)
        return self.finish(x_NH, self.see(qk_Nhd, v_Ngd, layer, inputs, kv))

    def project(self, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before RoPE [N, heads + kv_heads, d], and values [N, kv_heads, d]."""
        all_ND = self.qkv.forward(self.input_norm.forward(x_NH))
        all_Nhd = all_ND.view(x_NH.shape[0], -1, self.head_dim)
        sizes = self.heads + self.kv_heads, self.kv_heads
        qk_Nhd, v_Ngd = torch.split_with_sizes(all_Nhd, sizes, 1)
        if self.qk_norm is not None:
            known_hd = self.norm_hd
            norm_hd = self.qk_norm.index_select(0, self.kind_h) if known_hd is None else known_hd
            qk_Nhd = normed(qk_Nhd, self.eps).mul_(norm_hd)
        return qk_Nhd, v_Ngd

    def see(
        self, qk_Nhd: Tensor, v_Ngd: Tensor, layer: int, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """Write what `project` found into the pool and attend -> [N, heads * d]."""
        q_Nhd = self.write_(qk_Nhd, v_Ngd, layer, inputs, kv)
        return attend_pool(q_Nhd, layer, inputs, kv)

    def write_(
        self, qk_Nhd: Tensor, v_Ngd: Tensor, layer: int, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """What `project` found into the pool -> the queries after RoPE, [N, heads, d]."""
        qk_Nhd = rotate(qk_Nhd, inputs.cos_N1d, inputs.sin_N1d)
        q_Nhd, k_Ngd = torch.split_with_sizes(qk_Nhd, (self.heads, self.kv_heads), 1)
        kv.write_(layer, inputs.slots_N, k_Ngd.transpose(0, 1), v_Ngd.transpose(0, 1))
        return q_Nhd

    def finish(self, x_NH: Tensor, seen_NI: Tensor) -> Tensor:
        """What a layer makes of its rows and of what they saw."""
        x_NH = self.o.added(x_NH, seen_NI)
        both_NI = self.gate_up.forward(self.post_norm.forward(x_NH))
        gate_NI, up_NI = torch.split_with_sizes(both_NI, (self.inner, self.inner), -1)
        return self.down.added(x_NH, F.silu(gate_NI).mul_(up_NI))

    def published(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face's names, without the layer's prefix."""
        q, k, v = self.heads * self.head_dim, *[self.kv_heads * self.head_dim] * 2
        views: dict[str, Tensor] = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_norm.weight,
        }
        parts = (
            (self.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, k, v)),
            (self.o, ("self_attn.o_proj",), (self.o.out_features,)),
            (self.gate_up, ("mlp.gate_proj", "mlp.up_proj"), (self.down.in_features,) * 2),
            (self.down, ("mlp.down_proj",), (self.down.out_features,)),
        )
        for layer, names, sizes in parts:
            for kind, value in layer.named_parameters():
                views |= zip(
                    (f"{n}.{kind}" for n in names), torch.split(value, list(sizes)), strict=True
                )
        if self.qk_norm is not None:
            views |= zip(
                ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
                self.qk_norm.unbind(),
                strict=True,
            )
        return views


class PoolModel(nn.Module):
    """A model whose layers read and write a pool: its sizes, its angles, what its layers see.

    Attributes:
        groups: query heads of a key head.
        narrows: what the layers leave of the masks, by the kind of the layer; None: everything.
        notes: what the loader found worth telling, e.g. unexpected tensors.
    """

    frequencies: Tensor

    def __init__(self, shape: DecoderShape, layers: int) -> None:
        super().__init__()
        self.groups = shape.heads // shape.kv_heads
        self.num_layers = layers
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.narrows: Mapping[Any, Narrow | None] = {False: None}
        self.notes: tuple[str, ...] = ()
        # On the CPU even inside a meta-device build: the angles are computed, not loaded.
        with torch.device("cpu"):
            frequencies, self.rope_scaling = inverse_frequencies(shape.rope, shape.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's own weights."""
        raise NotImplementedError

    def angles(self, positions_N: Tensor) -> Angles:
        """cos and signed sin of these positions."""
        return rotation(positions_N, self.frequencies, self.rope_scaling, self.dtype)

    def attention_inputs(
        self, positions_BQ: Tensor, slots_BQ: Tensor, attention: AttentionMetadata
    ) -> dict[Any, AttentionInputs]:
        """What the layers see, by their kind; only kinds that exist."""
        positions_N = positions_BQ.flatten()
        slots_N = slots_BQ.flatten()
        angles = self.angles(positions_N)
        return {
            kind: AttentionInputs(
                group_inputs(attention, positions_N, self.groups, self.dtype, narrow),
                *angles,
                slots_N,
                attention.merged,
            )
            for kind, narrow in self.narrows.items()
        }
