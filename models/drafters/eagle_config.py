"""The shape of an EAGLE-1 or EAGLE-2 drafter, which share one format; without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..config import DecoderConfig, RopeConfig, head_shape, rope_config
from ..files import Fields, ModelError, read_fields

TRAINED = "max_position_embeddings"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """One layer that drafts for one target, in the target's own width and vocabulary.

    fc_bias: whether `fc` has a bias (`bias` of the file, true where it is silent).
    qkv_bias: whether the attention's inputs have one (drafters for Qwen2).
    taps: the one feature, the target's last hidden state behind its final norm.
    """

    o_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False

    path: Path
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    taps: tuple[int]
    fc_bias: bool = True
    qkv_bias: bool = False

    def to_json(self) -> dict[str, Any]:
        """config.json in the published layout, which knows no scaled angles here."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            TRAINED: self.rope.trained,
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": False,
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
    heads, kv_heads, head_dim = head_shape(fields)
    trained = fields.integer(TRAINED, fields.integer("max_sequence_length", 2048))
    config = EagleConfig(
        path=fields.path,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_config(fields, trained, head_dim),
        taps=(target.num_layers,),
        fc_bias=fields.flag("bias", True),
        qkv_bias=fields.flag("qkv_bias"),
    )
    check_target(config.path, config.vocab_size, config.hidden_size, target)
    return config


def check_layer(fields: Fields, layer: Fields, name: str) -> None:
    """Raise ModelError for a layer that no drafter of the family is built from here."""
    layers, act = layer.integer("num_hidden_layers", 1), layer.get("hidden_act")
    if layers != 1:
        raise ModelError(fields.path, f"{name} drafters have 1 layer here, this one has {layers}")
    if act not in (None, "silu"):
        raise ModelError(fields.path, f"`hidden_act` {act!r} is not supported")
    if fields.get("quantization_config"):
        raise ModelError(fields.path, "quantised checkpoints are not supported")


def check_target(path: Path, vocab: int, features: int, target: DecoderConfig) -> None:
    """A drafter of another target would load and draft nonsense: compare what can be compared."""
    pairs = (
        ("a vocabulary of", vocab, target.vocab_size),
        ("target features of width", features, target.hidden_size),
    )
    for what, mine, theirs in pairs:
        if mine != theirs:
            raise ModelError(
                path, f"drafts for another target: {what} {mine}, and {target.path} has {theirs}"
            )
