"""Qwen3: Qwen2 with norms of queries and keys instead of biases, and wider heads."""

from . import ATTENTION, Family


class Qwen3(Family):
    name = "qwen3"
    max_positions = 32768
    head_dim = 128
    qk_norm = True
    qkv_bias = ATTENTION
    o_bias = ATTENTION
    window_switch = "use_sliding_window"
    gguf = "qwen3"
