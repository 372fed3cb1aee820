"""What the layers of all models are made of, on flat rows [N, ...] with N = B * Q."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention.backends import AttentionPlan, LayerAttention, Narrow
from ..ops.kv.pool import KVCache
from .config import DecoderConfig, DecoderShape, RopeConfig
from .linear import Fused, Linear, linear

Angles = tuple[Tensor, Tensor]
"""cos and signed sin, each [N, 1, head_dim], for `rotate`."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32 for narrower dtypes as
    in transformers; on a CPU by one kernel for the sum of squares, where the usual way takes three.
    The weight is [D], or [heads, D] for x [N, heads, D]."""
    dtype = x.dtype
    if x.is_cpu and dtype != torch.float64:
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        scale = torch.addcmul(_constant(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale if dtype == torch.float32 else (x * scale).to(dtype)) * weight
    if dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(dtype) * weight


@cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):  # training may use the same tensor
        return torch.tensor(value, dtype=torch.float32)


class RMSNorm(nn.RMSNorm):
    """`rms_norm` with a weight."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 [head_dim / 2] and the factor on cos and sin; `dynamic` equals `default`
    within the trained length, which is as far as it is used here."""
    if rope.kind in ("default", "dynamic"):
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    # Slow to import and needed by scaled models only.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=rope.trained,
        rope_parameters={"rope_theta": rope.theta, "rope_type": rope.kind, **rope.settings},
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope.kind](shape)
    return frequencies, float(scaling)


def rotate(x_Nhd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin; a roll with the sign inside `sin` is the cheapest form."""
    return torch.addcmul(x_Nhd * cos_N1d, torch.roll(x_Nhd, x_Nhd.shape[-1] // 2, -1), sin_N1d)


def rotate_back(x_Nhd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """The inverse of `rotate`; a factor on cos and sin, and their rounding, are divided out."""
    return rotate(x_Nhd, cos_N1d, -sin_N1d) / (cos_N1d.square() + sin_N1d.square())


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What layers of one kind need to know about the rows of a forward: the attention's plan, cos
    and sin [N, 1, head_dim], and the flat slots that the rows are written to, int64 [N]."""

    attention: LayerAttention
    cos_N1d: Tensor
    sin_N1d: Tensor
    slots_N: Tensor


def wide_logits(x_RH: Tensor, head: Tensor | Linear) -> Tensor:
    """[R, H] -> [R, V], float32; of a float64 model float64."""
    logits_RV = linear(x_RH, head) if isinstance(head, Tensor) else head.forward(x_RH)
    return logits_RV if logits_RV.dtype in (torch.float32, torch.float64) else logits_RV.float()


class LayerHook:
    """Watches or changes the rows of every layer of a decoder between projections and attention;
    `inputs` replaces those of the forward, and may change between layers."""

    inputs: Mapping[Any, AttentionInputs]

    def before_attention(
        self, index: int, x_NH: Tensor, qk_Nhd: Tensor, v_Ngd: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
        """The arguments as the layer shall use them: its input, queries and keys before RoPE
        [N, heads + kv_heads, d], values [N, kv_heads, d]."""
        raise NotImplementedError

    def tap(self, x_NH: Tensor, number: int) -> Tensor:
        """The M rows of the forward at the `number`-th tap, [M, H]."""
        return x_NH


class DecoderLayer(nn.Module):
    """Pre-norm attention and a gated MLP, the projections fused: fewer kernels, which is what
    counts for small models on a CPU."""

    kind_h: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.eps = config.eps
        self.activation = getattr(F, config.activation)
        hidden = config.hidden_size
        self.inner = inner = config.intermediate_size
        width = self.heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        self.input_norm = RMSNorm(hidden, config.eps)
        self.qkv = Linear(hidden, width + 2 * kv_width, bias=config.qkv_bias)
        self.o = Linear(width, hidden, bias=config.o_bias)
        self.post_norm = RMSNorm(hidden, config.eps)
        self.gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = Linear(inner, hidden, bias=config.mlp_bias)
        self.qk_norm = nn.Parameter(torch.empty(2, self.head_dim)) if config.qk_norm else None
        with torch.device("cpu"):  # which of the two norms each head has
            kind_h = torch.tensor([0] * self.heads + [1] * self.kv_heads)
        self.register_buffer("kind_h", kind_h, persistent=False)
        self.norm_hd: Tensor | None = None  # of each head, once the weights no longer change

    def settle_(self) -> None:
        """The weights no longer change."""
        if self.qk_norm is not None:
            self.norm_hd = self.qk_norm.detach().index_select(0, self.kind_h)

    def forward(
        self,
        x_NH: Tensor,
        index: int,
        inputs: AttentionInputs,
        kv: KVCache,
        hook: LayerHook | None = None,
    ) -> Tensor:
        """Write the rows' keys and values into layer `index` of the pool, then attend and transform
        -> [N, H], of the rows that the hook leaves."""
        if not self.kv_heads:  # a rank of more ranks than there are heads
            attended_NI = x_NH[:, :0]
        else:
            all_ND = self.qkv.forward(rms_norm(x_NH, self.input_norm.weight, self.eps))
            all_Nhd = all_ND.view(x_NH.shape[0], -1, self.head_dim)
            sizes = (self.heads + self.kv_heads, self.kv_heads)
            qk_Nhd, v_Ngd = torch.split_with_sizes(all_Nhd, sizes, 1)
            if self.qk_norm is not None:
                norm_hd = self.norm_hd
                if norm_hd is None:
                    norm_hd = self.qk_norm.index_select(0, self.kind_h)
                qk_Nhd = rms_norm(qk_Nhd, norm_hd, self.eps)
            if hook is not None:
                x_NH, qk_Nhd, v_Ngd, inputs = hook.before_attention(
                    index, x_NH, qk_Nhd, v_Ngd, inputs
                )
            turned_Nhd = torch.roll(qk_Nhd, self.head_dim // 2, -1)  # `rotate`, without the call
            qk_Nhd = torch.addcmul(qk_Nhd * inputs.cos_N1d, turned_Nhd, inputs.sin_N1d)
            q_Nhd, k_Ngd = torch.split_with_sizes(qk_Nhd, (self.heads, self.kv_heads), 1)
            kv.write_(index, inputs.slots_N, k_Ngd.transpose(0, 1), v_Ngd.transpose(0, 1))
            attention = inputs.attention
            attended_NI = attention.backend.run(q_Nhd, *kv.layers[index], attention)
        x_NH = self.o.forward(attended_NI, x_NH)
        both_NI = self.gate_up.forward(rms_norm(x_NH, self.post_norm.weight, self.eps))
        gate_NI, up_NI = torch.split_with_sizes(both_NI, (self.inner, self.inner), -1)
        return self.down.forward(self.activation(gate_NI).mul_(up_NI), x_NH)

    def published(self) -> dict[str, Tensor]:
        """Views of the parameters under Hugging Face's names, without the layer's prefix."""
        views: dict[str, Tensor] = {
            "input_layernorm.weight": self.input_norm.weight,
            "post_attention_layernorm.weight": self.post_norm.weight,
        }
        kv_width = self.kv_heads * self.head_dim
        parts: tuple[tuple[Linear, dict[str, int]], ...] = (
            (self.qkv, {"q": self.heads * self.head_dim, "k": kv_width, "v": kv_width}),
            (self.o, {"o": self.o.out_features}),
            (self.gate_up, {"gate": self.inner, "up": self.inner}),
            (self.down, {"down": self.down.out_features}),
        )
        for layer, sizes in parts:
            module = "self_attn" if layer is self.qkv or layer is self.o else "mlp"
            for kind, value in layer.named_parameters():
                names = [f"{module}.{name}_proj.{kind}" for name in sizes]
                views |= zip(names, torch.split(value, list(sizes.values())), strict=True)
        if self.qk_norm is not None:
            views["self_attn.q_norm.weight"] = self.qk_norm[0]
            views["self_attn.k_norm.weight"] = self.qk_norm[1]
        return views


class DrafterAttention(nn.Module):
    """Projections of self-attention whose input is `wide` wide: in EAGLE-3 twice its output."""

    def __init__(self, shape: DecoderShape, wide: int) -> None:
        super().__init__()
        bias = shape.qkv_bias
        dim = shape.head_dim
        self.head_dim = dim
        self.q_proj = Linear(wide, shape.heads * dim, bias=bias)
        self.k_proj = Linear(wide, shape.kv_heads * dim, bias=bias)
        self.v_proj = Linear(wide, shape.kv_heads * dim, bias=bias)
        self.qkv = Fused(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(shape.heads * dim, shape.hidden_size, bias=shape.o_bias)
        self.q_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else None

    def keys_values(self, x_NW: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[N, W] -> rotated keys and values, each [N, kv_heads, d]."""
        if self.qkv.joint is not None:
            return self.project(x_NW, angles)[1:]
        rows = x_NW.shape[0]
        k_Ngd = self.k_proj.forward(x_NW).view(rows, -1, self.head_dim)
        v_Ngd = self.v_proj.forward(x_NW).view(rows, -1, self.head_dim)
        if self.k_norm is not None:
            k_Ngd = self.k_norm.forward(k_Ngd)
        return rotate(k_Ngd, *angles), v_Ngd

    def project(self, x_NW: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """[N, W] -> rotated queries [N, heads, d], and keys and values [N, kv_heads, d]."""
        rows = x_NW.shape[0]
        q_ND, k_ND, v_ND = self.qkv(x_NW)
        q_Nhd = q_ND.view(rows, -1, self.head_dim)
        k_Ngd = k_ND.view(rows, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_Nhd = self.q_norm.forward(q_Nhd)
            k_Ngd = self.k_norm.forward(k_Ngd)
        cos_N1d, sin_N1d = angles
        half = self.head_dim // 2  # what follows is `rotate`, without the calls
        q_Nhd = torch.addcmul(q_Nhd * cos_N1d, torch.roll(q_Nhd, half, -1), sin_N1d)
        k_Ngd = torch.addcmul(k_Ngd * cos_N1d, torch.roll(k_Ngd, half, -1), sin_N1d)
        return q_Nhd, k_Ngd, v_ND.view(rows, -1, self.head_dim)


class DrafterMLP(nn.Module):
    """The parameters of a gated MLP under their published names."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        inner = shape.intermediate_size
        self.gate_proj = Linear(hidden, inner, bias=shape.mlp_bias)
        self.up_proj = Linear(hidden, inner, bias=shape.mlp_bias)
        self.gate_up = Fused(self.gate_proj, self.up_proj)
        self.down_proj = Linear(inner, hidden, bias=shape.mlp_bias)


class DrafterLayer(nn.Module):
    """A decoder layer under its published parameter names, in parts for training; what comes before
    attention is the drafter's."""

    input_layernorm: RMSNorm
    hidden_norm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, shape: DecoderShape, wide: int, *norms: str) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(shape, wide)
        self.mlp = DrafterMLP(shape)
        for name in (*norms, "post_attention_layernorm"):
            self.add_module(name, RMSNorm(shape.hidden_size, shape.eps))

    def forward(
        self, x_NW: Tensor, residual_NH: Tensor, index: int, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """Attention's input [N, W] and the residual -> [N, H]; the rows' keys and values are
        written into layer `index` of the pool."""
        q, k, v = self.self_attn.project(x_NW, (inputs.cos_N1d, inputs.sin_N1d))
        kv.write_(index, inputs.slots_N, k.transpose(0, 1), v.transpose(0, 1))
        attention = inputs.attention
        attended_ND = attention.backend.run(q, *kv.layers[index], attention)
        return self.finish(residual_NH, attended_ND)

    def finish(self, residual_NH: Tensor, attended_ND: Tensor) -> Tensor:
        """Everything after attention: output projection, residual, SwiGLU."""
        x_NH = self.self_attn.o_proj.forward(attended_ND, residual_NH)
        norm = self.post_attention_layernorm
        gate_NI, up_NI = self.mlp.gate_up(rms_norm(x_NH, norm.weight, norm.eps))
        return self.mlp.down_proj.forward(F.silu(gate_NI) * up_NI, x_NH)


class PoolModel(nn.Module):
    """A model whose layers read and write a pool: its sizes, its angles, what its layers see.

    groups: query heads of a key head. kinds: the kind of each layer. narrows: what layers of a kind
    leave of the masks; None: everything. notes: what the loader assumed or ignored.
    """

    frequencies: Tensor

    def __init__(
        self, shape: DecoderShape, kinds: tuple[Any, ...], narrows: Mapping[Any, Narrow | None]
    ) -> None:
        super().__init__()
        self.groups = shape.heads // shape.kv_heads
        self.num_layers = len(kinds)
        self.hidden_size = shape.hidden_size
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.kinds = kinds
        self.narrows = narrows
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
        """cos and signed sin of these positions, computed in float32 for every dtype, as in
        transformers: float64 angles would be another model."""
        angles = positions_N[:, None].float() * self.frequencies
        cos = angles.cos()
        sin = angles.sin()
        if self.rope_scaling != 1:
            cos = cos * self.rope_scaling
            sin = sin * self.rope_scaling
        cos = torch.cat((cos, cos), -1)[:, None]
        sin = torch.cat((-sin, sin), -1)[:, None]
        dtype = self.dtype
        return (cos, sin) if dtype == torch.float32 else (cos.to(dtype), sin.to(dtype))

    def attention_inputs(
        self, positions_BQ: Tensor, slots_BQ: Tensor, attention: AttentionPlan
    ) -> dict[Any, AttentionInputs]:
        """What the layers see, by their kind."""
        positions_N = positions_BQ.flatten()
        slots_N = slots_BQ.flatten()
        cos_N1d, sin_N1d = self.angles(positions_N)
        inputs = {}
        for kind, narrow in self.narrows.items():
            plan = attention.for_layers(positions_N, self.groups, cos_N1d.dtype, narrow)
            inputs[kind] = AttentionInputs(plan, cos_N1d, sin_N1d, slots_N)
        return inputs
