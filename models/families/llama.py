"""Llama, and what is published in its format: all projections may have biases, by two switches."""

from . import ATTENTION, Family


class Llama(Family):
    name = "llama"
    max_positions = 2048
    qkv_bias = ATTENTION
    o_bias = ATTENTION
    mlp_bias = "mlp_bias"
    gguf = "llama"
    gguf_pairs = True
