"""The shapes of all drafters as their config.json files give them, checked; without torch. EAGLE-1
and EAGLE-2 share one format; EAGLE-3 and DFlash have their authors' layout and speculators'."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..config import DecoderConfig, DecoderShape, check_supported, layer_types, shape_fields
from ..files import Fields, ModelError, read_fields

TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
EAGLE_POSITIONS = 2048  # Llama's default of `max_position_embeddings`
SPECULATORS_FAMILIES = ("llama", "qwen3")  # layer kinds that speculators builds drafters from
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DFLASH_ARCHITECTURE = "DFlashDraftModel"
DFLASH_SECTION = "dflash_config"
LAYERS_KEY = "target_layer_ids"
STATES_KEY = "aux_hidden_state_layer_ids"
MASK_KEY = "mask_token_id"
NOT_OF_LAYERS = ("architectures", "num_target_layers", "block_size", "is_causal", DFLASH_SECTION)
# The name of a block of a Medusa head, FasterDecoding's and vLLM's: head and block.
MEDUSA_BLOCK = re.compile(
    r"(?P<prefix>(?:medusa_heads?\.)?)"
    r"(?:(\d{1,3})\.(\d{1,3})\.linear|blocks\.(\d{1,3})\.layers\.(\d{1,3}))\.weight"
)
BLOCK_SIZE = 8  # speculators' default of `block_size`
DFLASH_POSITIONS = 32768  # Qwen3's default of `max_position_embeddings`
# Later drafters (Domino, DSpark, DFlash 2) keep the architecture's name and add parts to it.
LATER_KEYS = (
    *("projector_type", "shift_label", "sample_from_anchor", "pure_draft_prefix_len"),
    *("gru_hidden_dim", "markov_rank", "enable_confidence_head", "attention_sink_bias"),
    *("conv_kernel_size", "selector_rank", "final_logit_softcapping", "output_multiplier"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig(DecoderShape):
    """speculators: the file has their layout."""

    speculators: bool = False

    def layer_json(self) -> dict[str, Any]:
        """The keys of a config.json of one layer of this shape."""
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {**llama, "num_hidden_layers": 1, **self.shape_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DrafterConfig):
    """One layer that drafts for one target, in the target's width and vocabulary; its one tap is
    the target's last hidden state behind its final norm."""

    taps: tuple[int, ...]
    fc_bias: bool = True

    def to_json(self) -> dict[str, Any]:
        return {**self.layer_json(), "bias": self.fc_bias, "qkv_bias": self.qkv_bias}


