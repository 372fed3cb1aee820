"""SmolLM3: Llama with some layers without RoPE, by default every fourth; they may have a window."""

from dataclasses import replace
from typing import ClassVar

from ..files import Fields
from . import ATTENTION, Family, Values


class SmolLM3(Family):
    name = "smollm3"
    max_positions = 32768
    theta = 2e6
    qkv_bias = ATTENTION
    o_bias = ATTENTION
    mlp_bias = "mlp_bias"
    window_switch = "use_sliding_window"
    gguf = "smollm3"
    gguf_pairs = True
    defaults: ClassVar[Values] = {
        "num_key_value_heads": 4,
        "sliding_window": None,
        "tie_word_embeddings": True,
    }

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        if fields.get("layer_types") is not None:
            return super().windows(fields, layers)
        types = [
            "full_attention" if rotates else "sliding_attention"
            for rotates in with_rope(fields, layers)
        ]
        return super().windows(Fields(fields.path, {**fields.values, "layer_types": types}), layers)

    def own(self, fields: Fields, shape: Values, sliding: tuple[bool, ...]) -> Values:
        none = replace(shape["rope"], kind="none", settings={})
        numbers = tuple(0 if rotates else 1 for rotates in with_rope(fields, len(sliding)))
        return {"ropes": (none,), "layer_ropes": numbers}


def with_rope(fields: Fields, layers: int) -> list[bool]:
    """For each layer whether it has RoPE: `no_rope_layers`, which has a 0 where it has none."""
    given = fields.get("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(given, list) or len(given) < layers or not all(n in (0, 1) for n in given):
        raise fields.wrong(f"`no_rope_layers` must hold 0 or 1 for each of {layers} layers")
    return [bool(n) for n in given[:layers]]
