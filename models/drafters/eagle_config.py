"""The shape of an EAGLE-1 or EAGLE-2 drafter, which share one format; without torch.

Also what the configurations of all drafters are read and checked with.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import DecoderConfig, DecoderShape, check_supported, shape_fields
from ..files import Fields, ModelError, read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(DecoderShape):
    """One layer that drafts for one target, in the target's own width and vocabulary.

    fc_bias: whether `fc` has a bias (`bias` of the file, true where it is silent).
    taps: the one feature, the target's last hidden state behind its final norm.
    """

    taps: tuple[int, ...]
    fc_bias: bool = True

    def to_json(self) -> dict[str, Any]:
        """config.json in the published layout, which knows no scaled angles here."""
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
            raise ModelError(fields.path, f"has `{key}`: no EAGLE-1 or EAGLE-2 drafter")
    check_layer(fields, fields, "EAGLE-1 and EAGLE-2")
    config = EagleConfig(
        **shape_fields(fields, fields.integer("max_sequence_length", 2048)),
        taps=(target.num_layers,),
        fc_bias=fields.flag("bias", True),
        qkv_bias=fields.flag("qkv_bias"),
    )
    check_target(config, target, ("target features of width", config.hidden_size))
    return config


def layer_section(fields: Fields, kind: str) -> tuple[Fields, bool]:
    """What describes the layers of a drafter, and whether the file has speculators' layout.

    Raises:
        ModelError: speculators' layout of another kind of drafter.
    """
    published = fields.get("speculators_model_type")
    if published is None:
        return fields, False
    if published != kind:
        what = f"speculators_model_type {published!r} is not supported ({kind})"
        raise ModelError(fields.path, what)
    return fields.section("transformer_layer_config"), True


def check_layer(fields: Fields, layer: Fields, name: str) -> None:
    """Raise ModelError for a layer that no drafter of the EAGLE family is built from here."""
    layers = layer.integer("num_hidden_layers", 1)
    if layers != 1:
        raise ModelError(fields.path, f"{name} drafters have 1 layer here, this one has {layers}")
    check_supported(fields, layer)


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
