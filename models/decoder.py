"""One lean decoder for Llama, Mistral, Qwen2 and Qwen3: the target whose output counts."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention.backends import Attend, dense, window_mask
from ..ops.attention.metadata import AttentionMetadata
from ..ops.blend.blend import Blend
from ..ops.kv.pool import KVCache
from ..ops.types import LayerPlan, LayerStatus, TargetOutput
from .blend import ForwardRows, blended
from .config import DecoderConfig
from .layers import AttentionInputs, DecoderLayer, RMSNorm, group_inputs
from .rope import inverse_frequencies, rotate_back, rotation

COMPUTED = (LayerStatus.DECODE, LayerStatus.FULL)
AFTER = -1  # the tap behind the last layer, before the norm
MOST_ROWS = 2048  # side by side in a layer: of more, every row takes longer (docs/memory.md)


class Decoder(nn.Module):
    """Implements `Target`. Build it with `weights.load_target`; weights are never trained here.

    Attributes:
        config: what config.json said.
        notes: what the loader found worth telling, e.g. unexpected tensors.
    """

    def __init__(self, config: DecoderConfig, attend: Attend = dense) -> None:
        super().__init__()
        self.config = config
        self.num_layers, self.kv_heads = config.num_layers, config.kv_heads
        self.head_dim, self.hidden_size = config.head_dim, config.hidden_size
        self.vocab_size, self.max_positions = config.vocab_size, config.max_positions
        self.notes: tuple[str, ...] = ()
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config, attend) for _ in range(self.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        # On the CPU even inside a meta-device build: it is computed, not loaded.
        with torch.device("cpu"):
            frequencies, self.rope_scaling = inverse_frequencies(config.rope, config.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    @property
    def full_plan(self) -> LayerPlan:
        """The plan of a forward that computes every layer normally."""
        return (LayerStatus.DECODE,) * self.num_layers

    def forward(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionMetadata,
        kv: KVCache,
        plan: LayerPlan,
        logit_rows_R: Tensor,
        taps: tuple[int, ...],
        blend: Blend | None = None,
    ) -> TargetOutput:
        """See `Target.forward`. ValueError for a plan or taps that this model cannot follow."""
        self._check(plan, taps, blend)
        if blend is not None:
            place = ForwardRows(positions_BQ, slots_BQ, attention, kv)
            return blended(self, tokens_BQ, place, plan, logit_rows_R, taps, blend)
        place_N3 = torch.stack([tokens_BQ.flatten(), positions_BQ.flatten(), slots_BQ.flatten()], 1)
        rows, out = len(place_N3), dict[int, Tensor]()
        for rows_M, part in attention.parts(rows, MOST_ROWS):
            own_M3 = place_N3 if rows_M is None else place_N3[rows_M]
            kept = self._layers(own_M3, part, kv, taps)
            if rows_M is None:
                out = kept
                continue
            for tap, x_MH in kept.items():
                x_NH = out.setdefault(tap, x_MH.new_zeros(rows, x_MH.shape[1]))
                x_NH.index_copy_(0, rows_M, x_MH)
        logits_RV = self.logits(out.pop(AFTER).index_select(0, logit_rows_R))
        return TargetOutput(logits_RV, torch.cat(list(out.values()), -1) if out else None)

    def _layers(
        self, place_M3: Tensor, attention: AttentionMetadata, kv: KVCache, taps: tuple[int, ...]
    ) -> dict[int, Tensor]:
        """Rows through all layers -> [M, H] at each tap, in order; AFTER is behind the last.

        Args:
            place_M3: token, position and slot of each row.
        """
        tokens_M, positions_M, slots_M = place_M3.unbind(1)
        inputs = self.attention_inputs(positions_M, slots_M, attention)
        x_MH = F.embedding(tokens_M, self.embed)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                kept[index] = x_MH
            x_MH = layer(x_MH, index, inputs[self.config.sliding[index]], kv)
        if self.num_layers in taps:
            kept[self.num_layers] = self.norm(x_MH)
        return {**kept, AFTER: x_MH}

    def logits(self, x_RH: Tensor) -> Tensor:
        """[R, H] after the last layer -> [R, V]; float32, of a float64 model float64."""
        logits_RV = F.linear(self.norm(x_RH), self.lm_head)
        return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()

    def _check(self, plan: LayerPlan, taps: tuple[int, ...], blend: Blend | None) -> None:
        if len(plan) != self.num_layers:
            raise ValueError(f"the layer plan has {len(plan)} entries for {self.num_layers} layers")
        for layer, status in enumerate(plan):
            if status not in COMPUTED and blend is None:
                raise ValueError(
                    f"layer status {LayerStatus(status).name} (layer {layer}) needs cached rows"
                )
        if any(not 0 <= tap <= self.num_layers for tap in taps):
            raise ValueError(f"taps {taps} must lie in 0..{self.num_layers}")

    def attention_inputs(
        self, positions_BQ: Tensor, slots_BQ: Tensor, attention: AttentionMetadata
    ) -> dict[bool, AttentionInputs]:
        """What the layers see, by whether they have a sliding window; only kinds that exist."""
        config, dtype, positions_N = self.config, self.embed.dtype, positions_BQ.flatten()
        cos, sin = rotation(positions_N, self.frequencies, self.rope_scaling, dtype)
        near = partial(window_mask, window=config.window) if any(config.sliding) else None
        return {
            slides: AttentionInputs(
                group_inputs(
                    attention,
                    positions_N,
                    config.heads // config.kv_heads,
                    dtype,
                    near if slides else None,
                ),
                cos,
                sin,
                slots_BQ.flatten(),
            )
            for slides in set(config.sliding)
        }

    def before_rope(self, keys_LRgd: Tensor, positions_R: Tensor) -> Tensor:
        """Keys from a pool, [layers, R, kv_heads, head_dim], as they were before RoPE.

        Args:
            positions_R: int64, where each row stood. Narrow dtypes are computed in float32.
        """
        dtype = self.embed.dtype
        cos, sin = rotation(positions_R, self.frequencies, self.rope_scaling, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return rotate_back(keys_LRgd.to(wide), cos.to(wide), sin.to(wide)).to(dtype)

    def published(self) -> dict[str, Tensor]:
        """Views of all parameters under the names of a Hugging Face checkpoint."""
        found: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm.weight,
        }
        found["lm_head.weight"] = self.lm_head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            found |= {f"model.layers.{index}.{k}": v for k, v in layer.published().items()}
        return found
