"""Qwen2: biases of queries, keys and values; sliding windows by a switch, for some layers."""

from ..config import layer_types, window_size
from ..files import Fields
from . import Biases, Family


class Qwen2(Family):
    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    max_positions = 32768

    def biases(self, fields: Fields) -> Biases:
        return Biases(qkv=True)

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        return qwen_windows(fields, layers)


def qwen_windows(fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
    """The window of some layers, if `use_sliding_window` is set; as transformers reads it."""
    window = window_size(fields) if fields.flag("use_sliding_window") else 0
    return window, layer_types(fields, layers) if window else (False,) * layers
