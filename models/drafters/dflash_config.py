"""The shape of a DFlash drafter: config.json in its published spellings; without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..config import DecoderConfig, DecoderShape, check_supported, layer_types, shape_fields
from ..files import Fields, read_fields
from ..rope_config import rope_notes
from .eagle_config import check_target, layer_section

ARCHITECTURE = "DFlashDraftModel"
SECTION = "dflash_config"
TAPS_KEY = "target_layer_ids"
STATES_KEY = "aux_hidden_state_layer_ids"
MASK_KEY = "mask_token_id"
BLOCK = 8  # speculators' default of `block_size`
POSITIONS = 32768  # Qwen3's default of `max_position_embeddings`
# Later drafters (Domino, DSpark, DFlash 2) keep the architecture's name and add parts to it.
LATER = (
    "projector_type",
    "shift_label",
    "sample_from_anchor",
    "pure_draft_prefix_len",
    "gru_hidden_dim",
    "markov_rank",
    "enable_confidence_head",
    "attention_sink_bias",
    "conv_kernel_size",
    "selector_rank",
    "final_logit_softcapping",
    "output_multiplier",
)


class Reach(NamedTuple):
    """How far one layer's block rows see.

    window: keys `window` or more positions away are hidden; None for no limit.
    causal: keys behind the query are hidden, so that a block is read from left to right.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DecoderShape):
    """A block drafter for one target, whose embedding and head it uses.

    layer_ids: the target's layers (from 0) whose outputs are joined, in the order of `fc`.
    reaches: one per layer of the drafter.
    block_size: rows of a block as trained, the anchor included.
    mask_token_id: what stands where a token is to be drafted; its embedding is the target's.
    target_layers: layers of the target that the drafter was made for.
    speculators: the file holds copies of the target's embedding and head.
    notes: what was assumed where files of this kind disagree.
    """

    reaches: tuple[Reach, ...]
    layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    target_layers: int
    qk_norm: bool = True
    speculators: bool = False
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.reaches)

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """The same layers as `hidden_states` indices, increasing: what a target is asked for."""
        return tuple(sorted({layer + 1 for layer in self.layer_ids}))

    @property
    def tap_order(self) -> tuple[int, ...]:
        """For each part of the input of `fc`, which of the taps it is."""
        return tuple(self.tap_ids.index(layer + 1) for layer in self.layer_ids)

    def to_json(self) -> dict[str, Any]:
        """config.json in z-lab's layout, as published for Qwen3 targets."""
        windows = {reach.window for reach in self.reaches} - {None}
        causal = {reach.causal for reach in self.reaches}
        ruled = all(reach.causal == (reach.window is not None) for reach in self.reaches)
        return ({} if ruled else {"is_causal": causal == {True}}) | {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "num_hidden_layers": self.num_layers,
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
            SECTION: {MASK_KEY: self.mask_token_id, TAPS_KEY: list(self.layer_ids)},
        }


def default_layer_ids(target_layers: int, layers: int) -> tuple[int, ...]:
    """DFlash's rule: evenly from layer 1 to three before the end, halves rounded to even."""
    if layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (layers - 1)
    return tuple(round(1 + i * step) for i in range(layers))


def dflash_config(folder: Path, target: DecoderConfig) -> DFlashConfig:
    """config.json of a drafter folder, checked against its target.

    Raises:
        ModelError: not a DFlash drafter, or one that belongs to another target.
    """
    fields = read_fields(folder)
    layer, speculators = layer_section(fields, "dflash")
    # Block size and mask id stand at the top here and inside the section there.
    inner = Fields(fields.path, {**fields.values, **fields.section(SECTION).values})
    _check_kind(fields, inner, layer)
    shape = shape_fields(layer, POSITIONS, 128)
    layers = layer.integer("num_hidden_layers")
    target_layers = fields.integer("num_target_layers", target.num_layers)
    reaches, notes = _reaches(layer, _said_causal(inner, speculators), layers)
    named = fields.get("architectures")
    if not speculators and named != [ARCHITECTURE]:
        notes += (f"`architectures` is {named!r}: read as {ARCHITECTURE}, as its tensors are",)
    if speculators and inner.get("block_size") is None:
        notes += (f"`block_size` is not given: {BLOCK} assumed, as speculators does",)
    bias = layer.flag("attention_bias")
    config = DFlashConfig(
        **shape,
        reaches=reaches,
        layer_ids=_layer_ids(inner, speculators, target_layers, layers),
        block_size=inner.integer("block_size", BLOCK if speculators else None),
        mask_token_id=_mask_id(inner),
        target_layers=target_layers,
        qkv_bias=bias,
        o_bias=bias,
        speculators=speculators,
        notes=(*rope_notes(layer, POSITIONS), *notes),
    )
    _check_block(config, fields)
    _check_target(config, target, fields)
    return config