def eagle_config(folder: Path, target: DecoderConfig) -> EagleConfig:
    """config.json of a drafter folder; ModelError for another kind or one of another target."""
    fields = read_fields(folder)
    for key in ("speculators_model_type", "draft_vocab_size"):
        if fields.get(key) is not None:
            raise fields.wrong(f"has `{key}`: not an EAGLE-1 or EAGLE-2 drafter")
    shape = shape_fields(fields, fields.integer("max_sequence_length", EAGLE_POSITIONS))
    shape["notes"] = (*_layer_notes(fields, fields, "EAGLE-1 and EAGLE-2"), *shape["notes"])
    shape |= {"fc_bias": fields.flag("bias", True), "qkv_bias": fields.flag("qkv_bias")}
    config = EagleConfig(**shape, taps=(target.num_layers,))
    _check_target(config, target, ("target features of width", config.hidden_size))
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """One EAGLE-3 layer that drafts for one target, whose vocabulary is `vocab_size`. taps:
    hidden_states indices of the target that feed `fc`. norm_*, fc_norm: speculators' switches.
    speculators: the layer is published as `layers.0` instead of `midlayer`."""

    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def to_json(self) -> dict[str, Any]:
        """config.json in EAGLE's layout, which has no switches. To EAGLE `target_hidden_size` means
        that the drafter has its own embedding: it is written only where it differs."""
        other = self.target_hidden_size != self.hidden_size
        return ({"target_hidden_size": self.target_hidden_size} if other else {}) | {
            **self.layer_json(),
            "draft_vocab_size": self.draft_vocab_size,
            TAPS_KEY: list(self.taps),
        }

    def speculators_json(self) -> dict[str, Any]:
        """config.json in speculators' layout, without the section on the target."""
        other = self.target_hidden_size != self.hidden_size
        layer = {"model_type": "llama", "num_hidden_layers": 1, **self.shape_json()}
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size if other else None,
            **dict.fromkeys(SWITCHES, False),
            TAPS_KEY: self.taps,
            "transformer_layer_config": layer,
        }


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's rule: 2, L // 2, L - 3 as hidden_states indices, increasing."""
    return tuple(sorted({2, layers // 2, layers - 3}))


def eagle3_config(folder: Path, target: DecoderConfig) -> Eagle3Config:
    """config.json of a drafter folder; ModelError for another kind or one of another target. EAGLE,
    speculators and vLLM number taps as `hidden_states` indices (top-level key); SpecForge and
    SGLang (key inside `eagle_config`) by the layer whose output is taken: one less."""
    fields = read_fields(folder)
    layer, speculators = _layer_section(fields, "eagle3")
    family = layer.get("model_type")
    if speculators and family not in SPECULATORS_FAMILIES:
        raise fields.wrong(f"a drafter layer of model_type {family!r} is not supported")
    layer_notes = _layer_notes(fields, layer, "EAGLE-3")
    shape = shape_fields(layer, EAGLE_POSITIONS)
    bias = speculators and layer.flag("attention_bias")
    notes: list[str] = []
    rule = default_taps(target.num_layers)
    inner = tuple(i + 1 for i in fields.section("eagle_config").ids(TAPS_KEY))
    taps = tuple(sorted(set(fields.ids(TAPS_KEY) or inner or rule)))
    if not 0 <= taps[0] <= taps[-1] <= target.num_layers:
        raise fields.wrong(f"taps {taps} of a target with {target.num_layers} layers")
    if taps != rule:
        notes.append(f"taps {taps}; EAGLE-3's rule would be {rule}")
    switches: dict[str, Any] = {name: fields.flag(name) for name in SWITCHES}
    if speculators and fields.get("norm_before_residual") is None:
        # As vLLM does, which runs such files.
        switches["norm_before_residual"] = True
        notes.append("norm_before_residual: true assumed, as vLLM does")
    if switches["norm_output"] and not (speculators or switches["fc_norm"]):
        # SpecForge uses the same key for the norm before lm_head, which is always there.
        switches["norm_output"] = False
        notes.append("norm_output read as in SpecForge: features are not normalised")
    if switches["norm_before_fc"] and switches["fc_norm"]:
        raise fields.wrong("`norm_before_fc` and `fc_norm` exclude each other")
    shape["notes"] = (*notes, *layer_notes, *shape["notes"])
    shape |= switches | dict.fromkeys(("qkv_bias", "o_bias"), bias)
    config = Eagle3Config(
        **shape,
        draft_vocab_size=fields.integer("draft_vocab_size", shape["vocab_size"]),
        target_hidden_size=fields.integer("target_hidden_size", shape["hidden_size"]),
        taps=taps,
        mlp_bias=speculators and layer.flag("mlp_bias"),
        qk_norm=speculators and family == "qwen3",
        speculators=speculators,
    )
    _check_target(config, target, ("target features of width", config.target_hidden_size))
    if config.draft_vocab_size > config.vocab_size:
        what = f"`draft_vocab_size` {config.draft_vocab_size} exceeds the vocabulary"
        raise fields.wrong(f"{what} of {config.vocab_size}")
    return config


def _layer_section(fields: Fields, kind: str) -> tuple[Fields, bool]:
    published = fields.get("speculators_model_type")
    if published is None:
        return fields, False
    if published != kind:
        raise fields.wrong(f"speculators_model_type {published!r} is not supported ({kind})")
    return fields.section("transformer_layer_config"), True


def _layer_notes(fields: Fields, layer: Fields, name: str) -> tuple[str, ...]:
    """Published files copy `num_hidden_layers` from other models; their tensors have one layer."""
    layers = layer.integer("num_hidden_layers", 1)
    check_supported(fields, layer)
    note = f"`num_hidden_layers` is {layers}: {name} drafters have one layer, and one is read"
    return () if layers == 1 else (note,)


def _check_target(
    config: DecoderShape, target: DecoderConfig, features: tuple[str, int], layers: int = 0
) -> None:
    """Raise ModelError for a drafter of another target, as far as the sizes show it."""
    pairs = [
        ("a vocabulary of", config.vocab_size, target.vocab_size),
        (*features, target.hidden_size),
        ("a number of layers of", layers or target.num_layers, target.num_layers),
    ]
    for what, value, target_value in pairs:
        if value != target_value:
            reason = f"{what} {value}, and {target.path} has {target_value}"
            raise ModelError(config.path, f"drafts for another target: {reason}")


class Reach(NamedTuple):
    """What block rows see: keys less than `window` positions away; if causal, none after them."""

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """A block drafter for one target, whose embedding and head it uses.

    reaches: one per layer of the drafter. layer_ids: the target's layers (from 0) whose outputs are
    joined, in the order of `fc`. block_size: rows of a block as trained, the anchor included.
    mask_token_id: in place of a token to draft. target_layers: layers of the drafter's target.
    speculators: the file holds copies of the target's embedding and head."""

    reaches: tuple[Reach, ...]
    layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    target_layers: int
    qk_norm: bool = True

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The same layers as `hidden_states` indices, increasing: the taps of the target."""
        return tuple(sorted({layer + 1 for layer in self.layer_ids}))

    def to_json(self) -> dict[str, Any]:
        windows = {reach.window for reach in self.reaches} - {None}
        ruled = all(reach.causal == (reach.window is not None) for reach in self.reaches)
        return ({} if ruled else {"is_causal": all(reach.causal for reach in self.reaches)}) | {
            "architectures": [DFLASH_ARCHITECTURE],
            "model_type": "qwen3",
            "num_hidden_layers": len(self.reaches),
            "num_target_layers": self.target_layers,
            **self.shape_json(),
            "attention_bias": self.qkv_bias,
            "layer_types": [
                "full_attention" if reach.window is None else "sliding_attention"
                for reach in self.reaches
            ],
            "use_sliding_window": bool(windows),
            "sliding_window": next(iter(windows), None),
            "block_size": self.block_size,
            DFLASH_SECTION: {MASK_KEY: self.mask_token_id, LAYERS_KEY: list(self.layer_ids)},
        }

    def speculators_json(self) -> dict[str, Any]:
        """config.json in speculators' layout, without the section on the target."""
        sliding = [reach for reach in self.reaches if reach.window is not None]
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "draft_vocab_size": self.vocab_size,
            "target_hidden_size": None,
            "block_size": self.block_size,
            STATES_KEY: [layer_id + 1 for layer_id in self.layer_ids],
            MASK_KEY: self.mask_token_id,
            "sliding_window_non_causal": bool(sliding) and not sliding[0].causal,
            "transformer_layer_config": {
                k: v for k, v in self.to_json().items() if k not in NOT_OF_LAYERS
            },
        }


def default_layer_ids(target_layers: int, layers: int) -> tuple[int, ...]:
    """DFlash's rule: evenly from layer 1 to three before the end, halves rounded to even."""
    if layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + i * step) for i in range(layers))


