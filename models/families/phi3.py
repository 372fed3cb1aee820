"""Phi-3 and Phi-4: Llama with queries, keys and values in one tensor, and gate and up in one; all
layers may have one sliding window, and RoPE may rotate a part of each head."""

from ..files import Fields
from . import Family, Values


class Phi3(Family):
    name = "phi3"
    max_positions = 4096
    partial = True
    gguf = "phi3"

    @staticmethod
    def gguf_keys(fields: Fields, rope: Values) -> Values:
        return {"sliding_window": fields.get("attention.sliding_window") or None}

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        given = fields.get("sliding_window") is not None
        return fields.integer("sliding_window") if given else 0, (given,) * layers

    def own(self, fields: Fields, shape: Values, sliding: tuple[bool, ...]) -> Values:
        return {"fused": True}
