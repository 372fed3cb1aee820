"""Gemma 3: norms before and after attention and MLP, whose factors are 1 + weight; GELU; embeddings
times sqrt(hidden_size). Five of six layers have a sliding window and a RoPE of their own."""

from collections.abc import Mapping
from typing import ClassVar

from ..config import LAYER_TYPES, layer_types, rope_fields
from ..files import Fields
from . import ATTENTION, Family, Values, window_size

ROPES = "rope_parameters"
LOCAL = "local_rope_parameters"  # of sliding layers: our name for what the file has inside ROPES
LAYERS_27B = 62
UNSUPPORTED = ("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping")


class Gemma3Text(Family):
    name = "gemma3_text"
    max_positions = 131072
    theta = 1e6
    activation = "gelu_pytorch_tanh"
    qk_norm = True
    qkv_bias = ATTENTION
    o_bias = ATTENTION
    gguf = "gemma3"
    renamed: ClassVar[Mapping[str, str]] = {"hidden_activation": "hidden_act"}
    defaults: ClassVar[Values] = {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def gguf_keys(fields: Fields, rope: Values) -> Values:
        """By the rules of llama.cpp: the file has no pattern, and no scale of queries."""
        window = fields.get("attention.sliding_window") or None
        scale = fields.integer("attention.key_length", 256)
        if fields.integer("block_count") == LAYERS_27B:
            scale = fields.integer("embedding_length") // fields.integer("attention.head_count")
        theta = fields.number("rope.freq_base_swa", 1e4)
        local = {"rope_type": "default", "rope_theta": theta}
        return {
            "sliding_window": window,
            "sliding_window_pattern": 6 if window else 1,
            "query_pre_attn_scalar": scale,
            ROPES: {"full_attention": rope, "sliding_attention": local},
        }

    def llama_fields(self, fields: Fields) -> Fields:
        fields = super().llama_fields(fields)
        if found := next((key for key in UNSUPPORTED if fields.get(key)), None):
            raise fields.wrong(f"`{found}` is not supported")
        ropes = fields.section(ROPES)
        if not set(LAYER_TYPES) & set(ropes.values):
            return fields
        full, local = (ropes.section(f"{kind}_attention").values for kind in ("full", "sliding"))
        return Fields(fields.path, {**fields.values, ROPES: full, LOCAL: local})

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        if fields.get("layer_types") is not None:
            return window_size(fields), layer_types(fields, layers)
        pattern = fields.integer("sliding_window_pattern", 6)
        return window_size(fields), tuple((layer + 1) % pattern != 0 for layer in range(layers))

    def own(self, fields: Fields, shape: Values, sliding: tuple[bool, ...]) -> Values:
        rope = shape["rope"]
        head_dim = shape["head_dim"]
        theta = fields.number("rope_local_base_freq", 1e4)
        own = {"rope_theta": theta, **fields.section(LOCAL).values}
        values = {"max_position_embeddings": rope.trained, ROPES: own}
        local, _ = rope_fields(Fields(fields.path, values), rope.trained, head_dim, theta)
        return {
            "norms": "around",
            "centred_norms": True,
            "scaled_embedding": True,
            "query_scale": (head_dim / fields.number("query_pre_attn_scalar", 256)) ** 0.5,
            "ropes": (local,),
            "layer_ropes": tuple(map(int, sliding)),
        }
