"""Small checkpoints of every family and RoPE that the decoder knows, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

LAYERS = 3
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "eos_token_id": 2,
}
UNEVEN = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 32,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases-head_dim": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "rms_norm_eps": 1e-3},
    ),
    "llama-one-kv-head-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-all-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-longrope": ("llama", {"rope_parameters": LONG}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "mistral-no-window": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-theta": (
        "qwen2",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
    ),
    "qwen2-window-from-layer-1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-layer_types": (
        "qwen3",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "phi3-window-tied": ("phi3", {"sliding_window": 5, "tie_word_embeddings": True}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-partial-longrope-tied": (
        "phi3",
        {
            "rope_parameters": LONG
            | {"short_factor": [1.0, 1.1, 1.7], "long_factor": [2.0, 3.0, 5.0]}
            | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-shares-window-tied": (
        "qwen3_moe",
        {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5}
        | {"tie_word_embeddings": True, "attention_bias": True, "num_experts_per_tok": 3},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biases-tied": (
        "olmo2",
        {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-interval-untied": (
        "smollm3",
        {"no_rope_layer_interval": 2, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "smollm3-window-llama3": (
        "smollm3",
        {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 5}
        | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "mlp_bias": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3-pattern-untied-linear": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3-window-over-all": ("gemma3_text", {"head_dim": 8, "sliding_window": 64}),
    "olmo2-yarn-all-kv-heads": ("olmo2", {"num_key_value_heads": 4, "rope_parameters": YARN}),
}


def save(folder: Path, family: str, options: dict[str, Any]) -> None:
    torch.manual_seed(len(str(options)))
    own = EXPERTS if family == "qwen3_moe" else {}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SHAPE | own | options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases would otherwise be ones and zeros
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