def dflash_config(folder: Path, target: DecoderConfig) -> DFlashConfig:
    """config.json of a drafter folder; ModelError for another kind or one of another target."""
    fields = read_fields(folder)
    layer, speculators = _layer_section(fields, "dflash")
    # Block size and mask id are at the top of the file, or inside the section.
    inner = Fields(fields.path, {**fields.values, **fields.section(DFLASH_SECTION).values})
    if later := next((key for key in LATER_KEYS if inner.get(key)), None):
        raise fields.wrong(f"is a later kind of drafter than DFlash: `{later}` is not supported")
    whole = layer.integer("vocab_size")
    drafted = fields.get("draft_vocab_size")
    if drafted not in (None, whole):
        raise fields.wrong(f"drafts {drafted} of {whole} tokens, which is not supported")
    check_supported(fields, layer)
    shape = shape_fields(layer, DFLASH_POSITIONS, 128)
    layers = layer.integer("num_hidden_layers")
    target_layers = fields.integer("num_target_layers", target.num_layers)
    reaches = _reaches(layer, inner, speculators, layers)
    notes = [*shape.pop("notes")]
    sliding = [reach for reach in reaches if reach.window is not None]
    if sliding:
        how = "causal" if sliding[0].causal else "bidirectional"
        notes.append(f"sliding layers: {how} inside a block, {sliding[0].window} positions back")
    architectures = fields.get("architectures")
    if not speculators and architectures != [DFLASH_ARCHITECTURE]:
        reading = f"read as {DFLASH_ARCHITECTURE}, as its tensors are"
        notes.append(f"`architectures` is {architectures!r}: {reading}")
    if speculators and inner.get("block_size") is None:
        notes.append(f"`block_size` is not given: {BLOCK_SIZE} assumed, as speculators does")
    if speculators:  # counts `hidden_states`, whose entry 0 is the embedding: one more
        states = inner.ids(STATES_KEY) or (2, target_layers // 2, target_layers - 3)
        layer_ids = tuple(state - 1 for state in states)
    else:
        layer_ids = inner.ids(LAYERS_KEY) or default_layer_ids(target_layers, layers)
    size = inner.integer("block_size", BLOCK_SIZE if speculators else None)
    masks = inner.ids(MASK_KEY)
    if len(masks) != 1:
        raise inner.wrong(f"`{DFLASH_SECTION}.{MASK_KEY}` must be one token id")
    shape |= dict.fromkeys(("qkv_bias", "o_bias"), layer.flag("attention_bias"))
    shape |= {"target_layers": target_layers, "speculators": speculators, "notes": tuple(notes)}
    config = DFlashConfig(
        **shape, reaches=reaches, layer_ids=layer_ids, block_size=size, mask_token_id=masks[0]
    )
    if size < 2:
        raise fields.wrong(f"`block_size` is {size}; an anchor and a draft are 2 or more")
    if sliding and (window := sliding[0].window) is not None and window < size:
        raise fields.wrong(f"`sliding_window` {window} is shorter than a block of {size}")
    _check_target(config, target, ("hidden states of width", config.hidden_size), target_layers)
    count = target.num_layers
    if not 0 <= min(layer_ids) <= max(layer_ids) < count:
        raise fields.wrong(f"`{LAYERS_KEY}` {layer_ids} of a target with {count} layers")
    if masks[0] >= target.vocab_size:
        raise fields.wrong(f"`{MASK_KEY}` is {masks[0]}, the vocabulary has {target.vocab_size}")
    return config


def _reaches(layer: Fields, inner: Fields, speculators: bool, layers: int) -> tuple[Reach, ...]:
    """Implementations disagree on sliding layers; this is z-lab's rule: causal unless the file
    says otherwise, for all layers at once, and a full layer sees its whole block. Sliding layers
    are named, else by Qwen3's rule; a window of null means none."""
    if speculators:
        causal = False if inner.flag("sliding_window_non_causal") else None
    else:
        key = "is_causal" if inner.get("causal") is None else "causal"
        causal = None if inner.get(key) is None else inner.flag(key)
    unnamed = layer.get("layer_types") is None
    off = not layer.flag("use_sliding_window") or layer.get("sliding_window") is None
    sliding = (False,) * layers if unnamed and off else layer_types(layer, layers)
    window = layer.integer("sliding_window") if any(sliding) else None
    return tuple(Reach(window if s else None, s if causal is None else causal) for s in sliding)
