"""The drafters of EAGLE-1 and EAGLE-2, which are one model, and of EAGLE-3, under their published
parameter names. Layout and arithmetic follow SafeAILab/EAGLE (`cnets1.py` for EAGLE-1 and -2,
`cnets.py` for EAGLE-3) and vllm-project/speculators."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.attention.backends import AttentionPlan
from ...ops.kv.pool import KVCache
from ..layers import DecoderLayer, Of, PoolModel, RMSNorm, itself, rms_norm, wide_logits
from ..linear import Linear
from .config import Eagle3Config, EagleConfig

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class EagleHead(PoolModel):
    """What all drafters of the family share: they continue on their own hidden states.

    tap_ids: the target's hidden states that `fc` reads. layer: the one layer, under whatever
    published name. ends: the parameters that are the target's, unless the drafter brings its own.
    owned: which of them came with the drafter; the others are the target's own memory."""

    ends: ClassVar[frozenset[str]]
    layer: DecoderLayer
    lm_head: Linear
    mixes = True

    def __init__(self, config: EagleConfig | Eagle3Config) -> None:
        super().__init__(config)
        self.tap_ids = config.taps
        self.owned: frozenset[str] = frozenset()
        table_VH = torch.empty(config.vocab_size, config.hidden_size)
        if not table_VH.is_meta:  # drawing nothing there would import torch's compiler, for seconds
            nn.init.normal_(table_VH)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table_VH)

    def forward(
        self,
        tokens_BQ: Tensor,
        hidden_BQH: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionPlan,
        kv: KVCache,
    ) -> Tensor:
        """Row j: token j+1 with the feature of token j, at position j -> hidden_BQH for j+1."""
        embedding_NH = F.embedding(tokens_BQ.flatten(), self.embed_tokens.weight)
        embedding_NH = embedding_NH.to(self.compute_dtype)
        mixed_NW, residual_NH = self.mix(embedding_NH, hidden_BQH.flatten(0, 1))
        if self.compiled is not None and self.compiled.takes(attention):
            (out_NH,) = self.compiled.run(
                residual_NH, positions_BQ, slots_BQ, attention, kv=kv, mixed_NW=mixed_NW
            )
        else:
            inputs = self.attention_inputs(positions_BQ, slots_BQ, attention)[self.kinds[0]]
            out_NH = self.layer(mixed_NW, residual_NH, 0, inputs, kv=kv)
        return torch.unflatten(self.to_features(out_NH), 0, tokens_BQ.shape)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """Target features [R, F] -> the hidden states [R, H] that the drafter takes."""
        return taps_RF.to(self.dtype)

    def mix(self, embedding_NH: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and the features before them -> attention's input [N, W], the residual [N, H]."""
        raise NotImplementedError

    def to_features(self, out_NH: Tensor) -> Tensor:
        """The layer's output -> the next features."""
        return out_NH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, H] of `forward` -> float32 [R, draft vocabulary]."""
        return wide_logits(hidden_RH, self.lm_head)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids, same shape."""
        return draft_ids

    def published(self, of: Of = itself) -> dict[str, Tensor]:
        borrowed = self.ends - self.owned
        return {n: view for n, view in super().published(of).items() if n not in borrowed}


class Eagle(EagleHead):
    """The drafter of EAGLE-1 and EAGLE-2: it predicts the target's last hidden state."""

    ends = frozenset((EMBEDDING, LM_HEAD))

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.config = config
        hidden = config.hidden_size
        self.fc = Linear(2 * hidden, hidden, bias=config.fc_bias)
        layer = DecoderLayer(config, norms=())
        self.layers = nn.ModuleList([layer])
        vars(self)["layer"] = layer  # not a second parameter
        self.lm_head = Linear(hidden, config.vocab_size, bias=False)

    def mix(self, embedding_NH: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        x_NH = self.fc.forward(torch.cat((embedding_NH, hidden_NH), -1))
        return x_NH, x_NH


class Eagle3(EagleHead):
    """The drafter of EAGLE-3, with a vocabulary of its own. d2t: int64 [draft vocabulary], offset
    from a draft id to its target id. t2d: bool [vocabulary], the target ids that it can draft."""

    ends = frozenset((EMBEDDING,))
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.config = config
        hidden = config.hidden_size
        features = len(config.taps) * config.target_hidden_size
        self.fc = Linear(features, hidden, bias=False)
        self.midlayer = DecoderLayer(config, 2 * hidden, ("input_layernorm", "hidden_norm"))
        vars(self)["layer"] = self.midlayer  # not a second parameter
        self.norm = RMSNorm(hidden, config.eps)
        self.lm_head = Linear(hidden, config.draft_vocab_size, bias=False)
        self.input_norm = RMSNorm(features, config.eps) if config.norm_before_fc else None
        norms = (RMSNorm(config.target_hidden_size, config.eps) for _ in config.taps)
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        with torch.device("cpu"):  # even inside a meta-device build: a file may lack them
            d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            t2d = torch.arange(config.vocab_size) < config.draft_vocab_size
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        taps_RF = taps_RF.to(self.dtype)
        if self.input_norm is not None:
            taps_RF = self.input_norm.forward(taps_RF)
        if self.fc_norm is not None:
            parts = taps_RF.chunk(len(self.fc_norm), -1)
            taps_RF = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc.forward(taps_RF)

    def mix(self, embedding_NH: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        normed_NH = rms_norm(hidden_NH, layer.hidden_norm.weight, layer.eps)
        embedding_NH = rms_norm(embedding_NH, layer.input_layernorm.weight, layer.eps)
        mixed_NW = torch.cat((embedding_NH, normed_NH), -1)
        return mixed_NW, normed_NH if self.config.norm_before_residual else hidden_NH

    def to_features(self, out_NH: Tensor) -> Tensor:
        return self.norm(out_NH) if self.config.norm_output else out_NH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        normed_RH = hidden_RH if self.config.norm_output else self.norm(hidden_RH)
        return wide_logits(normed_RH, self.lm_head)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def published(self, of: Of = itself) -> dict[str, Tensor]:
        tensors = {**super().published(of), "d2t": self.d2t, "t2d": self.t2d}
        if self.config.speculators:
            tensors = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
        return tensors
