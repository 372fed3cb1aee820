"""A seeded random drafter of EAGLE-1 and EAGLE-2 for a target of `tiny.write_tiny_target`.

It adds a share of the target's feature to the new token's embedding and asks the target's own
head, and so agrees with the target as often as the context does not matter.
"""

from pathlib import Path

import torch

from helpers.tiny_models.tiny import attend_to_itself_, save, write_json
from specsot.models.config import DecoderConfig, RopeConfig
from specsot.models.drafters.config import EagleConfig
from specsot.models.drafters.eagle import EMBEDDING, Eagle
from specsot.models.layers import DrafterLayer
from specsot.models.load.weights import load_target


def write_tiny_eagle(
    folder: Path,
    target_folder: Path,
    seed: int = 0,
    *,
    fc_bias: bool = True,
    qkv_bias: bool = False,
    feature: float = 0.2,
    noise: float = 0.05,
) -> Path:
    """Write config.json and model.safetensors (float32), the same for the same arguments.

    Args:
        feature: weight of the target's last hidden state beside the new token's embedding.
        noise: what is added to all weights; more of it lowers acceptance.
    """
    target = load_target(target_folder)
    drafter = Eagle(_config(folder, target.config, fc_bias, qkv_bias))
    drafter.owned = frozenset({EMBEDDING})  # published files hold a copy of the target's
    draw, hidden = torch.Generator().manual_seed(seed), target.hidden_size
    (layer,) = drafter.layers
    assert isinstance(layer, DrafterLayer)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * noise)
        drafter.embed_tokens.weight.copy_(target.embed)
        drafter.fc.weight[:, :hidden] += torch.eye(hidden)
        drafter.fc.weight[:, hidden:] += feature * torch.eye(hidden)
        layer.post_attention_layernorm.weight.add_(1.0)
        attend_to_itself_(layer.self_attn, hidden, draw)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", drafter.config.to_json())
    save(folder, drafter.published())
    return folder


def _config(folder: Path, target: DecoderConfig, fc_bias: bool, qkv_bias: bool) -> EagleConfig:
    hidden = target.hidden_size
    return EagleConfig(
        path=folder / "config.json",
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden,
        heads=hidden // 16,
        kv_heads=hidden // 16,
        head_dim=16,
        eps=target.eps,
        rope=RopeConfig("default", 10000.0, {}, target.rope.trained),
        taps=(target.num_layers,),
        fc_bias=fc_bias,
        qkv_bias=qkv_bias,
    )
