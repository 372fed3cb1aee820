"""OLMo-2: Llama with norms after attention and MLP instead of before them, and norms of queries and
keys over all heads together."""

from typing import ClassVar

from ..files import Fields
from . import ATTENTION, Family, Values


class Olmo2(Family):
    name = "olmo2"
    max_positions = 2048
    qk_norm = True
    qkv_bias = ATTENTION
    o_bias = ATTENTION
    gguf = "olmo2"
    defaults: ClassVar[Values] = {"rms_norm_eps": 1e-5}

    def own(self, fields: Fields, shape: Values, sliding: tuple[bool, ...]) -> Values:
        return {"norms": "after", "joint_qk_norm": True}
