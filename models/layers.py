"""What the layers of all models are made of, on flat rows [N, ...] with N = B * Q."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.attention.backends import AttentionBackend, AttentionPlan, LayerAttention, Narrow
from ..ops.attention.metadata import SlotRun
from ..ops.kv.pool import KVCache
from .config import DecoderShape, RopeConfig
from .experts import Experts
from .linear import Linear, compile_, linear
from .packed import PackedWeight, Product, kernels, team_of

Angles = tuple[Tensor, Tensor]
"""cos and signed sin, each [N, 1, d], d at most head_dim, for `rotate`."""

Of = Callable[[Tensor], Tensor]


def itself(parameter: Tensor) -> Tensor:
    """A parameter as it is."""
    return parameter


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in float32 for narrower dtypes as
    in transformers; on a CPU by one kernel for the sum of squares, where the usual way takes three.
    The weight is [D], or [heads, D] for x [N, heads, D]."""
    dtype = x.dtype
    if x.is_cpu and dtype != torch.float64:
        norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        scale = torch.addcmul(_constant(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale if dtype == torch.float32 else (x * scale).to(dtype)) * weight
    if dtype == torch.float32 and weight.dim() == 1:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(dtype) * weight


def centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` with the factor 1 + weight; rounded once, after the product, as in Gemma 3."""
    if x.dtype == torch.float32:
        return rms_norm(x, 1.0 + weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).to(x.dtype)


@cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):  # training may use the same tensor
        return torch.tensor(value, dtype=torch.float32)


class RMSNorm(nn.RMSNorm):
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies float32 [head_dim / 2] and the factor on cos and sin; `dynamic` equals `default`
    within the trained length, which is as far as it is used here."""
    if rope.kind == "none":
        return torch.zeros(rope.rotary_dim(head_dim) // 2), 1.0
    if rope.kind in ("default", "dynamic"):
        rotary_dim = rope.rotary_dim(head_dim)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        return 1.0 / (rope.theta**exponents), 1.0
    # Slow to import and needed by scaled models only.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    shape = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=rope.trained,
        rope_parameters={"rope_theta": rope.theta, "rope_type": rope.kind, **rope.settings},
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope.kind](shape)
    return frequencies, float(scaling)


def rotate(x_Nhd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin; a roll with the sign inside `sin` is the cheapest form. Of
    longer heads than there are angles the rest stays."""
    rotary_dim = cos_N1d.shape[-1]
    if rotary_dim < x_Nhd.shape[-1]:
        rest_Nhd = x_Nhd[..., rotary_dim:]
        return torch.cat((rotate(x_Nhd[..., :rotary_dim], cos_N1d, sin_N1d), rest_Nhd), -1)
    return torch.addcmul(x_Nhd * cos_N1d, torch.roll(x_Nhd, x_Nhd.shape[-1] // 2, -1), sin_N1d)


def rotate_back(x_Nhd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """The inverse of `rotate`; a factor on cos and sin, and their rounding, are divided out."""
    size_N1d = cos_N1d.square() + sin_N1d.square()
    return rotate(x_Nhd, cos_N1d / size_N1d, -sin_N1d / size_N1d)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What layers of one kind need to know about the rows of a forward: the attention's plan, cos
    and sin [N, 1, d], and the flat slots that the rows are written to, int64 [N]."""

    attention: LayerAttention
    cos_N1d: Tensor
    sin_N1d: Tensor
    slots_N: Tensor


def wide_logits(x_RH: Tensor, head: Tensor | Linear) -> Tensor:
    """[R, H] -> [R, V], float32; of a float64 model float64."""
    logits_RV = linear(x_RH, head) if isinstance(head, Tensor) else head.forward(x_RH)
    return logits_RV if logits_RV.dtype in (torch.float32, torch.float64) else logits_RV.float()


class LayerHook:
    """Watches or changes a layer's rows before attention; `inputs` replaces the forward's."""

    inputs: Mapping[Any, AttentionInputs]

    def before_attention(
        self, index: int, x_NH: Tensor, qk_Nhd: Tensor, v_Ngd: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor, AttentionInputs]:
        """Its arguments as the layer shall use them; qk_Nhd: queries and keys before RoPE."""
        raise NotImplementedError

    def tap(self, x_NH: Tensor, number: int) -> Tensor:
        """The M rows of the forward at the `number`-th tap, [M, H]."""
        return x_NH


ACTIVATIONS = {"gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}
BEFORE_ATTENTION, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP = range(4)
NORMS = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Where a layer has norms -> the published name of each of the four; an empty one is not there."""


class DecoderLayer(nn.Module):
    """Attention and a gated MLP with norms, the projections fused: fewer kernels, which is what
    counts for small models on a CPU. What comes before attention is the caller's. wide: width of
    attention's input; 0 for that of the residual. norms: names of those before attention, if other
    than the shape's."""

    kind_h: Tensor
    input_layernorm: RMSNorm
    hidden_norm: RMSNorm
    post_attention_layernorm: RMSNorm
    normalise = staticmethod(rms_norm)

    def __init__(
        self, shape: DecoderShape, wide: int = 0, norms: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.eps = shape.eps
        activation = getattr(shape, "activation", "silu")
        self.activation = ACTIVATIONS.get(activation) or getattr(F, activation)
        self.partial = shape.rope.rotary_dim(shape.head_dim) < shape.head_dim
        self.query_scale = getattr(shape, "query_scale", 1.0)
        if getattr(shape, "centred_norms", False):
            self.normalise = centred_norm
        self.fused = getattr(shape, "fused", False)
        hidden = shape.hidden_size
        self.inner = inner = shape.intermediate_size
        width = self.heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        self.norm_names = NORMS[getattr(shape, "norms", "before")]
        self.norms_after = bool(self.norm_names[AFTER_MLP])
        for name in (*(self.norm_names[:1] if norms is None else norms), *self.norm_names[1:]):
            if name:
                self.add_module(name, RMSNorm(hidden, shape.eps))
        self.qkv = Linear(wide or hidden, width + 2 * kv_width, bias=shape.qkv_bias)
        self.o = Linear(width, hidden, bias=shape.o_bias)
        experts = getattr(shape, "experts", None)
        self.experts = None if experts is None else Experts(experts, hidden, inner)
        if experts is None:
            self.gate_up = Linear(hidden, 2 * inner, bias=shape.mlp_bias)
            self.down = Linear(inner, hidden, bias=shape.mlp_bias)
        self.qk_sizes = (width, kv_width)
        self.joint = getattr(shape, "joint_qk_norm", False)
        size = (width + kv_width,) if self.joint else (2, self.head_dim)
        self.qk_norm = nn.Parameter(torch.empty(size)) if shape.qk_norm else None
        with torch.device("cpu"):  # which of the two norms each head has
            kind_h = torch.tensor([0] * self.heads + [1] * self.kv_heads)
        self.register_buffer("kind_h", kind_h, persistent=False)
        self.norm_hd: Tensor | None = None  # of each head, once the weights no longer change

    def normed(self, place: int, x_NH: Tensor) -> Tensor:
        """Rows after the norm at one of the four places; unchanged where there is none."""
        name = self.norm_names[place]
        return self.normalise(x_NH, getattr(self, name).weight, self.eps) if name else x_NH

    def projected(self, x_NW: Tensor) -> tuple[Tensor, Tensor]:
        """[N, W] -> queries and keys after their norms, before RoPE; values."""
        all_Nhd = self.qkv.forward(x_NW).view(x_NW.shape[0], -1, self.head_dim)
        sizes = (self.heads + self.kv_heads, self.kv_heads)
        qk_Nhd, v_Ngd = torch.split_with_sizes(all_Nhd, sizes, 1)
        return qk_Nhd if self.qk_norm is None else self.normed_heads(qk_Nhd, self.qk_norm), v_Ngd

    def normed_heads(self, qk_Nhd: Tensor, qk_norm: Tensor) -> Tensor:
        """Queries and keys after their norms."""
        if self.joint:
            parts = torch.split_with_sizes(qk_Nhd.flatten(1), self.qk_sizes, 1)
            weights = torch.split_with_sizes(qk_norm, self.qk_sizes)
            pairs = zip(parts, weights, strict=True)
            return torch.cat([self.normalise(*pair, self.eps) for pair in pairs], 1).view_as(qk_Nhd)
        norm_hd = qk_norm.index_select(0, self.kind_h) if self.norm_hd is None else self.norm_hd
        return self.normalise(qk_Nhd, norm_hd, self.eps)

    def forward(
        self,
        x_NW: Tensor,
        residual_NH: Tensor,
        index: int,
        inputs: AttentionInputs,
        kv: KVCache,
        hook: LayerHook | None = None,
    ) -> Tensor:
        """Write the rows' keys and values into layer `index` of the pool, then attend and transform
        -> [N, H], of the rows that the hook leaves. x_NW: attention's input."""
        if not self.kv_heads:  # a rank of more ranks than there are heads
            attended_NI = x_NW[:, :0]
        else:
            qk_Nhd, v_Ngd = self.projected(x_NW)
            if hook is not None:
                residual_NH, qk_Nhd, v_Ngd, inputs = hook.before_attention(
                    index, residual_NH, qk_Nhd, v_Ngd, inputs=inputs
                )
            if self.partial:
                qk_Nhd = rotate(qk_Nhd, inputs.cos_N1d, inputs.sin_N1d)
            else:  # the same, without the call
                turned_Nhd = torch.roll(qk_Nhd, self.head_dim // 2, -1)
                qk_Nhd = torch.addcmul(qk_Nhd * inputs.cos_N1d, turned_Nhd, inputs.sin_N1d)
            q_Nhd, k_Ngd = torch.split_with_sizes(qk_Nhd, (self.heads, self.kv_heads), 1)
            if self.query_scale != 1:
                q_Nhd = q_Nhd * self.query_scale
            kv.write_(index, inputs.slots_N, k_Ngd.transpose(0, 1), v_Ngd.transpose(0, 1))
            attended_NI = inputs.attention.backend.run(q_Nhd, *kv.layers[index], inputs.attention)
        return self.finish(residual_NH, attended_NI)

    def finish(self, residual_NH: Tensor, attended_NI: Tensor) -> Tensor:
        """The last part of `forward`: output projection, residual, gated MLP."""
        after = self.norms_after
        x_NH = self.o.forward(attended_NI, None if after else residual_NH)
        if after:
            x_NH = residual_NH + self.normed(AFTER_ATTENTION, x_NH)
        if self.experts is not None:
            return self.experts.forward(self.normed(BEFORE_MLP, x_NH), x_NH)
        both_NI = self.gate_up.forward(self.normed(BEFORE_MLP, x_NH))
        gate_NI, up_NI = torch.split_with_sizes(both_NI, (self.inner, self.inner), -1)
        inner_NI = self.activation(gate_NI)
        inner_NI = inner_NI * up_NI if inner_NI.requires_grad else inner_NI.mul_(up_NI)
        if after:
            return x_NH + self.normed(AFTER_MLP, self.down.forward(inner_NI))
        return self.down.forward(inner_NI, x_NH)

    def project(self, x_NW: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """The first part of `forward`: [N, W] -> rotated queries [N, heads, d], keys and values."""
        qk_Nhd, v_Ngd = self.projected(x_NW)
        sizes = (self.heads, self.kv_heads)
        q_Nhd, k_Ngd = torch.split_with_sizes(rotate(qk_Nhd, *angles), sizes, 1)
        return q_Nhd, k_Ngd, v_Ngd

    def published(self, of: Of = itself) -> dict[str, Tensor]:
        """Views of (`of`) the parameters under Hugging Face's names, without the layer's prefix."""
        norms = {n: part for n, part in self.named_children() if isinstance(part, RMSNorm)}
        views = {f"{name}.weight": of(norm.weight) for name, norm in norms.items()}
        kv_width = self.kv_heads * self.head_dim
        parts: tuple[tuple[Linear, dict[str, int]], ...] = (
            (self.qkv, {"q": self.heads * self.head_dim, "k": kv_width, "v": kv_width}),
            (self.o, {"o": self.o.out_features}),
        )
        if self.experts is None:
            down = {"down": self.down.out_features}
            parts += (self.gate_up, {"gate": self.inner, "up": self.inner}), (self.down, down)
        else:
            views |= {name: of(view) for name, view in self.experts.published().items()}
        for layer, sizes in parts:
            module = "self_attn" if layer is self.qkv or layer is self.o else "mlp"
            if self.fused:
                name = "gate_up" if "gate" in sizes else "".join(sizes)
                sizes = {name: sum(sizes.values())}
            for kind, value in layer.named_parameters():
                names = [f"{module}.{name}_proj.{kind}" for name in sizes]
                views |= zip(names, torch.split(of(value), list(sizes.values())), strict=True)
        if self.qk_norm is not None:
            both = of(self.qk_norm)
            pair = torch.split(both, list(self.qk_sizes)) if self.joint else both.unbind()
            views["self_attn.q_norm.weight"], views["self_attn.k_norm.weight"] = pair
        return views


class LayerKind(NamedTuple):
    """What a layer's rows see, a key of `PoolModel.narrows`, and the number of its RoPE."""

    sees: Any = False
    rope: int = 0


SEE_ALL: Mapping[Any, Narrow | None] = {False: None}


class PoolModel(nn.Module):
    """A model whose layers read and write a pool: its sizes, its angles, what its layers see.
    groups: query heads of a key head. kinds: the kind of each layer. narrows: what layers leave of
    the masks; None: everything. ropes: further ones than the shape's. notes: assumed or ignored.
    fc: reads a drafter's taps. mixes: the first layer gets attention's input and the residual
    separately. compiled: its layers, if kernels multiply."""

    frequencies_RF: Tensor
    fc: Linear
    mixes = False
    compiled: "CompiledLayers | None" = None

    def __init__(
        self,
        shape: DecoderShape,
        kinds: tuple[LayerKind, ...] = (LayerKind(),),
        narrows: Mapping[Any, Narrow | None] = SEE_ALL,
        ropes: tuple[RopeConfig, ...] = (),
    ) -> None:
        super().__init__()
        self.groups = shape.heads // shape.kv_heads
        self.num_layers = len(kinds)
        self.hidden_size = shape.hidden_size
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.kinds = kinds
        self.each_kind = tuple(dict.fromkeys(kinds))
        self.narrows = narrows
        self.notes = shape.notes
        # On the CPU even inside a meta-device build: the angles are computed, not loaded.
        with torch.device("cpu"):
            angles = [inverse_frequencies(rope, shape.head_dim) for rope in (shape.rope, *ropes)]
            frequencies_RF = torch.stack([frequencies_F for frequencies_F, _ in angles])
        self.rope_scalings = [scaling for _, scaling in angles]
        self.register_buffer("frequencies_RF", frequencies_RF, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's own weights."""
        return self.fc.weight.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the rows between two layers."""
        return self.dtype

    @cached_property
    def stack(self) -> tuple[DecoderLayer, ...]:
        """The layers, in order."""
        return tuple(part for part in self.modules() if isinstance(part, DecoderLayer))

    def compile_(self, kind: str, borrowed: Mapping[int, Product | None] | None = None) -> None:
        """As `linear.compile_`, and the layers with what they multiply by."""
        compile_(self, kind, borrowed)
        self.compiled = CompiledLayers.of(self)

    def angles(self, positions_N: Tensor, rope: int = 0) -> Angles:
        """cos and signed sin of these positions, computed in float32 as in transformers. rope: the
        number of a layer's."""
        angles = positions_N[:, None].float() * self.frequencies_RF[rope]
        cos = angles.cos()
        sin = angles.sin()
        scaling = self.rope_scalings[rope]
        if scaling != 1:
            cos = cos * scaling
            sin = sin * scaling
        cos = torch.cat((cos, cos), -1)[:, None]
        sin = torch.cat((-sin, sin), -1)[:, None]
        dtype = self.compute_dtype
        return (cos, sin) if dtype == torch.float32 else (cos.to(dtype), sin.to(dtype))

    def attention_inputs(
        self, positions_BQ: Tensor, slots_BQ: Tensor, attention: AttentionPlan
    ) -> dict[LayerKind, AttentionInputs]:
        positions_N = positions_BQ.flatten()
        slots_N = slots_BQ.flatten()
        angles = self.every_angles(positions_N)
        dtype = self.compute_dtype
        plans = {
            sees: attention.for_layers(positions_N, self.groups, dtype, narrow)
            for sees, narrow in self.narrows.items()
        }
        return {
            kind: AttentionInputs(plans[kind.sees], *angles[kind.rope], slots_N)
            for kind in self.each_kind
        }

    def every_angles(self, positions_N: Tensor) -> list[Angles]:
        """The angles of every RoPE."""
        return [self.angles(positions_N, rope) for rope in range(len(self.rope_scalings))]

    def published(self, of: Of = itself) -> dict[str, Tensor]:
        """Views of (`of`) the parameters under the names of a published file."""
        layers = {n: part for n, part in self.named_modules() if isinstance(part, DecoderLayer)}
        views: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            prefix = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
            if prefix is None:
                views[name] = of(parameter)
            else:
                views |= {f"{prefix}.{k}": v for k, v in layers[prefix].published(of).items()}
        return views


class CompiledLayers:
    """The layers of a model, each with the addresses of its weights."""

    def __init__(self, model: PoolModel) -> None:
        self._kept: list[Any] = []  # what the addresses point to
        addresses = [
            [*self._addresses(layer, model.mixes), kind.rope]
            for layer, kind in zip(model.stack, model.kinds, strict=True)
        ]
        self._layers_LA = np.array(addresses, np.int64)
        layer = model.stack[0]
        self._narrow = model.narrows[model.kinds[0].sees]
        self._model = model
        # Of every RoPE and all positions so far.
        self._angles_RP1d: Angles = (torch.empty(1, 0), torch.empty(1, 0))
        self._team = team_of(torch.get_num_threads())
        self._call_1 = np.zeros(1, kernels.RUN_LAYERS)  # with the fields of the model
        self._call_1["layers"] = self._layers_LA.ctypes.data
        self._call_1["num_layers"] = len(addresses)
        self._call_1["hidden"] = model.hidden_size
        for name in ("heads", "kv_heads", "head_dim", "inner", "eps"):
            self._call_1[name] = getattr(layer, name)
        heads = 3 * layer.heads + 2 * layer.kv_heads  # queries twice, keys, values, attention
        parts = [part.kernel for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        largest = max(part.row_bytes for part in parts if isinstance(part, PackedWeight))
        self._row_bytes = 8 * (heads * layer.head_dim + 2 * layer.inner) + largest

    @classmethod
    def of(cls, model: PoolModel) -> "CompiledLayers | None":
        """None unless kernels multiply here, all layers see the same masks, and their parts are
        Llama's or Qwen3's."""
        if not model.stack:
            return None
        first = model.stack[0]
        packed = isinstance(first.o.kernel, PackedWeight) and first.experts is None
        alike = len({kind.sees for kind in model.kinds}) == 1 and first.kv_heads > 0
        known = first.activation is F.silu and not (first.norms_after or first.joint)
        return cls(model) if packed and alike and known else None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One row through the layers: numba compiles at the first call, and reads its cache."""
        model = self._model
        shape = (model.num_layers, model.kv_heads, model.head_dim, 1)
        row_1 = torch.zeros(1, dtype=torch.int64)
        kv = KVCache(*shape, dtype=model.dtype)
        nothing = AttentionPlan(AttentionBackend(), ())
        self.run(torch.zeros(1, model.hidden_size), row_1, row_1, nothing, kv=kv)

    def takes(self, attention: AttentionPlan) -> bool:
        """Whether a plan is computed here: that of a backend with a way of its own is not."""
        return not attention.merged and type(attention.backend).run is AttentionBackend.run

    def _addresses(self, layer: DecoderLayer, mixes: bool) -> list[int]:
        """19 numbers: norm (0: it reads `mixed`); of q, k, v: blocks, scales, bits, bias; norms of
        queries and keys (0: none); of the output; second norm; of gate and up; of down."""

        def of(numbers: Tensor) -> int:
            array = numbers.detach().double().contiguous().numpy()
            self._kept.append(array)
            return int(array.ctypes.data)

        def linear(part: Any) -> list[int]:
            return [*part.kernel.fields, 0 if part.bias is None else of(part.bias)]

        qk_norm = 0 if layer.qk_norm is None else of(layer.qk_norm)
        first = [0 if mixes else of(layer.input_layernorm.weight), *linear(layer.qkv), qk_norm]
        last = [of(layer.post_attention_layernorm.weight), *linear(layer.gate_up)]
        return [*first, *linear(layer.o), *last, *linear(layer.down)]

    def run(
        self,
        x_NH: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionPlan,
        *,
        kv: KVCache,
        mixed_NW: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> list[Tensor]:
        """Rows through all layers -> the rows at each tap before the last, in order, and after the
        last layer. positions, slots: of the rows, int64 of any shape. mixed_NW: the input of the
        first layer's attention, if it mixes."""
        positions_N = positions.reshape(-1).contiguous()
        rows = x_NH.shape[0]
        inner = [tap for tap in taps if tap < len(self._layers_LA)]
        tapped_TNH = torch.empty(len(inner), *x_NH.shape, dtype=torch.float64)
        groups_X, masks = self._groups(attention, positions_N)
        angles_RP1d = self._angles_RP1d
        last = int(positions_N.max()) if rows else 0
        if last >= angles_RP1d[0].shape[1]:
            pairs = self._model.every_angles(torch.arange(2 << last.bit_length()))
            cos_RP1d, sin_RP1d = (torch.stack(part).double() for part in zip(*pairs, strict=True))
            angles_RP1d = self._angles_RP1d = (cos_RP1d, sin_RP1d)
        wide_NH = x_NH.to(torch.float64, copy=True)
        mixed_NW = wide_NH[:0] if mixed_NW is None else mixed_NW.double().contiguous()
        slots_N = slots.reshape(-1).contiguous()
        taps_T = np.array(inner, np.int64)
        work = torch.empty(rows * self._row_bytes, dtype=torch.uint8)
        call = self._call_1.copy()
        call["x"] = wide_NH.data_ptr()
        call["rows"] = rows
        call["mixed"] = mixed_NW.data_ptr()
        call["mixed_width"] = mixed_NW.shape[1]
        call["cos"] = angles_RP1d[0].data_ptr()
        call["sin"] = angles_RP1d[1].data_ptr()
        call["angles"] = angles_RP1d[0].shape[1]
        call["rotary_dim"] = angles_RP1d[0].shape[3]
        call["positions"] = positions_N.data_ptr()
        call["slots"] = slots_N.data_ptr()
        call["pool"] = kv.data.data_ptr()
        call["pool_slots"] = kv.data.shape[3]
        call["groups"] = groups_X.ctypes.data
        call["num_groups"] = len(groups_X)
        call["taps"] = taps_T.ctypes.data
        call["num_taps"] = len(inner)
        call["tapped"] = tapped_TNH.data_ptr()
        call["work"] = work.data_ptr()
        self._team.run(kernels.layers_of(kv.data.dtype), call)
        del masks  # no address of them is used any more
        return [*tapped_TNH.to(x_NH.dtype).unbind(), wide_NH.to(x_NH.dtype)]

    def _groups(self, attention: AttentionPlan, positions_N: Tensor) -> tuple[Any, list[Tensor]]:
        """For each group of a plan: the address of its rows (0: all, in order), its sequences,
        queries of each and slots of each, the address of the slots (0: runs), the first slot and
        the distance of two runs, and the address of the mask; and what the addresses point to."""
        kept: list[Tensor] = []
        lines = []
        for group in attention.groups:
            mask_GqK = group.mask_GqK
            if self._narrow is not None:
                mask_GqK = self._narrow(mask_GqK, group.of_rows(positions_N), group.positions_GK)
            mask_GqK = mask_GqK.contiguous()
            kept.append(mask_GqK)
            rows = 0
            if group.rows_Gq is not None:
                kept.append(group.rows_Gq.contiguous())
                rows = kept[-1].data_ptr()
            slots = first = stride = 0
            if isinstance(group.keys, SlotRun):
                first = group.keys.first
                stride = group.keys.stride
            else:
                kept.append(group.keys.contiguous())
                slots = kept[-1].data_ptr()
            lines.append([rows, *mask_GqK.shape, slots, first, stride, mask_GqK.data_ptr()])
        return np.array(lines, np.int64).reshape(-1, 8), kept


def settle_(model: nn.Module) -> None:
    """The weights no longer change. The parts of every module become plain attributes: torch
    searches three tables for them, which a model that only runs forwards does not need."""
    for module in model.modules():
        if isinstance(module, DecoderLayer) and module.qk_norm is not None and not module.joint:
            module.norm_hd = module.qk_norm.detach().index_select(0, module.kind_h)
        for table in (module._modules, module._parameters, module._buffers):
            vars(module).update(table)
