"""Qwen2: biases of queries, keys and values; sliding windows by a switch, for some layers."""

from . import Family


class Qwen2(Family):
    name = "qwen2"
    max_positions = 32768
    qkv_bias = True
    window_switch = "use_sliding_window"
    gguf = "qwen2"
