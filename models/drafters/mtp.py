"""The MTP layer of a target, in the target's own files: MiMo's (arXiv 2505.07608). Arithmetic
follows vLLM's `mimo_mtp.py`. Row j joins the target's hidden state of token j, before its final
norm, and token j + 1, each after a norm. The layer is trained for one token; for later ones it
continues on its own output, after its norm, as an EAGLE head does."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..config import DecoderConfig, DecoderShape
from ..layers import DecoderLayer, Of, RMSNorm, itself
from ..linear import Linear
from .config import EagleConfig
from .eagle import EMBEDDING, LM_HEAD, EagleHead

FIRST = "model.mtp_layers.0."


def mtp_config(target: DecoderConfig) -> EagleConfig:
    """A layer of the target's shape, which reads its last hidden state before the final norm."""
    shape: dict[str, Any] = {f.name: getattr(target, f.name) for f in fields(DecoderShape)}
    taps = (target.num_layers + 1,)
    return EagleConfig(**shape | target.sizes() | {"notes": ()}, taps=taps)


class Mtp(EagleHead):
    """Embedding and head are the target's."""

    ends = frozenset((EMBEDDING, LM_HEAD))

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.config = config
        hidden = config.hidden_size
        self.token_layernorm = RMSNorm(hidden, config.eps)
        self.hidden_layernorm = RMSNorm(hidden, config.eps)
        self.fc = Linear(2 * hidden, hidden, bias=False)
        self.block = DecoderLayer(config)
        vars(self)["layer"] = self.block  # not a second parameter
        self.final_layernorm = RMSNorm(hidden, config.eps)
        self.lm_head = Linear(hidden, config.vocab_size, bias=False)

    def mix(self, embedding_NH: Tensor, hidden_NH: Tensor) -> tuple[Tensor, Tensor]:
        both_NW = (self.hidden_layernorm(hidden_NH), self.token_layernorm(embedding_NH))
        x_NH = self.fc.forward(torch.cat(both_NW, -1))
        return self.block.input_layernorm(x_NH), x_NH

    def to_features(self, out_NH: Tensor) -> Tensor:
        normed_NH: Tensor = self.final_layernorm(out_NH)
        return normed_NH

    def published(self, of: Of = itself) -> dict[str, Tensor]:
        names = {"fc.weight": "input_proj.weight"}
        views = super().published(of).items()
        return {FIRST + names.get(n, n.removeprefix("block.")): view for n, view in views}
