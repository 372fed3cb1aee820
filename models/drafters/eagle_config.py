"""The shape of an EAGLE-1 or EAGLE-2 drafter, which share one format, and EAGLE-3's; without torch.

Also what the configurations of all drafters are read and checked with.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DecoderConfig, DecoderShape, check_supported, shape_fields
from ..files import Fields, ModelError, read_fields
from ..rope_config import rope_notes

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
POSITIONS = 2048  # Llama's default of `max_position_embeddings`
FAMILIES = ("llama", "qwen3")  # layer kinds that speculators builds drafters from
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DecoderShape):
    """One layer that drafts for one target, in the target's own width and vocabulary.

    fc_bias: whether `fc` has a bias (`bias` of the file, true where it is silent).
    taps: the one feature, the target's last hidden state behind its final norm.
    notes: what was assumed where the file is silent or ambiguous.
    """

    taps: tuple[int, ...]
    fc_bias: bool = True
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """config.json in the published layout."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **self.shape_json(),
            "bias": self.fc_bias,
            "qkv_bias": self.qkv_bias,
        }


def eagle_config(folder: Path, target: DecoderConfig) -> EagleConfig:
    """config.json of a drafter folder, checked against its target.

    Raises:
        ModelError: not an EAGLE-1 or EAGLE-2 drafter, or one that belongs to another target.
    """
    fields = read_fields(folder)
    for key in ("speculators_model_type", "draft_vocab_size"):
        if fields.get(key) is not None:
            raise fields.wrong(f"has `{key}`: no EAGLE-1 or EAGLE-2 drafter")
    trained = fields.integer("max_sequence_length", POSITIONS)
    config = EagleConfig(
        **shape_fields(fields, trained),
        notes=layer_notes(fields, fields, "EAGLE-1 and EAGLE-2", trained),
        taps=(target.num_layers,),
        fc_bias=fields.flag("bias", True),
        qkv_bias=fields.flag("qkv_bias"),
    )
    check_target(config, target, ("target features of width", config.hidden_size))
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DecoderShape):
    """One EAGLE-3 layer that drafts for one target.

    vocab_size, target_hidden_size: the target's. hidden_size: the drafter's.
    taps: hidden_states indices of the target that feed `fc`; None until known.
    norm_before_residual, norm_before_fc, fc_norm, norm_output: speculators' switches.
    speculators: the layer is published as `layers.0` instead of `midlayer`.
    notes: what was assumed where the file is silent or ambiguous.
    """

    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    speculators: bool = False
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """config.json in EAGLE's own layout, which knows no switches.

        `target_hidden_size` stands there only where it differs: EAGLE takes the key to mean that
        the drafter brings its own embedding.
        """
        other = self.target_hidden_size != self.hidden_size
        return ({"target_hidden_size": self.target_hidden_size} if other else {}) | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **self.shape_json(),
            "draft_vocab_size": self.draft_vocab_size,
            TAPS_KEY: list(self.taps),
        }


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's rule: 2, L // 2, L - 3 as hidden_states indices, increasing."""
    return tuple(sorted({2, layers // 2, layers - 3}))


def eagle3_config(folder: Path, target: DecoderConfig) -> Eagle3Config:
    """config.json of a drafter folder, checked against its target.

    Raises:
        ModelError: not an EAGLE-3 drafter, or one that belongs to another target.
    """
    fields = read_fields(folder)
    layer, speculators = layer_section(fields, "eagle3")
    family = layer.get("model_type")
    if speculators and family not in FAMILIES:
        raise fields.wrong(f"a drafter layer of model_type {family!r} is not supported")
    own = layer_notes(fields, layer, "EAGLE-3", POSITIONS)
    shape = shape_fields(layer, POSITIONS)
    bias = speculators and layer.flag("attention_bias")
    taps, notes = tap_ids(fields, target)
    switches, more = _switches(fields, speculators)
    config = Eagle3Config(
        **shape,
        draft_vocab_size=fields.integer("draft_vocab_size", shape["vocab_size"]),
        target_hidden_size=fields.integer("target_hidden_size", shape["hidden_size"]),
        taps=taps,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=speculators and layer.flag("mlp_bias"),
        qk_norm=speculators and family == "qwen3",
        speculators=speculators,
        notes=notes + more + own,
        **switches,
    )
    check_target(config, target, ("target features of width", config.target_hidden_size))
    if config.draft_vocab_size > config.vocab_size:
        what = f"`draft_vocab_size` {config.draft_vocab_size} exceeds the vocabulary"
        raise fields.wrong(f"{what} of {config.vocab_size}")
    return config


def tap_ids(fields: Fields, target: DecoderConfig) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The taps and what to note about them.

    EAGLE, speculators and vLLM number taps as `hidden_states` indices (top-level key); SpecForge
    and SGLang (key inside `eagle_config`) by the layer whose output is taken: one less.
    """
    rule = default_taps(target.num_layers)
    outer = fields.ids(TAPS_KEY)
    inner = tuple(i + 1 for i in fields.section("eagle_config").ids(TAPS_KEY))
    taps = tuple(sorted(set(outer or inner or rule)))
    if not 0 <= taps[0] <= taps[-1] <= target.num_layers:
        raise fields.wrong(f"taps {taps} of a target with {target.num_layers} layers")
    return taps, () if taps == rule else (f"taps {taps}; EAGLE-3's rule would be {rule}",)


def _switches(fields: Fields, speculators: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    switches = {name: fields.flag(name) for name in SWITCHES}
    notes: list[str] = []
    if speculators and fields.get("norm_before_residual") is None:
        # vLLM, where such files are run, takes it as set.
        switches["norm_before_residual"] = True
        notes.append("norm_before_residual: true assumed, as vLLM does")
    if switches["norm_output"] and not (speculators or switches["fc_norm"]):
        # SpecForge uses the same key for the norm before lm_head, which is always there.
        switches["norm_output"] = False
        notes.append("norm_output read as SpecForge means it: features are not normalised")
    if switches["norm_before_fc"] and switches["fc_norm"]:
        raise fields.wrong("`norm_before_fc` and `fc_norm` exclude each other")
    return switches, tuple(notes)


def layer_section(fields: Fields, kind: str) -> tuple[Fields, bool]:
    """What describes the layers of a drafter, and whether the file has speculators' layout.

    Raises:
        ModelError: speculators' layout of another kind of drafter.
    """
    published = fields.get("speculators_model_type")
    if published is None:
        return fields, False
    if published != kind:
        raise fields.wrong(f"speculators_model_type {published!r} is not supported ({kind})")
    return fields.section("transformer_layer_config"), True


def layer_notes(fields: Fields, layer: Fields, name: str, trained: int) -> tuple[str, ...]:
    """What to note of the layer; ModelError if no drafter of the family is built from such a one.

    Published files copy `num_hidden_layers` of all kinds of models; their tensors have one layer.
    """
    layers = layer.integer("num_hidden_layers", 1)
    check_supported(fields, layer)
    notes = rope_notes(layer, trained)
    said = f"`num_hidden_layers` is {layers}: {name} drafters have one layer, and one is read"
    return notes if layers == 1 else (said, *notes)


def check_target(
    config: DecoderShape,
    target: DecoderConfig,
    features: tuple[str, int],
    layers: int | None = None,
) -> None:
    """A drafter of another target would load and draft nonsense: compare what can be compared.

    Args:
        features: what the width of the target's features is called, and as the drafter has it.
        layers: of the target, where the drafter's file says.
    """
    pairs = [
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        (*features, target.hidden_size),
        ("a number of layers of", layers or target.num_layers, target.num_layers),
    ]
    for what, mine, theirs in pairs:
        if mine != theirs:
            reason = f"{what} {mine}, and {target.path} has {theirs}"
            raise ModelError(config.path, f"drafts for another target: {reason}")
