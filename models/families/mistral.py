"""Mistral: Llama without biases, all layers with one sliding window."""

from ..files import Fields
from . import Family, Values, window_size


class Mistral(Family):
    name = "mistral"
    max_positions = 131072
    gguf_pairs = True  # under Llama's name, as `load/convert.py` knows

    @staticmethod
    def gguf_keys(fields: Fields, rope: Values) -> Values:
        return {"sliding_window": fields.get("attention.sliding_window")}

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        window = window_size(fields)
        return window, (window > 0,) * layers
