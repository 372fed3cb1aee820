"""What the networks of all drafters share: one decoder layer's parts, the angles, the logits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.attention.backends import Attend
from ..config import DecoderShape
from ..layers import RMSNorm, add_linear
from ..rope import inverse_frequencies, rotate, rotation

Angles = tuple[Tensor, Tensor]
"""cos and signed sin, each [N, 1, head_dim]."""


class DrafterAttention(nn.Module):
    """Projections of self-attention whose input is `wide` wide: in EAGLE-3 twice its output."""

    def __init__(self, shape: DecoderShape, wide: int) -> None:
        super().__init__()
        bias, dim = shape.qkv_bias, shape.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(wide, shape.heads * dim, bias=bias)
        self.k_proj = nn.Linear(wide, shape.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(wide, shape.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * dim, shape.hidden_size, bias=shape.o_bias)
        self.q_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else None

    def queries(self, x_NW: Tensor, angles: Angles) -> Tensor:
        """[N, W] -> rotated [N, heads, d]."""
        q_Nhd = self.q_proj(x_NW).view(len(x_NW), -1, self.head_dim)
        return rotate(q_Nhd if self.q_norm is None else self.q_norm(q_Nhd), *angles)

    def keys_values(self, x_NW: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[N, W] -> rotated keys and values, each [N, kv_heads, d]."""
        k_Ngd = self.k_proj(x_NW).view(len(x_NW), -1, self.head_dim)
        v_Ngd = self.v_proj(x_NW).view(len(x_NW), -1, self.head_dim)
        return rotate(k_Ngd if self.k_norm is None else self.k_norm(k_Ngd), *angles), v_Ngd

    def project(self, x_NW: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """[N, W] -> rotated queries [N, heads, d], and keys and values [N, kv_heads, d]."""
        return self.queries(x_NW, angles), *self.keys_values(x_NW, angles)


class DrafterMLP(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        hidden, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)


class DrafterLayer(nn.Module):
    """Attention and SwiGLU of a decoder layer; the norms are the subclass's."""

    post_attention_layernorm: RMSNorm

    def __init__(self, shape: DecoderShape, wide: int) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(shape, wide)
        self.mlp = DrafterMLP(shape)

    def finish(self, residual_NH: Tensor, attended_ND: Tensor) -> Tensor:
        """Everything after attention: output projection, residual, SwiGLU."""
        x_NH = add_linear(residual_NH, attended_ND, self.self_attn.o_proj)
        y_NH = self.post_attention_layernorm(x_NH)
        inner_NI = F.silu(self.mlp.gate_proj(y_NH)) * self.mlp.up_proj(y_NH)
        return add_linear(x_NH, inner_NI, self.mlp.down_proj)


class DrafterModel(nn.Module):
    """A drafter's sizes and angles.

    Attributes:
        groups: query heads of a key head.
        notes: what the loader found worth telling.
    """

    fc: nn.Linear
    frequencies: Tensor

    def __init__(
        self, shape: DecoderShape, layers: int, tap_ids: tuple[int, ...], attend: Attend
    ) -> None:
        super().__init__()
        self.attend, self.groups = attend, shape.heads // shape.kv_heads
        self.num_layers, self.kv_heads, self.head_dim = layers, shape.kv_heads, shape.head_dim
        self.tap_ids = tap_ids
        self.notes: tuple[str, ...] = ()
        # On the CPU even inside a meta-device build: the angles are computed, not loaded.
        with torch.device("cpu"):
            frequencies, self.rope_scaling = inverse_frequencies(shape.rope, shape.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def angles(self, positions_N: Tensor) -> Angles:
        """cos and signed sin of these positions."""
        return rotation(positions_N, self.frequencies, self.rope_scaling, self.fc.weight.dtype)


def wide_logits(hidden_RH: Tensor, head_VH: Tensor) -> Tensor:
    """[R, H] -> [R, V], float32; float64 drafters return float64."""
    logits_RV = F.linear(hidden_RH, head_VH)
    return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
