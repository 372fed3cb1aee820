"""One lean decoder for all families (`families/`): the target whose output counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention.backends import AttentionPlan, window_mask
from ..ops.blend import Blend, ChunkKV
from ..ops.forward import TargetOutput
from ..ops.kv.pool import KVCache
from ..ops.layer_plan import LayerPlan, LayerStatus, compile_layer_plan
from .blend import Blender
from .codes import FULL
from .config import DecoderConfig
from .files import ModelError
from .integer import wide_centred_norm, wide_norm
from .layers import (
    BEFORE_ATTENTION,
    AttentionInputs,
    DecoderLayer,
    LayerHook,
    LayerKind,
    Of,
    PoolModel,
    RMSNorm,
    centred_norm,
    itself,
    rms_norm,
    rotate_back,
    wide_logits,
)
from .linear import Linear
from .packed import Product

MAX_ROWS = 2048  # at once in a layer: of more, every row takes longer (docs/memory.md)


def part(size: int, index: int, count: int) -> range:
    """Part `index` of `count` of `size` items, cut at the multiples of size / count, rounded up: a
    part of a finer split whose count is a multiple is inside one part of the coarser split. Parts
    may be uneven (3 KV heads of 2 ranks: 2 + 1) or empty."""
    return range(-(-index * size // count), -(-(index + 1) * size // count))


class Share(NamedTuple):
    """A rank's part of a decoder: KV heads with their query heads, MLP columns and head rows."""

    kv_heads: range
    columns: range
    vocabulary: range

    @classmethod
    def of(cls, config: DecoderConfig, index: int = 0, count: int = 1) -> Self:
        """Part `index` of `count` equal ones; ValueError if `index` is out of range, ModelError if
        the layers have no parts."""
        if not 0 <= index < count:
            raise ValueError(f"part {index} of {count} does not exist")
        whole = "fused projections" if config.fused else "norms over all heads together"
        if count > 1 and (config.fused or config.joint_qk_norm or config.experts is not None):
            whole = whole if config.experts is None else "experts"
            raise ModelError(config.path, f"{whole} cannot be divided among ranks")
        sizes = (config.kv_heads, config.intermediate_size, config.vocab_size)
        return cls(*(part(size, index, count) for size in sizes))

    def within(self, other: "Share") -> "Share | None":
        """The same, counted from the start of another share; None if it is not inside of it."""
        pairs = list(zip(self, other, strict=True))
        if any(len(a) and (a.start < b.start or a.stop > b.stop) for a, b in pairs):
            return None
        return Share(*(range(a.start - b.start, a.stop - b.start) for a, b in pairs))


