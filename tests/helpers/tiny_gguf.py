"""Tiny random models of transformers, and GGUF files of them as llama.cpp writes them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = [*sorted(ByteLevel.alphabet()), "th", "he", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tiny(family: str, **more: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope: Any = {"rope_type": "default", "rope_theta": 50000.0} | more.pop("rope", {})
    if family == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": 200.0}
        rope = {"full_attention": rope, "sliding_attention": local}
    shape = {"pad_token_id": None} | sizes | heads | more
    config = AutoConfig.for_model(family, vocab_size=len(TOKENS), **shape, rope_parameters=rope)
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model


ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters, experts as llama.cpp has them: all of a layer in one tensor of a kind."""
    for name, value in model.state_dict().items():
        values = value.numpy()
        if name.endswith(".experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(values, 2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        else:
            yield f"{name}.weight" if name.endswith(".experts.down_proj") else name, values


def write_gguf(file: Path, model: Any, kind: Kind = Kind.F32, arch: str | None = None) -> Path:
    config, family = model.config, model.config.model_type
    arch = arch or ARCHITECTURES.get(family, family)
    rope = config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_name("Tiny Mistral" if family == "mistral" else "Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family in ("gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if local:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if family == "qwen3_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "phi3":
        writer.add_rope_dimension_count(int(16 * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        trained, short = config.max_position_embeddings, config.original_max_position_embeddings
        scale = math.sqrt(1 + math.log(trained / short) / math.log(short))
        writer.add_rope_scaling_attn_factors(scale)
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 3) + [3] * 3)
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(len(TOKENS) - 2)
    writer.add_eos_token_id(len(TOKENS) - 1)
    layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), layers)
    tied = config.tie_word_embeddings
    for name, values in _parts(model):
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values + 1.0
        if arch in ("llama", "smollm3") and stem.endswith(("q_proj", "k_proj")):
            heads = values.shape[0] // 16
            halves = values.reshape(heads, 2, 8, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        stored = kind if values.ndim > 1 else Kind.F32
        data = gguf.quantize(values, stored)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=stored)
    if rope["rope_type"] == "llama3":
        inverse = model.model.rotary_emb.inv_freq.numpy()
        plain = 50000.0 ** -(np.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / inverse).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
