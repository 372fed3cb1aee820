"""Token trees: ancestors, and the choice of the best nodes among all candidates."""

from typing import NamedTuple

import torch
from torch import Tensor


def ancestors(parents_SN: Tensor, levels: int) -> Tensor:
    """bool [S, T, T]: which nodes (columns) are ancestors-or-self of which (rows).

    Args:
        parents_SN: int64, -1 for children of the root; node n of the tree is column n + 1.
        levels: upper bound of the trees' depth.
    """
    trees, drafted = parents_SN.shape
    nodes = drafted + 1
    root_S1 = parents_SN.new_zeros(trees, 1)
    parent_ST = torch.cat([root_S1, parents_SN + 1], dim=1)
    seen_STT = torch.eye(nodes, dtype=torch.bool, device=parents_SN.device).repeat(trees, 1, 1)
    above_ST = parent_ST
    for _ in range(levels):
        seen_STT.scatter_(2, above_ST[:, :, None], True)
        above_ST = parent_ST.gather(1, above_ST)
    return seen_STT


class Candidates(NamedTuple):
    """All nodes a drafter created, in creation order (a parent before its children).

    tokens_SC int64; parents_SC int64 creation index of the parent, -1 for the root;
    depths_SC int64; scores_SC float32 cumulative log-probability.
    """

    tokens_SC: Tensor
    parents_SC: Tensor
    depths_SC: Tensor
    scores_SC: Tensor


def rerank(candidates: Candidates, nodes: int) -> Candidates:
    """The `nodes` best candidates over all levels, still in creation order.

    The sort is stable and the scores are float32: a child never scores above its parent, and
    among equals the parent comes first, so the kept set is always connected (EAGLE-2 relies on
    an unstable top-k here and can keep a child without its parent).
    """
    order_SC = candidates.scores_SC.sort(dim=1, descending=True, stable=True).indices
    kept_SN = order_SC[:, :nodes].sort(dim=1).values
    parents_SN = candidates.parents_SC.gather(1, kept_SN)
    index_SN = torch.searchsorted(kept_SN, parents_SN.clamp(min=0))
    return Candidates(
        candidates.tokens_SC.gather(1, kept_SN),
        torch.where(parents_SN < 0, parents_SN, index_SN),
        candidates.depths_SC.gather(1, kept_SN),
        candidates.scores_SC.gather(1, kept_SN),
    )