def _check_kind(fields: Fields, inner: Fields, layer: Fields) -> None:
    if later := next((key for key in LATER if inner.get(key)), None):
        raise fields.wrong(f"is a later kind of drafter than DFlash: `{later}` is not supported")
    whole = layer.integer("vocab_size")
    own = fields.get("draft_vocab_size")
    if own not in (None, whole):
        raise fields.wrong(f"drafts {own} of {whole} tokens, which is not supported")
    check_supported(fields, layer)


def _mask_id(inner: Fields) -> int:
    ids = inner.ids(MASK_KEY)
    if len(ids) != 1:
        raise inner.wrong(f"`{SECTION}.{MASK_KEY}` must be one token id")
    return ids[0]


def _layer_ids(
    inner: Fields, speculators: bool, target_layers: int, layers: int
) -> tuple[int, ...]:
    """speculators counts `hidden_states`, whose entry 0 is the embedding: one more."""
    if not speculators:
        return inner.ids(TAPS_KEY) or default_layer_ids(target_layers, layers)
    states = inner.ids(STATES_KEY) or (2, target_layers // 2, target_layers - 3)
    return tuple(state - 1 for state in states)


def _said_causal(inner: Fields, speculators: bool) -> bool | None:
    """Whether a file says how its layers read a block; None where it does not."""
    if speculators:
        return False if inner.flag("sliding_window_non_causal") else None
    key = "is_causal" if inner.get("causal") is None else "causal"
    return None if inner.get(key) is None else inner.flag(key)


def _reaches(
    layer: Fields, causal: bool | None, layers: int
) -> tuple[tuple[Reach, ...], tuple[str, ...]]:
    """Implementations disagree on sliding layers; this is z-lab's rule: causal unless the file
    says otherwise, for all layers at once, and a full layer sees its whole block."""
    sliding = _sliding(layer, layers)
    window = layer.integer("sliding_window") if any(sliding) else None
    reaches = tuple(
        Reach(window if slides else None, slides if causal is None else causal)
        for slides in sliding
    )
    if window is None:
        return reaches, ()
    how = "causal" if reaches[sliding.index(True)].causal else "bidirectional"
    return reaches, (f"sliding layers: {how} inside a block, {window} positions back",)


def _sliding(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Named for each layer, else Qwen3's rule; a window of null means none."""
    unnamed = fields.get("layer_types") is None
    off = not fields.flag("use_sliding_window") or fields.get("sliding_window") is None
    return (False,) * layers if unnamed and off else layer_types(fields, layers)


def _check_block(config: DFlashConfig, fields: Fields) -> None:
    """Sizes that no block could be drafted with."""
    size = config.block_size
    windows = [r.window for r in config.reaches if r.window is not None]
    if size < 2:
        raise fields.wrong(f"`block_size` is {size}; an anchor and a draft are 2 or more")
    if windows and min(windows) < size:
        raise fields.wrong(f"`sliding_window` {min(windows)} is shorter than a block of {size}")


def _check_target(config: DFlashConfig, target: DecoderConfig, fields: Fields) -> None:
    features = "hidden states of width", config.hidden_size
    check_target(config, target, features, config.target_layers)
    ids = config.layer_ids
    layers = target.num_layers
    if not 0 <= min(ids) <= max(ids) < layers:
        raise fields.wrong(f"`{TAPS_KEY}` {ids} of a target with {layers} layers")
    mask = config.mask_token_id
    size = target.vocab_size
    if mask >= size:
        raise fields.wrong(f"`{MASK_KEY}` is {mask}, the vocabulary has {size}")