class Decoder(PoolModel):
    """The target, or a drafter of chains. Build it with `load.weights.load_target`; it is never
    trained here.

    share: which of the parameters are here; embedding and norms always are. whole: whether all of
    them are. max_positions: rows one sequence may have. known_tokens: ids from here on are rows of
    the head without a token. weights: FULL, INT8 or INT4, see `integer`."""

    weights = "full"
    integer = False
    normalise = staticmethod(rms_norm)

    def __init__(self, config: DecoderConfig, share: Share | None = None) -> None:
        near = partial(window_mask, window=config.window)
        narrows = {slides: near if slides else None for slides in set(config.sliding)}
        ropes = config.layer_ropes or (0,) * config.num_layers
        kinds = tuple(map(LayerKind, config.sliding, ropes))
        super().__init__(config, kinds, narrows, config.ropes)
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_positions = config.rope.limit
        self.share = Share.of(config) if share is None else share
        self.whole = self.share == Share.of(config)
        self.kv_heads = len(self.share.kv_heads)
        self.known_tokens = config.vocab_size
        heads = self.kv_heads * self.groups
        columns = len(self.share.columns)
        shape = replace(config, heads=heads, kv_heads=self.kv_heads, intermediate_size=columns)
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        if config.centred_norms:
            self.normalise = centred_norm
        self.lm_head = Linear(config.hidden_size, len(self.share.vocabulary), bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.integer else self.dtype

    @cached_property
    def embed_scale(self) -> float:
        """In the dtype of the weights, as in transformers."""
        if not self.config.scaled_embedding:
            return 1.0
        return float(torch.tensor(self.hidden_size**0.5, dtype=self.dtype))

    def embedded(self, tokens_N: Tensor) -> Tensor:
        x_NH = F.embedding(tokens_N, self.embed)
        x_NH = x_NH.double() if self.integer else x_NH
        return x_NH if self.embed_scale == 1 else x_NH * self.embed_scale

    def compile_(self, kind: str, borrowed: Mapping[int, Product | None] | None = None) -> None:
        super().compile_(kind, borrowed)
        self.weights = kind
        if kind != FULL:
            norm = wide_centred_norm if self.config.centred_norms else wide_norm
            for layer in self.stack:
                layer.normalise = norm
            self.normalise = norm
            self.integer = True
        if self.compiled is not None:
            self.compiled.warm_up()
            self.logits(self.embedded(torch.zeros(1, dtype=torch.int64)))

    def forward(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionPlan,
        kv: KVCache,
        plan: LayerPlan,
        logit_rows_R: Tensor,
        taps: tuple[int, ...],
        blend: Blend | None = None,
    ) -> TargetOutput:
        """One forward; writes K and V of its rows into `kv` at `slots_BQ`, nothing else: each layer
        before it attends to the pool, so that rows of one forward see each other through it.

        logit_rows_R: flat row indices that need logits. taps: Hugging Face `hidden_states`
            indices, and one more for the last before the norm, joined in increasing order into
            taps_QF [B * Q, len(taps) * H]; empty for None.
        blend: cached rows; where a layer does not compute them they keep their cached K, turned to
            their position, V and taps, and get NaN logits.
        Raises ValueError: a plan or taps that this model cannot follow."""
        self._check(plan, taps, blend)
        tokens_N = tokens_BQ.reshape(-1)
        rows = tokens_N.shape[0]
        if blend is not None:
            blender = Blender(
                self, plan, positions_BQ, slots_BQ, attention=attention, kv=kv, blend=blend
            )
            x_NH = blender.first_rows(self.embedded(tokens_N))
            *tapped, x_NH = self.run_layers(x_NH, blender.inputs, kv, taps, hook=blender)
            row_R, dropped_R1 = blender.live_rows(logit_rows_R)
            logits_RV = self.logits(x_NH[row_R]).masked_fill(dropped_R1, float("nan"))
            taps_QF = torch.cat(tapped, -1).to(self.dtype) if tapped else None
            return TargetOutput(logits_RV, taps_QF, blender.report())
        positions_N = positions_BQ.reshape(-1)
        slots_N = slots_BQ.reshape(-1)
        states: list[Tensor] = []
        for rows_M, group in attention.parts(rows, MAX_ROWS):
            if rows_M is None and self.compiled is not None and self.compiled.takes(group):
                x_NH = self.embedded(tokens_N)
                *states, x_NH = self.compiled.run(
                    x_NH, positions_N, slots_N, group, kv=kv, taps=taps
                )
                if self.num_layers in taps:
                    states.append(self.normalise(x_NH, self.norm.weight, self.norm.eps))
                states += [x_NH] if self.num_layers + 1 in taps else []
                states.append(x_NH)
            elif rows_M is None:
                inputs = self.attention_inputs(positions_N, slots_N, group)
                states = self.run_layers(self.embedded(tokens_N), inputs, kv, taps)
            else:
                inputs = self.attention_inputs(positions_N[rows_M], slots_N[rows_M], group)
                part_states = self.run_layers(self.embedded(tokens_N[rows_M]), inputs, kv, taps)
                states = states or [x.new_zeros(rows, x.shape[1]) for x in part_states]
                for state_NH, part_MH in zip(states, part_states, strict=True):
                    state_NH.index_copy_(0, rows_M, part_MH)
        *tapped, x_NH = states
        logits_RV = self.logits(x_NH.index_select(0, logit_rows_R))
        return TargetOutput(logits_RV, torch.cat(tapped, -1).to(self.dtype) if tapped else None)

    def run_layers(
        self,
        x_NH: Tensor,
        inputs: Mapping[LayerKind, AttentionInputs],
        kv: KVCache,
        taps: tuple[int, ...],
        hook: LayerHook | None = None,
    ) -> list[Tensor]:
        """Embeddings through all layers -> the rows at each tap, in order, and before the norm."""
        states: list[Tensor] = []
        for index, layer in enumerate(self.stack):
            if index in taps:
                states.append(x_NH if hook is None else hook.tap(x_NH, len(states)))
            if hook is not None:
                inputs = hook.inputs
            normed_NH = layer.normed(BEFORE_ATTENTION, x_NH)
            own_inputs = inputs[self.kinds[index]]
            x_NH = layer.forward(normed_NH, x_NH, index, own_inputs, kv=kv, hook=hook)
        if self.num_layers in taps:
            normed_NH = self.normalise(x_NH, self.norm.weight, self.norm.eps)
            states.append(normed_NH if hook is None else hook.tap(normed_NH, len(states)))
        if self.num_layers + 1 in taps:
            states.append(x_NH if hook is None else hook.tap(x_NH, len(states)))
        return [*states, x_NH]

    def _check(self, plan: LayerPlan, taps: tuple[int, ...], blend: Blend | None) -> None:
        if not self.whole:
            raise ValueError("a share of a decoder computes nothing alone")
        if len(plan) != self.num_layers:
            raise ValueError(f"the layer plan has {len(plan)} entries for {self.num_layers} layers")
        for layer, status in enumerate(plan if blend is None else ()):
            if status not in (LayerStatus.DECODE, LayerStatus.FULL):
                name = LayerStatus(status).name
                raise ValueError(f"layer status {name} (layer {layer}) needs cached rows")
        if blend is not None and plan != compile_layer_plan(blend.settings, self.num_layers):
            raise ValueError(f"the layer plan {list(map(int, plan))} is not the blend's")
        slides = any(self.config.sliding)
        if blend is not None and blend.settings.mask == "bottom_right" and slides:
            window = self.config.window
            raise ValueError(f"`mask: bottom_right` excludes the model's sliding window {window}")
        if taps and not 0 <= min(taps) <= max(taps) <= self.num_layers + 1:
            raise ValueError(f"taps {taps} must be in 0..{self.num_layers + 1}")

    def logits(self, x_RH: Tensor) -> Tensor:
        """[R, H] after the last layer -> [R, V]; float32, of a float64 model float64."""
        normed_RH = self.normalise(x_RH, self.norm.weight, self.norm.eps)
        head = self.lm_head.kernel
        if head is None:
            logits_RV = wide_logits(normed_RH, self.lm_head)
        else:
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            logits_RV = head.product(normed_RH, None, dtype)
        if self.known_tokens < logits_RV.shape[1]:
            logits_RV[:, self.known_tokens :] = -torch.inf
        return logits_RV

    def collect(
        self, token_ids: Sequence[int], bos: int | None = None, taps: tuple[int, ...] = ()
    ) -> ChunkKV:
        """K before RoPE, V and features of one chunk on its own, for a chunk store of CacheBlend.

        bos: the token in front, an attention sink whose row is not kept; None for models without
            one, and for a prompt's prefix, whose ids begin with it. taps: see `forward`.
        Raises ValueError for an empty chunk, ModelError for one longer than sequences may be."""
        if not token_ids:
            raise ValueError("a chunk needs at least one token, not 0")
        ids = [*token_ids] if bos is None else [bos, *token_ids]
        count = len(ids)
        self.config.check_length(count)
        drop = count - len(token_ids)
        device = self.embed.device
        kv = KVCache(
            self.num_layers, self.kv_heads, self.head_dim, count, dtype=self.dtype, device=device
        )
        steps_Q = torch.arange(count, device=device)
        inputs = self.attention_inputs(steps_Q, steps_Q, AttentionPlan.causal(count, device))
        hook = KeyRecorder(inputs, drop)
        x_QH = self.embedded(torch.tensor(ids, device=device))
        *tapped, _ = self.run_layers(x_QH, inputs, kv, taps, hook=hook)
        features = [x_QH[drop:].to(self.dtype) for x_QH in tapped]
        features_RF = torch.cat(features, -1) if features else None
        values_LRgd = kv.data[:, 1, :, drop:count].transpose(1, 2).contiguous()
        return ChunkKV(torch.stack(hook.keys).to(self.dtype), values_LRgd, features_RF)

    def before_rope(self, keys_LRgd: Tensor, positions_R: Tensor) -> Tensor:
        """Keys of a pool [layers, R, kv_heads, head_dim], as before RoPE at int64 positions."""
        wide = torch.promote_types(self.dtype, torch.float32)
        pairs = self.every_angles(positions_R)
        ropes_L = [kind.rope for kind in self.kinds]
        cos, sin = (torch.stack(part).to(wide)[ropes_L] for part in zip(*pairs, strict=True))
        return rotate_back(keys_LRgd.to(wide), cos, sin).to(self.dtype)

    def published(self, of: Of = itself) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {
            "model.embed_tokens.weight": of(self.embed),
            "model.norm.weight": of(self.norm.weight),
            "lm_head.weight": of(self.lm_head.weight),
        }
        for index, layer in enumerate(self.stack):
            views |= {f"model.layers.{index}.{k}": v for k, v in layer.published(of).items()}
        return views


@dataclass(eq=False)
class KeyRecorder(LayerHook):
    """Collects all layers' keys before RoPE, [R, kv_heads, head_dim], but the first `drop`."""

    inputs: Mapping[LayerKind, AttentionInputs]
    drop: int
    keys: list[Tensor] = field(default_factory=list)

    def before_attention(
        self, index: int, x_NH: Tensor, qk_Nhd: Tensor, v_Ngd: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
        self.keys.append(qk_Nhd[self.drop :, -v_Ngd.shape[1] :].clone())
        return x_NH, qk_Nhd, v_Ngd, inputs
