"""OLMo-2: Llama with norms after attention and MLP instead of before them, and norms of queries and
keys over all heads together."""

from collections.abc import Mapping
from typing import Any, ClassVar

from . import ATTENTION, Family


class Olmo2(Family):
    name = "olmo2"
    max_positions = 2048
    norms = "after"
    qk_norm = True
    joint_qk_norm = True
    qkv_bias = ATTENTION
    o_bias = ATTENTION
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
