"""The EAGLE-3 drafter, under its published parameter names.

Layout and arithmetic follow SafeAILab/EAGLE (`cnets.py`) and vllm-project/speculators.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attend import Attend, dense, to_bias
from ..ops.kv import KVCache
from ..ops.types import Visibility
from .eagle3_config import Eagle3Config
from .layers import RMSNorm, Sight, add_linear, look
from .rope import inverse_frequencies, rotate, rotation


class Attention(nn.Module):
    """Self-attention whose input is twice as wide as its output: [embedding; hidden state]."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        wide, bias, dim = 2 * config.hidden_size, config.attention_bias, config.head_dim
        self.q_proj = nn.Linear(wide, config.heads * dim, bias=bias)
        self.k_proj = nn.Linear(wide, config.kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(wide, config.kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * dim, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(dim, config.eps) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.eps) if config.qk_norm else None

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


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)


class Midlayer(nn.Module):
    """The one decoder layer; training uses `mix`, `self_attn.project` and `finish` directly."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)

    def mix(self, embedding_NH: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's input [N, 2H], the embedding first, and the residual [N, H]."""
        normed_NH = self.hidden_norm(hidden_NH)
        mixed = torch.cat((self.input_layernorm(embedding_NH), normed_NH), -1)
        return mixed, normed_NH if self.norm_before_residual else hidden_NH

    def finish(self, residual_NH: Tensor, attended_ND: Tensor) -> Tensor:
        """Everything after attention: output projection, residual, SwiGLU."""
        x_NH = add_linear(residual_NH, attended_ND, self.self_attn.o_proj)
        y_NH = self.post_attention_layernorm(x_NH)
        inner_NI = F.silu(self.mlp.gate_proj(y_NH)) * self.mlp.up_proj(y_NH)
        return add_linear(x_NH, inner_NI, self.mlp.down_proj)

    def forward(
        self, embedding_NH: Tensor, hidden_NH: Tensor, sight: Sight, kv: KVCache, attend: Attend
    ) -> Tensor:
        """[N, H] -> [N, H]; writes the rows' keys and values into layer 0 of the pool."""
        mixed_NW, residual_NH = self.mix(embedding_NH, hidden_NH)
        q, k, v = self.self_attn.project(mixed_NW, sight.cos_N1d, sight.sin_N1d)
        kv.write_(0, sight.slots_N, k.transpose(0, 1), v.transpose(0, 1))
        return self.finish(residual_NH, look(q, 0, sight, kv, attend))


class Eagle3(nn.Module):
    """Implements `HiddenDrafter`. `embed_tokens.weight` is the target's unless the file has one.

    Attributes:
        d2t: int64 [draft vocabulary], offset from a draft id to its target id.
        t2d: bool [vocabulary], True for target ids that the drafter knows.
        owns_embedding: the embedding came with the drafter.
        notes: what the loader found worth telling.
    """

    num_layers = 1

    def __init__(self, config: Eagle3Config, attend: Attend = dense) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.tap_ids = config.taps
        self.owns_embedding = False
        self.notes: tuple[str, ...] = config.notes
        hidden, features = config.hidden_size, len(config.taps) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(features, hidden, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(hidden, config.eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.input_norm = RMSNorm(features, config.eps) if config.norm_before_fc else None
        self.fc_norm = self._fc_norms() if config.fc_norm else None
        self._add_buffers()

    def _fc_norms(self) -> nn.ModuleList:
        config = self.config
        return nn.ModuleList(RMSNorm(config.target_hidden_size, config.eps) for _ in config.taps)

    def _add_buffers(self) -> None:
        """On the CPU even inside a meta-device build: the angles are computed, not loaded."""
        config = self.config
        with torch.device("cpu"):
            frequencies, self.rope_scaling = inverse_frequencies(config.rope, config.head_dim)
            d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            t2d = torch.arange(config.vocab_size) < config.draft_vocab_size
        self.frequencies: Tensor
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """See `HiddenDrafter.fuse`."""
        taps_RF = taps_RF.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            taps_RF = self.input_norm(taps_RF)
        if self.fc_norm is not None:
            parts = taps_RF.chunk(len(self.fc_norm), -1)
            taps_RF = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], -1)
        return F.linear(taps_RF, self.fc.weight)

    def angles(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, each [N, 1, head_dim]."""
        return rotation(positions_N, self.frequencies, self.rope_scaling, self.fc.weight.dtype)

    def forward(
        self,
        tokens_BQ: Tensor,
        hidden_BQH: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        visible: Visibility,
        kv: KVCache,
    ) -> Tensor:
        """See `HiddenDrafter.forward`. What returns is what is fed back: not normalised, unless
        `norm_output`."""
        dtype, groups = self.fc.weight.dtype, self.config.heads // self.kv_heads
        bias = to_bias(visible.mask_BQK, groups, dtype)
        cos, sin = self.angles(positions_BQ.flatten())
        sight = Sight(len(bias), bias, cos, sin, slots_BQ.flatten())
        embedding_NH = self.embed_tokens(tokens_BQ.flatten()).to(dtype)
        hidden_NH = hidden_BQH.flatten(0, 1)
        out_NH = self.midlayer(embedding_NH, hidden_NH, sight, kv, self.attend)
        if self.config.norm_output:
            out_NH = self.norm(out_NH)
        return torch.unflatten(out_NH, 0, tokens_BQ.shape)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """See `HiddenDrafter.logits`; float64 drafters return float64."""
        normed_RH = hidden_RH if self.config.norm_output else self.norm(hidden_RH)
        logits_RV = F.linear(normed_RH, self.lm_head.weight)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `HiddenDrafter.to_target`."""
        return draft_ids + self.d2t[draft_ids]

    def published(self) -> dict[str, Tensor]:
        """Parameters and maps under published names; the embedding only where it is the
        drafter's own."""
        found: dict[str, Tensor] = dict(self.named_parameters()) | {
            "d2t": self.d2t,
            "t2d": self.t2d,
        }
        if not self.owns_embedding:
            del found["embed_tokens.weight"]
        if self.config.speculators:
            found = {k.replace("midlayer.", "layers.0."): v for k, v in found.items()}
        return found
