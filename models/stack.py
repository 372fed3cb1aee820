"""The parameters of a decoder: all of them, or a rank's share."""

from functools import partial

import torch
from torch import Tensor, nn

from ..ops.attention.backends import window_mask
from .config import DecoderConfig
from .layers import DecoderLayer, PoolModel, wide_logits
from .linear import Linear
from .norm import RMSNorm
from .shares import Share


class DecoderStack(PoolModel):
    """The parameters of a decoder, and what is made of them whatever the forward.

    Attributes:
        share: which of them are here; embedding and norms always are.
    """

    def __init__(self, config: DecoderConfig, share: Share | None = None) -> None:
        super().__init__(config, config.num_layers)
        self.config = config
        self.hidden_size = config.hidden_size
        self.share = Share.of(config) if share is None else share
        self.kv_heads = len(self.share.kv_heads)
        shape = self.share.narrowed(config)
        self.known = config.vocab_size  # ids from here on are rows without a token
        near = partial(window_mask, window=config.window)
        self.narrows = {slides: near if slides else None for slides in set(config.sliding)}
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.lm_head = Linear(config.hidden_size, len(self.share.vocabulary), bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def logits(self, x_RH: Tensor) -> Tensor:
        """[R, H] after the last layer -> [R, V]; float32, of a float64 model float64."""
        logits_RV = wide_logits(self.norm.forward(x_RH), self.lm_head)
        if self.known < logits_RV.shape[1]:
            logits_RV[:, self.known :] = -torch.inf
        return logits_RV

    def published(self) -> dict[str, Tensor]:
        """Views of all parameters under the names of a Hugging Face checkpoint."""
        views: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            views |= {f"model.layers.{index}.{k}": v for k, v in layer.published().items()}
        return views
