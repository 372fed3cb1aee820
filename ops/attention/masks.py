"""Visibility: who may attend to whom, computed from the slot table alone.

A committed slot is visible to a query row if it belongs to the same owner or to the owner's
prefix, and does not lie behind the row. Fresh slots (written by the same forward or by earlier
levels of the same tree) are visible by an explicit relation instead.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kv.pool import KVCache, SlotTable
from ..registry import op
from ..types import Rows, Visibility


def committed_visible(
    owner_BQ: Tensor, prefix_BQ: Tensor, position_BQ: Tensor, table: SlotTable
) -> Tensor:
    """bool [B, Q, K]: the committed history that each query row may see."""
    owner_BQ1, prefix_BQ1 = owner_BQ[:, :, None], prefix_BQ[:, :, None]
    owner_B1K, position_B1K = table.owner_BK[:, None], table.position_BK[:, None]
    related_BQK = (owner_B1K == owner_BQ1) | (owner_B1K == prefix_BQ1)
    return related_BQK & table.committed_BK[:, None] & (position_B1K <= position_BQ[:, :, None])


def chain_visible(owner_BQ: Tensor, prefix_BQ: Tensor, position_BQ: Tensor) -> Tensor:
    """bool [B, Q, Q]: among rows of one forward, own and prefix rows that do not lie behind."""
    owner_B1Q = owner_BQ[:, None]
    related_BQQ = (owner_B1Q == owner_BQ[:, :, None]) | (owner_B1Q == prefix_BQ[:, :, None])
    return related_BQQ & (position_BQ[:, None] <= position_BQ[:, :, None])


def fresh_visible(rows: Rows) -> Tensor:
    """bool [B, Q, Q]: who sees whom among the rows of one forward; trees by their ancestors."""
    fresh_BQQ = chain_visible(rows.owner_BQ, rows.prefix_BQ, rows.positions_BQ)
    if rows.forest is not None:
        trees = slice(len(rows.forest.tree_R))
        fresh_BQQ[0, trees, trees] = rows.forest.visible(rows.ancestors_STT)
        return fresh_BQQ
    queries = rows.tokens_BQ.shape[1]
    row_S11 = (rows.nodes_ST[:, :1] // queries)[:, :, None]
    query_ST = rows.nodes_ST % queries
    fresh_BQQ[row_S11, query_ST[:, :, None], query_ST[:, None]] = rows.ancestors_STT
    return fresh_BQQ


@op("mask.build", writes="visible")
def build(rows: Rows, kv: KVCache) -> Visibility:
    """Visibility of one forward: own history, the prefix, and the tree or chain rule."""
    height, extent = rows.tokens_BQ.shape[0], kv.extent
    table = kv.table(extent, rows.first_row, height)
    known_BQK = committed_visible(rows.owner_BQ, rows.prefix_BQ, rows.positions_BQ, table)
    row_B1 = torch.arange(height, device=known_BQK.device)[:, None] + rows.first_row
    place_BQ = (rows.slots_BQ - row_B1 * kv.capacity).clamp(max=extent)  # padding: behind the end
    mask_BQX = F.pad(known_BQK, (0, 1))
    place_BQQ = place_BQ[:, None].expand(-1, place_BQ.shape[1], -1)
    mask_BQX.scatter_(2, place_BQQ, fresh_visible(rows))
    position_BX = F.pad(table.position_BK, (0, 1)).scatter_(1, place_BQ, rows.positions_BQ)
    return Visibility(mask_BQX[:, :, :extent], position_BX[:, :extent], rows.first_row)
