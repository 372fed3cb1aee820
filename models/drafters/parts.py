"""What the networks of all drafters share: one decoder layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.kv.pool import KVCache
from ..config import DecoderShape
from ..layers import AttentionInputs, PoolModel, attend_pool
from ..linear import Fused, Linear
from ..norm import RMSNorm
from ..rope import Angles, rotate


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
        self.q_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else nn.Identity()

    def keys_values(self, x_NW: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[N, W] -> rotated keys and values, each [N, kv_heads, d]."""
        if self.qkv.joint is not None:
            return self.project(x_NW, angles)[1:]
        k_Ngd = self._heads(self.k_proj.forward(x_NW))
        v_Ngd = self._heads(self.v_proj.forward(x_NW))
        return rotate(self.k_norm.forward(k_Ngd), *angles), v_Ngd

    def project(self, x_NW: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """[N, W] -> rotated queries [N, heads, d], and keys and values [N, kv_heads, d]."""
        q_Nhd, k_Ngd, v_Ngd = map(self._heads, self.qkv(x_NW))
        q_Nhd = self.q_norm.forward(q_Nhd)
        k_Ngd = self.k_norm.forward(k_Ngd)
        return rotate(q_Nhd, *angles), rotate(k_Ngd, *angles), v_Ngd

    def _heads(self, x_ND: Tensor) -> Tensor:
        """[N, heads * d] -> [N, heads, d]."""
        return x_ND.view(x_ND.shape[0], -1, self.head_dim)


class DrafterMLP(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        inner = shape.intermediate_size
        bias = shape.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.gate_up = Fused(self.gate_proj, self.up_proj)
        self.down_proj = Linear(inner, hidden, bias=bias)


class DrafterLayer(nn.Module):
    """A decoder layer, whose rows all attend to the pool; training uses its parts.

    What stands between its input and the norms in front of attention is the drafter's own.
    """

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
        return self.finish(residual_NH, attend_pool(q, index, inputs, kv))

    def finish(self, residual_NH: Tensor, attended_ND: Tensor) -> Tensor:
        """Everything after attention: output projection, residual, SwiGLU."""
        x_NH = self.self_attn.o_proj.added(residual_NH, attended_ND)
        y_NH = self.post_attention_layernorm.forward(x_NH)
        gate_NI, up_NI = self.mlp.gate_up(y_NH)
        return self.mlp.down_proj.added(x_NH, F.silu(gate_NI) * up_NI)


class DrafterModel(PoolModel):
    """A drafter: `fc` takes the target's taps in, its dtype is the drafter's."""

    fc: Linear

    def __init__(self, shape: DecoderShape, layers: int, tap_ids: tuple[int, ...]) -> None:
        super().__init__(shape, layers)
        self.tap_ids = tap_ids

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def published(self) -> dict[str, Tensor]:
        """The parameters under their published names."""
        return dict(self.named_parameters())
