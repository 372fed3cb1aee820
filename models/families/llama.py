"""Llama, and what is published in its format."""

from ..files import Fields
from . import Biases, Family


class Llama(Family):
    """All projections may have biases, by two switches."""

    name = "llama"
    architecture = "LlamaForCausalLM"
    max_positions = 2048

    def biases(self, fields: Fields) -> Biases:
        attention = fields.flag("attention_bias")
        return Biases(attention, attention, fields.flag("mlp_bias"))
