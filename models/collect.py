"""K, V and features of one chunk on its own: what a chunk store keeps for CacheBlend."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.metadata import AttentionMetadata
from ..ops.blend import ChunkKV
from ..ops.kv.pool import KVCache
from .decoder import Decoder
from .layers import DecoderLayer


def collect(
    target: Decoder, token_ids: Sequence[int], bos: int | None = None, taps: tuple[int, ...] = ()
) -> ChunkKV:
    """A chunk, alone behind `bos`, through the target; touches no pool but one of its own.

    Where it will stand does not matter: keys are kept before RoPE, which is relative.

    Args:
        bos: the token in front, an attention sink whose row is not kept; None for models without
            one, and for a prompt's prefix, whose ids begin with it.
        taps: as in `Target.forward`.

    Raises:
        ValueError: the chunk is empty. ModelError: it is longer than the model's sequences.
    """
    if not token_ids:
        raise ValueError("a chunk needs at least one token, not 0")
    ids = [*token_ids] if bos is None else [bos, *token_ids]
    target.config.check_length(len(ids))
    drop = len(ids) - len(token_ids)
    device = target.embed.device
    # A pool of one layer serves all of them in turn.
    kv = KVCache(1, target.kv_heads, target.head_dim, len(ids), dtype=target.dtype, device=device)
    steps_Q = torch.arange(len(ids), device=device)
    visible = AttentionMetadata.causal(len(ids), device)
    inputs = target.attention_inputs(steps_Q, steps_Q, visible)
    x_QH = F.embedding(torch.tensor(ids, device=device), target.embed)
    keys = list[Tensor]()
    values = list[Tensor]()
    features = list[Tensor]()
    for index, layer in enumerate(target.layers):
        assert isinstance(layer, DecoderLayer)
        if index in taps:
            features.append(x_QH[drop:])
        qk_Qhd, v_Qgd = layer.project(x_QH)
        keys.append(qk_Qhd[drop:, layer.heads :])
        values.append(v_Qgd[drop:])
        seen_QI = layer.see(qk_Qhd, v_Qgd, 0, inputs[target.config.sliding[index]], kv)
        x_QH = layer.finish(x_QH, seen_QI)
    if target.num_layers in taps:
        features.append(target.norm(x_QH)[drop:])
    features_RF = torch.cat(features, -1) if features else None
    return ChunkKV(torch.stack(keys), torch.stack(values), features_RF)
