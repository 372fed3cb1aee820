"""MiMo: Qwen2 with an MTP layer (`models/drafters/mtp.py`)."""

from . import Family


class MiMo(Family):
    name = "mimo"
    max_positions = 32768
    qkv_bias = True
    window_switch = "use_sliding_window"
    own_code = True
    like = "qwen2"
