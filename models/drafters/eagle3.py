"""The EAGLE-3 drafter, under its published parameter names.

Layout and arithmetic follow SafeAILab/EAGLE (`cnets.py`) and vllm-project/speculators.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.kv.pool import KVCache
from ..layers import AttentionInputs, RMSNorm, wide_logits
from .eagle import EMBEDDING, EagleHead
from .eagle3_config import Eagle3Config
from .parts import DrafterLayer


class Eagle3Layer(DrafterLayer):
    """The one decoder layer, whose attention reads embeddings beside features."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.hidden_size, "input_layernorm", "hidden_norm")
        self.norm_before_residual = config.norm_before_residual

    def mix(self, embedding_NH: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's input [N, 2H], the embedding first, and the residual [N, H]."""
        normed_NH = self.hidden_norm(hidden_NH)
        mixed = torch.cat((self.input_layernorm(embedding_NH), normed_NH), -1)
        return mixed, normed_NH if self.norm_before_residual else hidden_NH


class Eagle3(EagleHead):
    """Implements `HiddenDrafter`. `embed_tokens.weight` is the target's unless the file has one.

    Attributes:
        d2t: int64 [draft vocabulary], offset from a draft id to its target id.
        t2d: bool [vocabulary], True for target ids that the drafter knows.
    """

    ends = frozenset((EMBEDDING,))
    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, config.taps)
        self.config, self.notes = config, config.notes
        hidden, features = config.hidden_size, len(config.taps) * config.target_hidden_size
        self.fc = nn.Linear(features, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(hidden, config.eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.input_norm = RMSNorm(features, config.eps) if config.norm_before_fc else None
        norms = (RMSNorm(config.target_hidden_size, config.eps) for _ in config.taps)
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        with torch.device("cpu"):  # even inside a meta-device build: a file may lack them
            d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            t2d = torch.arange(config.vocab_size) < config.draft_vocab_size
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """See `HiddenDrafter.fuse`."""
        taps_RF = taps_RF.to(self.dtype)
        if self.input_norm is not None:
            taps_RF = self.input_norm(taps_RF)
        if self.fc_norm is not None:
            parts = taps_RF.chunk(len(self.fc_norm), -1)
            taps_RF = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], -1)
        return F.linear(taps_RF, self.fc.weight)

    def step(
        self, embedding_NH: Tensor, hidden_NH: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """See `EagleHead.step`. What returns is not normalised, unless `norm_output`."""
        mixed_NW, residual_NH = self.midlayer.mix(embedding_NH, hidden_NH)
        out_NH: Tensor = self.midlayer(mixed_NW, residual_NH, 0, inputs, kv)
        return self.norm(out_NH) if self.config.norm_output else out_NH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """See `HiddenDrafter.logits`."""
        normed_RH = hidden_RH if self.config.norm_output else self.norm(hidden_RH)
        return wide_logits(normed_RH, self.lm_head.weight)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `HiddenDrafter.to_target`."""
        return draft_ids + self.d2t[draft_ids]

    def published(self) -> dict[str, Tensor]:
        """Parameters and maps under published names; the embedding only where it is its own."""
        tensors = {**super().published(), "d2t": self.d2t, "t2d": self.t2d}
        if self.config.speculators:
            tensors = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
        return tensors
