"""The shape of a target or drafter in its config.json, checked key by key; without torch."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from .files import Fields, ModelError

TRAINED = "max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
ROPE_NUMBERS: dict[str, tuple[str, ...]] = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",))
ROPE_NUMBERS["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
RENAMED = ("rope_type", "type", "rope_theta")  # keys with a field of their own in RopeConfig
ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions become angles; `trained` is the file's `max_position_embeddings`. A kind that
    no file names is `none`: all angles are 0."""

    kind: str
    theta: float
    settings: Mapping[str, Any]
    trained: int

    def rotary_dim(self, head_dim: int) -> int:
        """The size of the part of a head that RoPE rotates, the first one."""
        return int(head_dim * self.settings.get(PARTIAL, 1.0))

    @property
    def limit(self) -> int:
        """Positions for which the frequencies do not depend on the sequence's length."""
        original = self.settings.get(ORIGINAL)
        return min(self.trained, original) if self.kind == "longrope" and original else self.trained


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of layers, their biases and norms. notes: assumed where the file is not clear."""

    path: Path
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    notes: tuple[str, ...] = ()

    def sizes(self) -> dict[str, Any]:
        """The arguments of a drafter of the same shape: all but biases, norms and notes. A drafter
        rotates whole heads."""
        sizes = {
            f.name: getattr(self, f.name) for f in fields(DecoderShape) if f.default is MISSING
        }
        if self.rope.rotary_dim(self.head_dim) < self.head_dim:
            sizes["rope"] = RopeConfig("default", self.rope.theta, {}, self.rope.limit)
        return sizes

    def shape_json(self) -> dict[str, Any]:
        """The keys of a config.json of this shape, of an untied model."""
        scaling = {"rope_type": self.rope.kind, **self.rope.settings}
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            TRAINED: self.rope.trained,
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.kind == "default" else scaling,
            "tie_word_embeddings": False,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Experts of a layer, and how many a token gets; their weights add up to 1 if `normalised`."""

    count: int
    per_token: int
    normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(DecoderShape):
    """The shape of a decoder of one of the families.

    activation: of the MLP's gate, a function of torch.nn.functional. sliding: for each layer
    whether it sees only `window` positions back. dtype: of the weights; "" if not given. fused: the
    file has one tensor for queries, keys and values, and one for gate and up. norms: a key of
    `layers.NORMS`. joint_qk_norm: the norms of queries and of keys are over all heads together.
    centred_norms: a norm's factor is 1 + its weight. query_scale: a factor on queries, besides
    attention's own 1 / sqrt(head_dim). scaled_embedding: by sqrt(hidden_size). experts: in place of
    the MLP, of its inner size. ropes: further ones. layer_ropes: which one each layer has, 0 being
    `rope`; empty: all that."""

    family: str
    activation: str = "silu"
    fused: bool = False
    norms: str = "before"
    joint_qk_norm: bool = False
    centred_norms: bool = False
    query_scale: float = 1.0
    scaled_embedding: bool = False
    experts: ExpertsConfig | None = None
    ropes: tuple[RopeConfig, ...] = ()
    layer_ropes: tuple[int, ...] = ()
    num_layers: int
    tied: bool = False
    window: int = 0
    sliding: tuple[bool, ...]
    eos_ids: tuple[int, ...] = ()
    pad_ids: tuple[int, ...] = ()
    bos_ids: tuple[int, ...] = ()
    dtype: str = ""

    def check_length(self, positions: int) -> None:
        """Raise ModelError if a sequence of that many rows cannot be computed correctly."""
        rope = self.rope
        if positions > rope.limit:
            why = f"{positions} positions requested, {rope.limit} possible"
            if rope.kind in ("dynamic", "longrope"):
                why += f"; `rope_type: {rope.kind}` changes the angles of earlier rows beyond that"
            raise ModelError(self.path, why)


