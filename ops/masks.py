"""Visibility: who may attend to whom, computed from the slot table alone.

A committed slot is visible to a query row if it belongs to the same owner or to the owner's
prefix, and does not lie behind the row. Fresh slots (written by the same forward or by earlier
levels of the same tree) are visible by an explicit relation instead.
"""

import torch
from torch import Tensor

from .kv import KVCache, SlotTable
from .registry import op
from .types import Rows, Visibility


def committed_visible(
    owner_Q: Tensor, prefix_Q: Tensor, position_Q: Tensor, table: SlotTable
) -> Tensor:
    """bool [Q, K]: the committed history that each query row may see."""
    related_QK = (table.owner_K == owner_Q[:, None]) | (table.owner_K == prefix_Q[:, None])
    return related_QK & table.committed_K & (table.position_K <= position_Q[:, None])


def chain_visible(owner_Q: Tensor, prefix_Q: Tensor, position_Q: Tensor) -> Tensor:
    """bool [Q, Q]: among rows of one forward, own and prefix rows that do not lie behind."""
    related_QQ = (owner_Q == owner_Q[:, None]) | (owner_Q == prefix_Q[:, None])
    return related_QQ & (position_Q <= position_Q[:, None])


def block_diagonal(ancestors_STT: Tensor) -> Tensor:
    """bool [S * T, S * T]: each tree sees its own ancestors and no other tree."""
    trees, nodes, _ = ancestors_STT.shape
    blocks = ancestors_STT.new_zeros(trees, nodes, trees, nodes)
    tree_S = torch.arange(trees, device=ancestors_STT.device)
    blocks[tree_S, :, tree_S, :] = ancestors_STT
    return blocks.view(trees * nodes, trees * nodes)


def fresh_visible(rows: Rows) -> Tensor:
    """bool [Q, Q]: who sees whom among the rows of one forward (B = 1)."""
    owner_Q, prefix_Q = rows.owner_BQ.view(-1), rows.prefix_BQ.view(-1)
    fresh_QQ = chain_visible(owner_Q, prefix_Q, rows.positions_BQ.view(-1))
    count = rows.tree_rows
    fresh_QQ[:count, :count] = block_diagonal(rows.ancestors_STT)
    return fresh_QQ


@op("mask.build", layouts="bim", writes="visible")
def build(rows: Rows, kv: KVCache) -> Visibility:
    """BIM visibility of one forward: own history, the prefix, and the tree or chain rule."""
    table = kv.table(kv.extent)
    mask_QK = committed_visible(
        rows.owner_BQ.view(-1), rows.prefix_BQ.view(-1), rows.positions_BQ.view(-1), table
    )
    slots_Q = rows.slots_BQ.view(-1)
    mask_QK[:, slots_Q] = fresh_visible(rows)
    table.position_K[slots_Q] = rows.positions_BQ.view(-1)
    return Visibility(mask_QK[None], table.position_K[None])
