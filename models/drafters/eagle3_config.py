"""The shape of an EAGLE-3 drafter: EAGLE's and speculators' config.json; without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DecoderConfig, RopeConfig, head_shape, rope_config
from ..files import Fields, ModelError, read_fields
from .eagle_config import check_layer, check_target

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
FAMILIES = ("llama", "qwen3")  # layer kinds that speculators builds drafters from


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """One EAGLE-3 layer that drafts for one target.

    vocab_size, target_hidden_size: the target's. hidden_size: the drafter's.
    taps: hidden_states indices of the target that feed `fc`; None until known.
    norm_before_residual, norm_before_fc, fc_norm, norm_output: speculators' switches.
    speculators: the layer is published as `layers.0` instead of `midlayer`.
    notes: what was assumed where the file is silent or ambiguous.
    """

    path: Path
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    speculators: bool = False
    notes: tuple[str, ...] = ()

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def o_bias(self) -> bool:
        return self.attention_bias

    def to_json(self) -> dict[str, Any]:
        """config.json in EAGLE's own layout, which knows neither switches nor scaled angles.

        `target_hidden_size` stands there only where it differs: EAGLE takes the key to mean that
        the drafter brings its own embedding.
        """
        other = self.target_hidden_size != self.hidden_size
        return ({"target_hidden_size": self.target_hidden_size} if other else {}) | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.rope.trained,
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": False,
            TAPS_KEY: list(self.taps),
        }


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's rule: 2, L // 2, L - 3 as hidden_states indices, increasing."""
    return tuple(sorted({2, layers // 2, layers - 3}))


def eagle3_config(
    folder: Path, target: DecoderConfig, taps: tuple[int, ...] | None = None
) -> Eagle3Config:
    """config.json of a drafter folder, checked against its target.

    Args:
        taps: overrides the file's tap ids and the rule.

    Raises:
        ModelError: not an EAGLE-3 drafter, or one that belongs to another target.
    """
    fields = read_fields(folder)
    speculators = fields.get("speculators_model_type") is not None
    layer = fields.section("transformer_layer_config") if speculators else fields
    _check_kind(fields, layer, speculators)
    heads, kv_heads, head_dim = head_shape(layer)
    trained = layer.integer("max_position_embeddings", 2048)
    hidden = layer.integer("hidden_size")
    found, notes = tap_ids(fields, target, taps)
    switches, more = _switches(fields, speculators)
    config = Eagle3Config(
        path=fields.path,
        vocab_size=layer.integer("vocab_size"),
        draft_vocab_size=fields.integer("draft_vocab_size", layer.integer("vocab_size")),
        hidden_size=hidden,
        target_hidden_size=fields.integer("target_hidden_size", hidden),
        intermediate_size=layer.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=layer.number("rms_norm_eps", 1e-6),
        rope=rope_config(layer, trained, head_dim),
        taps=found,
        attention_bias=speculators and layer.flag("attention_bias"),
        mlp_bias=speculators and layer.flag("mlp_bias"),
        qk_norm=speculators and layer.get("model_type") == "qwen3",
        speculators=speculators,
        notes=notes + more,
        **switches,
    )
    _check_target(config, target)
    return config


def _check_kind(fields: Fields, layer: Fields, speculators: bool) -> None:
    kind = fields.get("speculators_model_type")
    if speculators and kind != "eagle3":
        raise ModelError(fields.path, f"speculators_model_type {kind!r} is not supported (eagle3)")
    if speculators and layer.get("model_type") not in FAMILIES:
        raise ModelError(
            fields.path,
            f"a drafter layer of model_type {layer.get('model_type')!r} is not supported",
        )
    check_layer(fields, layer, "EAGLE-3")


def tap_ids(
    fields: Fields, target: DecoderConfig, override: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The taps and what to note about them.

    EAGLE, speculators and vLLM number taps as `hidden_states` indices (top-level key); SpecForge
    and SGLang (key inside `eagle_config`) by the layer whose output is taken: one less.
    """
    rule, outer = default_taps(target.num_layers), fields.ids(TAPS_KEY)
    inner = tuple(i + 1 for i in fields.section("eagle_config").ids(TAPS_KEY))
    taps = tuple(sorted(set(override or outer or inner or rule)))
    if not 0 <= taps[0] <= taps[-1] <= target.num_layers:
        raise ModelError(fields.path, f"taps {taps} of a target with {target.num_layers} layers")
    return taps, () if taps == rule else (f"taps {taps}; EAGLE-3's rule would be {rule}",)


def _switches(fields: Fields, speculators: bool) -> tuple[dict[str, bool], tuple[str, ...]]:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    found = {name: fields.flag(name) for name in names}
    notes: list[str] = []
    if speculators and fields.get("norm_before_residual") is None:
        # vLLM, where such files are run, takes it as set.
        found["norm_before_residual"] = True
        notes.append("norm_before_residual: true assumed, as vLLM does")
    if found["norm_output"] and not (speculators or found["fc_norm"]):
        # SpecForge uses the same key for the norm before lm_head, which is always there.
        found["norm_output"] = False
        notes.append("norm_output read as SpecForge means it: features are not normalised")
    if found["norm_before_fc"] and found["fc_norm"]:
        raise ModelError(fields.path, "`norm_before_fc` and `fc_norm` exclude each other")
    return found, tuple(notes)


def _check_target(config: Eagle3Config, target: DecoderConfig) -> None:
    check_target(config.path, config.vocab_size, config.target_hidden_size, target)
    if config.draft_vocab_size > config.vocab_size:
        raise ModelError(
            config.path,
            f"`draft_vocab_size` {config.draft_vocab_size} exceeds the vocabulary of"
            f" {config.vocab_size}",
        )
