"""Rotary positions: angles as transformers computes them, applied to queries and keys at once."""

import torch
from torch import Tensor

from .rope_config import RopeConfig

Angles = tuple[Tensor, Tensor]
"""cos and signed sin, each [N, 1, head_dim], for `rotate`."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 [head_dim / 2] and the factor on cos and sin.

    `dynamic` equals `default` within the trained length, which is as far as it is used here.
    """
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


def rotation(
    positions_N: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> Angles:
    """The angles of these positions.

    They are float32 in every dtype, as in transformers: float64 ones would be another model.
    """
    angles = positions_N[:, None].float() * frequencies
    cos = angles.cos()
    sin = angles.sin()
    if scaling != 1:
        cos = cos * scaling
        sin = sin * scaling
    cos = torch.cat((cos, cos), -1)[:, None]
    sin = torch.cat((-sin, sin), -1)[:, None]
    return (cos, sin) if dtype == torch.float32 else (cos.to(dtype), sin.to(dtype))


def rotate(x_Nhd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin; a roll with the sign inside `sin` is the cheapest form."""
    return torch.addcmul(x_Nhd * cos_N1d, torch.roll(x_Nhd, x_Nhd.shape[-1] // 2, -1), sin_N1d)


def rotate_back(x_Nhd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """What `rotate` made x from, with the same cos and sin: its inverse for every kind of RoPE.

    A factor on cos and sin, and what their rounding did to them, is divided out again.
    """
    return rotate(x_Nhd, cos_N1d, -sin_N1d) / (cos_N1d.square() + sin_N1d.square())