def shape_fields(
    fields: Fields, trained: int, head_dim: int = 0, theta: float = THETA, *, partial: bool = False
) -> dict[str, Any]:
    """The fields of a `DecoderShape` but biases and norms; ModelError names a wrong key. trained,
    head_dim, theta: positions, a head's size (0: hidden size / heads) and the base of the angles
    where the file is silent. partial: RoPE may rotate a part of a head only."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        groups = f"`num_attention_heads` {heads} is not a multiple of `num_key_value_heads`"
        raise fields.wrong(f"{groups} {kv_heads}")
    if fields.get("head_dim") is None and not head_dim and hidden % heads:
        width = f"`hidden_size` {hidden} is not a multiple"
        raise fields.wrong(f"{width} of `num_attention_heads` {heads}")
    head_dim = fields.integer("head_dim", head_dim or hidden // heads)
    if head_dim % 2:
        raise fields.wrong(f"head_dim {head_dim} is odd; RoPE needs pairs")
    rope, notes = rope_fields(fields, trained, head_dim, theta)
    if rope.rotary_dim(head_dim) != head_dim and not partial:
        raise fields.wrong(f"`{PARTIAL}` other than 1 is not supported")
    return {
        "path": fields.path,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "notes": notes,
    }


def check_supported(fields: Fields, layer: Fields, activation: str = "silu") -> None:
    """Raise ModelError for quantised weights, and for another activation in the part `layer`."""
    quantised = fields.get("quantization_config") or fields.get("compression_config")
    if quantised:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise fields.wrong(f"quantised checkpoints are not supported ({kind or quantised!r})")
    if layer.get("hidden_act") not in (None, activation):
        raise fields.wrong(f"`hidden_act` {layer.get('hidden_act')!r} is not supported")


def layer_types(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers slide. Qwen: by name for each layer, else all from `max_window_layers` on."""
    types = fields.get("layer_types")
    if types is None:
        first = fields.get("max_window_layers")
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.wrong(f"`max_window_layers` must be an integer, not {first!r}")
        return tuple(i >= first for i in range(layers))
    named = isinstance(types, list) and len(types) == layers
    if not named or not all(t in LAYER_TYPES for t in types):
        raise fields.wrong(f"`layer_types` must name {layers} layers, of {', '.join(LAYER_TYPES)}")
    return tuple(t == "sliding_attention" for t in types)


def rope_fields(
    fields: Fields, assumed: int, head_dim: int, base: float
) -> tuple[RopeConfig, tuple[str, ...]]:
    """Both spellings: `rope_theta` with `rope_scaling`, and transformers 5's `rope_parameters`; and
    notes of what is assumed where the file is silent or gives two bases."""
    scaling = fields.section("rope_scaling")
    inner = scaling if scaling.values else fields.section("rope_parameters")
    trained = fields.integer(TRAINED, assumed)
    kind = str(inner.get("rope_type") or inner.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise fields.wrong(f"rope type {kind!r} is not supported ({', '.join(ROPE_KINDS)})")
    if any(isinstance(value, dict) for value in inner.values.values()):
        raise fields.wrong("rope settings per layer type are not supported")
    theta = inner.number("rope_theta", fields.number("rope_theta", base))
    settings = {k: v for k, v in inner.values.items() if k not in RENAMED}
    if kind in ("llama3", "yarn", "longrope"):
        settings[ORIGINAL] = fields.integer(ORIGINAL, inner.integer(ORIGINAL, trained))
    settings.pop(PARTIAL, None)
    part = inner.number(PARTIAL, fields.number(PARTIAL, 1.0))
    if part != 1.0:
        settings[PARTIAL] = part
    rotary_dim = int(head_dim * part)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        what = f"rotates {rotary_dim} of {head_dim} numbers of a head"
        raise fields.wrong(f"`{PARTIAL}` {part:g} {what}")
    for key in ROPE_NUMBERS.get(kind, ()):
        if inner.number(key, 0.0) == 0.0:
            raise inner.wrong(f"rope type {kind!r} needs `{key}`")
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        value = inner.get(key)
        if not isinstance(value, list) or len(value) != rotary_dim // 2:
            raise inner.wrong(f"`{key}` must hold {rotary_dim // 2} numbers")
    top = fields.get("rope_theta")
    below = inner.get("rope_theta")
    notes = []
    if top is None and below is None:
        notes.append(f"`rope_theta` is not given: {base:g} assumed")
    elif None not in (top, below) and top != below:
        notes.append(f"`rope_theta` is {top} at the top and {below} below: {below} is used")
    if fields.get(TRAINED) is None:
        notes.append(f"`{TRAINED}` is not given: {assumed} assumed")
    return RopeConfig(kind, theta, settings, trained), tuple(notes)
