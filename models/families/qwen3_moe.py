"""Qwen3-MoE: Qwen3 with experts in place of the MLP; all layers may have one sliding window."""

from typing import ClassVar

from ..config import ExpertsConfig
from ..files import Fields
from . import ATTENTION, Family, Values, window_size


class Qwen3Moe(Family):
    name = "qwen3_moe"
    max_positions = 32768
    qk_norm = True
    qkv_bias = ATTENTION
    o_bias = ATTENTION
    gguf = "qwen3moe"
    renamed: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    defaults: ClassVar[Values] = {"num_key_value_heads": 4}

    @staticmethod
    def gguf_keys(fields: Fields, rope: Values) -> Values:
        return {
            "num_experts": fields.get("expert_count"),
            "num_experts_per_tok": fields.get("expert_used_count"),
            "moe_intermediate_size": fields.get("expert_feed_forward_length"),
            "norm_topk_prob": True,  # as llama.cpp computes all of them
        }

    def windows(self, fields: Fields, layers: int) -> tuple[int, tuple[bool, ...]]:
        window = window_size(fields) if fields.flag("use_sliding_window") else 0
        return window, (window > 0,) * layers

    def own(self, fields: Fields, shape: Values, sliding: tuple[bool, ...]) -> Values:
        if fields.get("mlp_only_layers") or fields.integer("decoder_sparse_step", 1) != 1:
            raise fields.wrong("layers without experts (`mlp_only_layers`, `decoder_sparse_step`)")
        experts = ExpertsConfig(
            count=fields.integer("num_experts", 128),
            per_token=fields.integer("num_experts_per_tok", 8),
            normalised=fields.flag("norm_topk_prob"),
        )
        if experts.per_token > experts.count:
            raise fields.wrong(f"{experts.per_token} experts for a token, of {experts.count}")
        size = fields.integer("moe_intermediate_size", 768)
        return {"experts": experts, "intermediate_size": size}
