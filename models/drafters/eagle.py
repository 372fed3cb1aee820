"""The EAGLE family: what all its drafters share, and the one of EAGLE-1 and EAGLE-2.

Layout and arithmetic follow SafeAILab/EAGLE (`cnets1.py` for EAGLE-1 and -2, `cnets.py` for
EAGLE-3), under the published parameter names. EAGLE-1 and EAGLE-2 are one model: they differ in
the tree that is drafted with it.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from ...ops.attention.backends import Attend, dense
from ...ops.attention.metadata import AttentionMetadata
from ...ops.kv.pool import KVCache
from ..config import DecoderShape
from ..layers import AttentionInputs, RMSNorm, attend_pool, group_inputs
from .eagle_config import EagleConfig
from .parts import DrafterLayer, DrafterModel, wide_logits

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class EagleDecoderLayer(DrafterLayer):
    """The one decoder layer, whose rows all attend to the pool."""

    def attended(
        self, x_NW: Tensor, inputs: AttentionInputs, kv: KVCache, attend: Attend
    ) -> Tensor:
        """[N, W] -> [N, heads * d]; writes the rows' keys and values into layer 0 of the pool."""
        q, k, v = self.self_attn.project(x_NW, (inputs.cos_N1d, inputs.sin_N1d))
        kv.write_(0, inputs.slots_N, k.transpose(0, 1), v.transpose(0, 1))
        return attend_pool(q, 0, inputs, kv, attend)


class EagleHead(DrafterModel):
    """What all drafters of the family share; with its subclasses it implements `HiddenDrafter`.

    Attributes:
        ends: the parameters that are the target's, unless the drafter brings its own.
        owned: which of them came with the drafter; the others are the target's own memory.
    """

    ends: ClassVar[frozenset[str]]

    def __init__(self, shape: DecoderShape, taps: tuple[int, ...], attend: Attend) -> None:
        super().__init__(shape, 1, taps, attend)
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

    def published(self) -> dict[str, Tensor]:
        """Parameters under published names; of `ends` only those it owns."""
        lent = self.ends - self.owned
        return {name: p for name, p in self.named_parameters() if name not in lent}


class EagleLayer(EagleDecoderLayer):
    """A decoder layer without a norm before its attention."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)

    def forward(self, x_NH: Tensor, inputs: AttentionInputs, kv: KVCache, attend: Attend) -> Tensor:
        """[N, H] -> [N, H]; writes the rows' keys and values into layer 0 of the pool."""
        return self.finish(x_NH, self.attended(x_NH, inputs, kv, attend))


class Eagle(EagleHead):
    """The drafter of EAGLE-1 and EAGLE-2: it predicts the target's last hidden state."""

    ends = frozenset((EMBEDDING, LM_HEAD))

    def __init__(self, config: EagleConfig, attend: Attend = dense) -> None:
        super().__init__(config, config.taps, attend)
        self.config = config
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
        """See `HiddenDrafter.logits`: no norm before the head."""
        return wide_logits(hidden_RH, self.lm_head.weight)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """See `HiddenDrafter.to_target`: the vocabulary is the target's."""
        return draft_ids
