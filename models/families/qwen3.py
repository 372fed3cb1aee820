"""Qwen3: Qwen2 with norms of queries and keys instead of biases, and wider heads."""

from ..files import Fields
from . import Biases, Family
from .qwen2 import qwen_windows


class Qwen3(Family):
    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    max_positions = 32768
    head_dim = 128
    qk_norm = True

    def biases(self, fields: Fields) -> Biases:
        attention = fields.flag("attention_bias")
        return Biases(attention, attention)

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        return qwen_windows(fields, layers)
