"""Mistral: Llama without biases, all layers with one sliding window."""

from ..config import window_size
from ..files import Fields
from . import Family


class Mistral(Family):
    name = "mistral"
    architecture = "MistralForCausalLM"
    max_positions = 131072

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        window = window_size(fields)
        return window, (window > 0,) * layers
