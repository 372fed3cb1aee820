"""The EAGLE family: what all its drafters share, and the one of EAGLE-1 and EAGLE-2.

Layout and arithmetic follow SafeAILab/EAGLE (`cnets1.py` for EAGLE-1 and -2, `cnets.py` for
EAGLE-3), under the published parameter names. EAGLE-1 and EAGLE-2 are one model: they differ in
the tree that is drafted with it.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.attention.backends import Attend, dense
from ...ops.attention.metadata import AttentionMetadata
from ...ops.kv.pool import KVCache
from ..config import RopeConfig
from ..layers import AttentionInputs, RMSNorm, add_linear, attend_pool, group_inputs
from ..rope import inverse_frequencies, rotate, rotation
from .eagle_config import EagleConfig

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
ENDS = frozenset((EMBEDDING, LM_HEAD))  # the target's, unless the drafter brings its own


class HeadShape(Protocol):
    """What the configurations of all drafters of the family say."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def rope(self) -> RopeConfig: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


class EagleAttention(nn.Module):
    """Self-attention whose input is `wide` wide: in EAGLE-3 twice as wide as its output."""

    def __init__(self, shape: HeadShape, wide: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        bias, dim = shape.qkv_bias, shape.head_dim
        self.q_proj = nn.Linear(wide, shape.heads * dim, bias=bias)
        self.k_proj = nn.Linear(wide, shape.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(wide, shape.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(shape.heads * dim, shape.hidden_size, bias=shape.o_bias)
        self.q_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(dim, shape.eps) if shape.qk_norm else None

    def project(
        self, x_NW: Tensor, cos_N1d: Tensor, sin_N1d: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, heads, d] and keys [N, kv_heads, d], and values [N, kv_heads, d]."""
        q_Nhd = self.q_proj(x_NW).view(len(x_NW), -1, self.head_dim)
        k_Ngd = self.k_proj(x_NW).view(len(x_NW), -1, self.head_dim)
        v_Ngd = self.v_proj(x_NW).view(len(x_NW), -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q_Nhd, k_Ngd = self.q_norm(q_Nhd), self.k_norm(k_Ngd)
        return rotate(q_Nhd, cos_N1d, sin_N1d), rotate(k_Ngd, cos_N1d, sin_N1d), v_Ngd


class EagleMLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)


class EagleDecoderLayer(nn.Module):
    """Attention and SwiGLU of the one decoder layer; the norms are the subclass's."""

    post_attention_layernorm: RMSNorm

    def __init__(self, shape: HeadShape, wide: int) -> None:
        super().__init__()
        self.self_attn = EagleAttention(shape, wide)
        self.mlp = EagleMLP(shape)

    def attended(
        self, x_NW: Tensor, inputs: AttentionInputs, kv: KVCache, attend: Attend
    ) -> Tensor:
        """[N, W] -> [N, heads * d]; writes the rows' keys and values into layer 0 of the pool."""
        q, k, v = self.self_attn.project(x_NW, inputs.cos_N1d, inputs.sin_N1d)
        kv.write_(0, inputs.slots_N, k.transpose(0, 1), v.transpose(0, 1))
        return attend_pool(q, 0, inputs, kv, attend)

    def finish(self, residual_NH: Tensor, attended_ND: Tensor) -> Tensor:
        """Everything after attention: output projection, residual, SwiGLU."""
        x_NH = add_linear(residual_NH, attended_ND, self.self_attn.o_proj)
        y_NH = self.post_attention_layernorm(x_NH)
        inner_NI = F.silu(self.mlp.gate_proj(y_NH)) * self.mlp.up_proj(y_NH)
        return add_linear(x_NH, inner_NI, self.mlp.down_proj)


class EagleHead(nn.Module):
    """What all drafters of the family share; with its subclasses it implements `HiddenDrafter`.

    Attributes:
        notes: what the loader found worth telling.
    """

    num_layers = 1
    fc: nn.Linear
    frequencies: Tensor

    def __init__(self, shape: HeadShape, attend: Attend) -> None:
        super().__init__()
        self.attend, self.groups = attend, shape.heads // shape.kv_heads
        self.kv_heads, self.head_dim, self.tap_ids = shape.kv_heads, shape.head_dim, shape.taps
        self.notes: tuple[str, ...] = ()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        # On the CPU even inside a meta-device build: the angles are computed, not loaded.
        with torch.device("cpu"):
            frequencies, self.rope_scaling = inverse_frequencies(shape.rope, shape.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [N, 1, head_dim]."""
        return rotation(positions_N, self.frequencies, self.rope_scaling, self.fc.weight.dtype)

    def forward(
        self,
        tokens_BQ: Tensor,
        hidden_BQH: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionMetadata,
        kv: KVCache,
    ) -> Tensor:
        """See `HiddenDrafter.forward`."""
        dtype, positions_N = self.fc.weight.dtype, positions_BQ.flatten()
        groups = group_inputs(attention, positions_N, self.groups, dtype)
        inputs = AttentionInputs(groups, *self.angles(positions_N), slots_BQ.flatten())
        embedding_NH = self.embed_tokens(tokens_BQ.flatten()).to(dtype)
        out_NH = self.step(embedding_NH, hidden_BQH.flatten(0, 1), inputs, kv)
        return torch.unflatten(out_NH, 0, tokens_BQ.shape)

    def step(
        self, embedding_NH: Tensor, hidden_NH: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """Tokens and the features before them -> the next features, all [N, H]."""
        raise NotImplementedError


class EagleLayer(EagleDecoderLayer):
    """A decoder layer without a norm before its attention."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)

    def forward(self, x_NH: Tensor, inputs: AttentionInputs, kv: KVCache, attend: Attend) -> Tensor:
        """[N, H] -> [N, H]; writes the rows' keys and values into layer 0 of the pool."""
        return self.finish(x_NH, self.attended(x_NH, inputs, kv, attend))


class Eagle(EagleHead):
    """The drafter of EAGLE-1 and EAGLE-2: it predicts the target's last hidden state.

    Attributes:
        owned: which of `ENDS` came with the drafter; the others are the target's own memory.
    """

    def __init__(self, config: EagleConfig, attend: Attend = dense) -> None:
        super().__init__(config, attend)
        self.config = config
        self.owned: frozenset[str] = frozenset()
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """See `HiddenDrafter.fuse`: the one tap is the feature."""
        return taps_RF.to(self.fc.weight.dtype)

    def step(
        self, embedding_NH: Tensor, hidden_NH: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """See `EagleHead.step`; true and predicted features alike go through `fc`."""
        x_NH = self.fc(torch.cat((embedding_NH, hidden_NH), -1))
        out_NH: Tensor = self.layers[0](x_NH, inputs, kv, self.attend)
        return out_NH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """See `HiddenDrafter.logits`: no norm before the head. float64 stays float64."""
        logits_RV: Tensor = self.lm_head(hidden_RH)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `HiddenDrafter.to_target`: the vocabulary is the target's."""
        return draft_ids

    def published(self) -> dict[str, Tensor]:
        """Parameters under published names; of the two ends only those it owns."""
        lent = ENDS - self.owned
        return {n: p for n, p in self.named_parameters() if n not in lent}
