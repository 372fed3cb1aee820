"""The EAGLE family: what all its drafters share, and the one of EAGLE-1 and EAGLE-2.

Layout and arithmetic follow SafeAILab/EAGLE (`cnets1.py` for EAGLE-1 and -2, `cnets.py` for
EAGLE-3), under the published parameter names. EAGLE-1 and EAGLE-2 are one model: they differ in
the tree that is drafted with it.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from ...ops.attention.metadata import AttentionMetadata
from ...ops.kv.pool import KVCache
from ..config import DecoderShape
from ..layers import AttentionInputs, wide_logits
from .eagle_config import EagleConfig
from .parts import DrafterLayer, DrafterModel

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class EagleHead(DrafterModel):
    """What all drafters of the family share; with its subclasses it implements `HiddenDrafter`.

    Attributes:
        ends: the parameters that are the target's, unless the drafter brings its own.
        owned: which of them came with the drafter; the others are the target's own memory.
    """

    ends: ClassVar[frozenset[str]]

    def __init__(self, shape: DecoderShape, taps: tuple[int, ...]) -> None:
        super().__init__(shape, 1, taps)
        self.owned: frozenset[str] = frozenset()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)

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
        (inputs,) = self.attention_inputs(positions_BQ, slots_BQ, attention).values()
        embedding_NH = self.embed_tokens(tokens_BQ.flatten()).to(self.dtype)
        out_NH = self.step(embedding_NH, hidden_BQH.flatten(0, 1), inputs, kv)
        return torch.unflatten(out_NH, 0, tokens_BQ.shape)

    def step(
        self, embedding_NH: Tensor, hidden_NH: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """Tokens and the features before them -> the next features, all [N, H]."""
        raise NotImplementedError

    def published(self) -> dict[str, Tensor]:
        """Parameters under published names; of `ends` only those it owns."""
        lent = self.ends - self.owned
        return {name: p for name, p in self.named_parameters() if name not in lent}


class Eagle(EagleHead):
    """The drafter of EAGLE-1 and EAGLE-2: it predicts the target's last hidden state."""

    ends = frozenset((EMBEDDING, LM_HEAD))

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, config.taps)
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden, bias=config.fc_bias)
        self.layers = nn.ModuleList([DrafterLayer(config, hidden)])
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """See `HiddenDrafter.fuse`: the one tap is the feature."""
        return taps_RF.to(self.dtype)

    def step(
        self, embedding_NH: Tensor, hidden_NH: Tensor, inputs: AttentionInputs, kv: KVCache
    ) -> Tensor:
        """See `EagleHead.step`; true and predicted features alike go through `fc`."""
        x_NH = self.fc(torch.cat((embedding_NH, hidden_NH), -1))
        out_NH: Tensor = self.layers[0](x_NH, x_NH, 0, inputs, kv)
        return out_NH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """See `HiddenDrafter.logits`: no norm before the head."""
        return wide_logits(hidden_RH, self.lm_head.weight)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `HiddenDrafter.to_target`: the vocabulary is the target's."""
        return draft_ids
