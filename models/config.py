"""The shape of a target as its config.json gives it, checked key by key; without torch."""

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from .files import Fields, ModelError, inside, read_fields, read_json
from .rope_config import RopeConfig, rope_config, rope_notes

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
TRAINED = "max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")
DTYPES = ("", "float32", "bfloat16", "float16", "float64")
CUSTOM_CODE = {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
SLIDING_DEFAULT = 4096  # Hugging Face's default of `sliding_window`


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """What the layers of a target and of any drafter are made of, and their vocabulary.

    qkv_bias, o_bias, mlp_bias: projections with a bias. qk_norm: queries and keys have norms.
    """

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

    def sizes(self) -> dict[str, Any]:
        """What a drafter of the same shape is built with: all but biases and norms."""
        return {f.name: getattr(self, f.name) for f in fields(DecoderShape) if f.default is MISSING}

    def shape_json(self) -> dict[str, Any]:
        """The keys of a config.json that say it, of an untied model."""
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
class DecoderConfig(DecoderShape):
    """The shape of a Llama, Mistral, Qwen2 or Qwen3 decoder.

    sliding: for each layer whether it sees only `window` positions back.
    dtype: what the file says its weights are; empty where it is silent.
    notes: what was assumed where the file is silent or ambiguous.
    """

    family: str
    num_layers: int
    tied: bool
    window: int
    sliding: tuple[bool, ...]
    eos_ids: tuple[int, ...]
    pad_ids: tuple[int, ...]
    bos_ids: tuple[int, ...]
    dtype: str
    notes: tuple[str, ...] = ()

    def check_length(self, positions: int) -> None:
        """Raise ModelError if a sequence of that many rows cannot be computed correctly."""
        kind = self.rope.kind
        limit = self.rope.limit
        if positions > limit:
            why = f"; `rope_type: {kind}` changes the angles of earlier rows beyond that"
            why = why if kind in ("dynamic", "longrope") else ""
            raise ModelError(self.path, f"{positions} positions asked, {limit} possible{why}")


def shape_fields(fields: Fields, trained: int, head_dim: int = 0) -> dict[str, Any]:
    """The fields of a `DecoderShape` without its biases and norms; ModelError names a wrong key.

    Args:
        trained: positions, and head_dim: of a head (0: hidden size / heads), where the file is
            silent.
    """
    heads, kv_heads, head_dim = head_shape(fields, head_dim)
    return {
        "path": fields.path,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "eps": fields.number("rms_norm_eps", 1e-6),
        "rope": rope_config(fields, fields.integer(TRAINED, trained), head_dim),
    }


def check_supported(fields: Fields, layer: Fields) -> None:
    """Raise ModelError for numbers or arithmetic that nothing is built from here.

    Args:
        layer: the part of the file that describes its layers.
    """
    quantised = fields.get("quantization_config") or fields.get("compression_config")
    if quantised:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise fields.wrong(f"quantised checkpoints are not supported ({kind or quantised!r})")
    if layer.get("hidden_act") not in (None, "silu"):
        raise fields.wrong(f"`hidden_act` {layer.get('hidden_act')!r} is not supported")


def decoder_config(folder: Path) -> DecoderConfig:
    """The target's config.json, checked; ModelError names the key that is wrong."""
    fields = read_fields(folder)
    _refuse_foreign(fields)
    family = fields.get("model_type")
    shape = shape_fields(fields, MAX_POSITIONS[family], 128 if family == "qwen3" else 0)
    layers = fields.integer("num_hidden_layers")
    window, sliding = _sliding(fields, family, layers)
    if window >= shape["rope"].limit:  # reaches back over every sequence there can be
        sliding = (False,) * layers
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
    return DecoderConfig(
        **shape,
        family=family,
        num_layers=layers,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        tied=fields.flag("tie_word_embeddings"),
        window=window,
        sliding=sliding,
        eos_ids=_stop_ids(folder, fields, shape["vocab_size"]),
        pad_ids=_other_ids(fields, "pad_token_id"),
        bos_ids=_other_ids(fields, "bos_token_id"),
        dtype=_dtype(fields),
        notes=rope_notes(fields, MAX_POSITIONS[family]),
    )


def _refuse_foreign(fields: Fields) -> None:
    family = fields.get("model_type")
    custom = sorted(CUSTOM_CODE & set(fields.section("auto_map").values))
    if family not in FAMILIES or custom:
        what = f"`auto_map` for {', '.join(custom)}" if custom else f"model_type {family!r}"
        raise fields.wrong(
            f"{what} is not supported ({', '.join(FAMILIES)}); remote code is never executed"
        )
    check_supported(fields, fields)


def head_shape(fields: Fields, default_dim: int = 0) -> tuple[int, int, int]:
    """Attention heads, KV heads and head_dim (absent: `default_dim`, or hidden size / heads)."""
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong(
            f"`num_attention_heads` {heads} is no multiple of `num_key_value_heads` {kv_heads}",
        )
    if fields.get("head_dim") is None and not default_dim and hidden % heads:
        raise fields.wrong(
            f"`hidden_size` {hidden} is no multiple of `num_attention_heads` {heads}"
        )
    head_dim = fields.integer("head_dim", default_dim or hidden // heads)
    if head_dim % 2:
        raise fields.wrong(f"head_dim {head_dim} is odd; RoPE needs pairs")
    return heads, kv_heads, head_dim


def _sliding(fields: Fields, family: str, layers: int) -> tuple[int, tuple[bool, ...]]:
    """Window and, for each layer, whether it has one, as transformers reads these files."""
    none = 0, (False,) * layers
    if family == "llama" or (family != "mistral" and not fields.flag("use_sliding_window")):
        return none
    if "sliding_window" in fields.values and fields.get("sliding_window") is None:
        return none
    window = fields.integer("sliding_window", SLIDING_DEFAULT)
    if family == "mistral":
        return window, (True,) * layers
    return window, layer_types(fields, layers)


def layer_types(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Qwen: by name for each layer, else all from `max_window_layers` on."""
    types = fields.get("layer_types")
    first = fields.get("max_window_layers")
    if types is None:
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise fields.wrong(f"`max_window_layers` must be an integer, not {first!r}")
        return tuple(i >= first for i in range(layers))
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(t in LAYER_TYPES for t in types)
    ):
        raise fields.wrong(
            f"`layer_types` must name {layers} layers, each one of {', '.join(LAYER_TYPES)}"
        )
    return tuple(t == "sliding_attention" for t in types)


def _stop_ids(folder: Path, fields: Fields, size: int) -> tuple[int, ...]:
    """`generate` stops at the ids of generation_config.json where that file exists."""
    path = folder / "generation_config.json"
    if path.is_symlink() or path.exists():
        own = Fields(inside(folder, path.name), read_json(path))
        fields = own if own.ids("eos_token_id") else fields
    ids = fields.ids("eos_token_id")
    if ids and max(ids) >= size:
        raise fields.wrong(f"`eos_token_id` is {max(ids)}, the vocabulary has {size}")
    return ids


def _other_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Ids that nothing is decoded by; old files write -1 for none."""
    return () if fields.get(key) == -1 else fields.ids(key)


def _dtype(fields: Fields) -> str:
    """`dtype` in files of transformers 5, `torch_dtype` before."""
    key = "torch_dtype" if fields.get("dtype") is None else "dtype"
    name = str(fields.get(key) or "").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.wrong(f"`{key}` {name!r} is not supported ({', '.join(DTYPES[1:])})")
    return name
