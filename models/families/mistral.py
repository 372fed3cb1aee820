"""Mistral: Llama without biases, all layers with one sliding window."""

from ..files import Fields
from . import Family, window_size


class Mistral(Family):
    name = "mistral"
    max_positions = 131072

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        window = window_size(fields)
        return window, (window > 0,) * layers
