"""Tiny random models of transformers, and GGUF files of them as llama.cpp writes them."""

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
    rope = {"rope_type": "default", "rope_theta": 50000.0} | more.pop("rope", {})
    config = AutoConfig.for_model(
        family, vocab_size=len(TOKENS), **sizes, **heads | more, rope_parameters=rope
    )
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    return model


def write_gguf(file: Path, model: Any, kind: Kind = Kind.F32, arch: str | None = None) -> Path:
    config, family = model.config, model.config.model_type
    arch = arch or ("llama" if family == "mistral" else family)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_name("Tiny Mistral" if family == "mistral" else "Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 3) + [3] * 3)
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(len(TOKENS) - 2)
    writer.add_eos_token_id(len(TOKENS) - 1)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), 3)
    tied = config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.rpartition(".")
        values = value.numpy()
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = values.shape[0] // 16
            halves = values.reshape(heads, 2, 8, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        stored = kind if values.ndim == 2 else Kind.F32
        data = gguf.quantize(values, stored)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", data, raw_dtype=stored)
    if config.rope_parameters["rope_type"] == "llama3":
        inverse = model.model.rotary_emb.inv_freq.numpy()
        plain = 50000.0 ** -(np.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / inverse).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
