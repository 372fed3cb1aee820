"""Attention with its scores written out, which the backends are held to."""

import torch
from torch import Tensor

from specsot.ops.attention.backends import group_queries, ungroup_queries


def plain(
    queries_BQhd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, bias_B1QK: Tensor
) -> Tensor:
    """Two matrix products and a softmax."""
    grouped = group_queries(queries_BQhd, keys_BgKd.shape[1]) * keys_BgKd.shape[-1] ** -0.5
    scores = torch.softmax(grouped @ keys_BgKd.transpose(-1, -2) + bias_B1QK, -1)
    return ungroup_queries(scores @ values_BgKd, queries_BQhd.shape[1])
