"""Attention with its scores written out, and batches and layers by hand."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specsot.ops.attention.backends import AttentionBackend, AttentionPlan, backend
from specsot.ops.attention.metadata import (
    AttentionBatch,
    AttentionMetadata,
    QuerySequence,
    TreeMask,
    Visibility,
)
from specsot.ops.kv.pool import KVCache


def plain(folded_BgQd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, attn_mask: Tensor) -> Tensor:
    """Two matrix products and a softmax."""
    scaled_BgQd = folded_BgQd * keys_BgKd.shape[-1] ** -0.5
    return torch.softmax(scaled_BgQd @ keys_BgKd.transpose(-1, -2) + attn_mask, -1) @ values_BgKd


def metadata_of(
    kv: KVCache,
    sequences: Sequence[QuerySequence],
    visibility: Visibility | None = None,
    segment_N: Sequence[int] = (),
    *,
    equal_lengths: bool = False,
    isolated: bool = False,
) -> AttentionMetadata:
    """A forward whose rows all have a late position; with `isolated`, trees share their rows."""
    rows = 1 + max((int(one.rows[-1]) for one in sequences if len(one.rows)), default=-1)
    none_12 = np.zeros((1, 2), np.int32)
    tree = TreeMask(
        none_12,
        none_12,
        torch.ones(1, 2, 2, dtype=torch.bool),
        torch.zeros(1, 2, dtype=torch.int64),
        segment_R=torch.zeros(2, dtype=torch.int64),
    )
    if visibility is None:
        visibility = Visibility(np.zeros(0, np.int32), np.zeros((0, 1), np.int32), ())
    return AttentionMetadata(
        kv=kv,
        sequences=tuple(sequences),
        visibility=visibility,
        segment_N=np.array(segment_N or [0] * rows, np.int32),
        positions_N=torch.full((rows,), 1 << 20),
        readable=kv.committed,
        tree=tree if isolated else None,
        equal_lengths=equal_lengths,
    )


def batches(
    kv: KVCache,
    sequences: Sequence[QuerySequence],
    name: str,
    *,
    equal_lengths: bool = False,
    isolated: bool = False,
) -> list[AttentionBatch]:
    """Sequences as a backend puts them side by side."""
    metadata = metadata_of(kv, sequences, equal_lengths=equal_lengths, isolated=isolated)
    return backend(name).batches(metadata, sequences)


class PlainBackend(AttentionBackend):
    """Groups as another backend plans them, attended to by `plain`."""

    attend = staticmethod(plain)


def attended(plan: AttentionPlan, q_Nhd: Tensor, kv: KVCache) -> Tensor:
    """The output of the first layer for these queries -> [N, heads * d]; plain where it can be."""
    positions_N = torch.zeros(len(q_Nhd), dtype=torch.int64)
    heads = q_Nhd.shape[1]
    layer = plan.for_layers(positions_N, heads // kv.data.shape[2], q_Nhd.dtype)
    runner = layer.backend if plan.merged else PlainBackend()
    return runner.run(q_Nhd, *kv.layers[0], layer)


def attend(
    runner: AttentionBackend, q_BQhd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, mask: Tensor
) -> Tensor:
    """[B, Q, heads, d], a backend's attention to these keys and values, sequence by sequence."""
    rows, kv_heads, length, dim = keys_BgKd.shape
    pools = [part.transpose(0, 1).reshape(kv_heads, -1, dim) for part in (keys_BgKd, values_BgKd)]
    plan = AttentionPlan.dense(mask, torch.zeros(1, length), stride=length)
    positions_N = torch.zeros(rows * q_BQhd.shape[1], dtype=torch.int64)
    layer = plan.for_layers(positions_N, q_BQhd.shape[2] // kv_heads, q_BQhd.dtype)
    return runner.run(q_BQhd.flatten(0, 1), *pools, layer).view(q_BQhd.shape)
