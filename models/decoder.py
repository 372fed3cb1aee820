"""One lean decoder for Llama, Mistral, Qwen2 and Qwen3: the target whose output counts."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.metadata import AttentionMetadata
from ..ops.blend import Blend
from ..ops.forward import TargetOutput
from ..ops.kv.pool import KVCache
from ..ops.layer_plan import LayerPlan, LayerStatus
from .blend import Blender, check_blend
from .config import DecoderConfig
from .ranks import Ranks
from .rope import rotate_back
from .shares import Share
from .stack import DecoderStack

COMPUTED = (LayerStatus.DECODE, LayerStatus.FULL)
AFTER = -1  # the tap behind the last layer, before the norm
MOST_ROWS = 2048  # side by side in a layer: of more, every row takes longer (docs/memory.md)


class Decoder(DecoderStack):
    """Implements `Target`. Build it with `weights.load_target`; weights are never trained here.

    Attributes:
        config: what config.json said.
        max_positions: rows one sequence may have.
        weights: how they are kept, see `quantise.Weights`.
        whole: whether all of it is here.
        ranks: who computes it together with this process; None if it does so alone.
    """

    weights = "full"
    ranks: Ranks | None = None

    def __init__(self, config: DecoderConfig, share: Share | None = None) -> None:
        super().__init__(config, share)
        self.vocab_size = config.vocab_size
        self.max_positions = config.rope.limit
        self.whole = self.share == Share.of(config)

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
            check_blend(self, tokens_BQ, plan, taps, blend)
            blender = Blender(self, tokens_BQ, positions_BQ, slots_BQ, attention, kv, blend)
            return blender.forward(plan, logit_rows_R, taps)
        place_N = [one.reshape(-1) for one in (tokens_BQ, positions_BQ, slots_BQ)]
        rows = place_N[0].shape[0]
        out = dict[int, Tensor]()
        for rows_M, part in attention.parts(rows, MOST_ROWS):
            place_M = place_N if rows_M is None else [one[rows_M] for one in place_N]
            states = self._layers(place_M, part, kv, taps)
            if rows_M is None:
                out = states
                continue
            for tap, x_MH in states.items():
                x_NH = out.setdefault(tap, x_MH.new_zeros(rows, x_MH.shape[1]))
                x_NH.index_copy_(0, rows_M, x_MH)
        logits_RV = self.logits(out.pop(AFTER).index_select(0, logit_rows_R))
        return TargetOutput(logits_RV, torch.cat(list(out.values()), -1) if out else None)

    def _layers(
        self,
        place_M: Sequence[Tensor],
        attention: AttentionMetadata,
        kv: KVCache,
        taps: tuple[int, ...],
    ) -> dict[int, Tensor]:
        """Rows through all layers -> [M, H] at each tap, in order; AFTER is behind the last.

        Args:
            place_M: tokens, positions and slots of the rows.
        """
        tokens_M, positions_M, slots_M = place_M
        inputs = self.attention_inputs(positions_M, slots_M, attention)
        x_MH = F.embedding(tokens_M, self.embed)
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                states[index] = x_MH
            x_MH = layer.forward(x_MH, index, inputs[self.config.sliding[index]], kv)
        if self.num_layers in taps:
            states[self.num_layers] = self.norm.forward(x_MH)
        return {**states, AFTER: x_MH}

    def _check(self, plan: LayerPlan, taps: tuple[int, ...], blend: Blend | None) -> None:
        if self.ranks is None and not self.whole:
            raise ValueError("a share of a decoder computes nothing alone")
        if len(plan) != self.num_layers:
            raise ValueError(f"the layer plan has {len(plan)} entries for {self.num_layers} layers")
        for layer, status in enumerate(plan):
            if status not in COMPUTED and blend is None:
                raise ValueError(
                    f"layer status {LayerStatus(status).name} (layer {layer}) needs cached rows"
                )
        if any(not 0 <= tap <= self.num_layers for tap in taps):
            raise ValueError(f"taps {taps} must lie in 0..{self.num_layers}")

    def before_rope(self, keys_LRgd: Tensor, positions_R: Tensor) -> Tensor:
        """Keys from a pool, [layers, R, kv_heads, head_dim], as they were before RoPE.

        Args:
            positions_R: int64, where each row stood. Narrow dtypes are computed in float32.
        """
        wide = torch.promote_types(self.dtype, torch.float32)
        cos, sin = (part.to(wide) for part in self.angles(positions_R))
        return rotate_back(keys_LRgd.to(wide), cos, sin).to(self.dtype)
