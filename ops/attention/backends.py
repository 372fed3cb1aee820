"""Attention over a KV pool: backends behind one signature.

Grouped-query attention folds the query groups into the query axis, so that keys and values stay
views of the pool: [B, kv_heads, G * Q, d] against [B, kv_heads, K, d].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(queries_BQhd, keys_BgKd, values_BgKd, bias_B1QK) -> [B, Q, h, d], with bias from `to_bias`."""


def to_bias(mask_BQK: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """bool visibility -> additive [B, 1, groups * Q, K] for `dense`.

    What is hidden gets the dtype's finite minimum, so that a row without any visible slot
    (padding) yields a finite value nobody reads instead of NaN.
    """
    bias = torch.zeros(mask_BQK.shape, dtype=dtype, device=mask_BQK.device)
    bias.masked_fill_(~mask_BQK, torch.finfo(dtype).min)
    rows, queries, keys = bias.shape
    return bias[:, None].expand(rows, groups, queries, keys).reshape(rows, 1, -1, keys)


def window_mask(
    mask_BQK: Tensor, positions_BQ: Tensor, key_positions_BK: Tensor, window: int
) -> Tensor:
    """Hide keys that lie `window` or more true positions back."""
    distance = positions_BQ[:, :, None] - key_positions_BK[:, None, :]
    return mask_BQK & (distance < window)


def group_queries(queries_BQhd: Tensor, kv_heads: int) -> Tensor:
    """[B, Q, heads, d] -> [B, kv_heads, groups * Q, d]."""
    rows, queries, heads, dim = queries_BQhd.shape
    if queries == 1:
        return queries_BQhd.view(rows, kv_heads, -1, dim)
    grouped = queries_BQhd.view(rows, queries, kv_heads, heads // kv_heads, dim)
    return grouped.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)


def ungroup_queries(out_BgQd: Tensor, queries: int) -> Tensor:
    """[B, kv_heads, groups * Q, d] -> [B, Q, heads, d]."""
    rows, kv_heads, _, dim = out_BgQd.shape
    if queries == 1:
        return out_BgQd.reshape(rows, 1, -1, dim)
    grouped = out_BgQd.view(rows, kv_heads, -1, queries, dim)
    return grouped.permute(0, 3, 1, 2, 4).reshape(rows, queries, -1, dim)


def dense(
    queries_BQhd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, bias_B1QK: Tensor
) -> Tensor:
    """Masked scaled-dot-product attention of torch: the reference."""
    folded = group_queries(queries_BQhd, keys_BgKd.shape[1])
    out = F.scaled_dot_product_attention(folded, keys_BgKd, values_BgKd, attn_mask=bias_B1QK)
    return ungroup_queries(out, queries_BQhd.shape[1])


def with_sums(
    queries_BQhd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, bias_B1QK: Tensor
) -> tuple[Tensor, Tensor]:
    """The same as `dense`, and the log-sum-exp of each query's scores, [B, Q, heads], in float32
    at least. Where a query sees nothing, that is about the dtype's finite minimum."""
    folded = group_queries(queries_BQhd, keys_BgKd.shape[1])
    count = queries_BQhd.shape[1]
    if folded.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = flash(folded, keys_BgKd, values_BgKd, attn_mask=bias_B1QK)
    else:
        scores = folded @ keys_BgKd.transpose(-1, -2) / folded.shape[-1] ** 0.5 + bias_B1QK
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        sums = wide.logsumexp(-1)
        out = (wide - sums[..., None]).exp().to(folded.dtype) @ values_BgKd
    return ungroup_queries(out, count), ungroup_queries(sums[..., None], count)[..., 0]
