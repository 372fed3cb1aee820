"""Token trees: ancestors, and the choice of the best nodes among all candidates."""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .types import Proposal


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
    own_TT = torch.eye(nodes, dtype=torch.bool, device=parents_SN.device)
    seen_STT = own_TT.expand(trees, -1, -1).clone(memory_format=torch.contiguous_format)
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

    @classmethod
    def joined(cls, parts: Iterable["Candidates"]) -> "Candidates":
        """All nodes of some levels, one level after another."""
        tokens, parents, depths, scores = zip(*parts, strict=True)
        return cls(
            tokens_SC=torch.cat(tokens, dim=1),
            parents_SC=torch.cat(parents, dim=1),
            depths_SC=torch.cat(depths, dim=1),
            scores_SC=torch.cat(scores, dim=1),
        )

    def pick(self, pick_SN: Tensor) -> "Candidates":
        """These nodes, in this order. The parent of a node without its parent is undefined."""
        place_N = torch.arange(pick_SN.shape[1], device=pick_SN.device)
        place_SC = torch.zeros_like(self.tokens_SC).scatter(1, pick_SN, place_N.expand_as(pick_SN))
        parents_SN = self.parents_SC.gather(1, pick_SN)
        return Candidates(
            self.tokens_SC.gather(1, pick_SN),
            place_SC.gather(1, parents_SN.clamp(min=0)).where(parents_SN >= 0, -1),
            self.depths_SC.gather(1, pick_SN),
            self.scores_SC.gather(1, pick_SN),
        )

    def proposal(self, levels: int) -> Proposal:
        """Trees of all these nodes, none of them padding."""
        return Proposal(
            self.tokens_SC,
            self.parents_SC,
            self.depths_SC,
            torch.ones_like(self.tokens_SC, dtype=torch.bool),
            self.scores_SC,
            levels,
        )


def rerank(candidates: Candidates, nodes: int, ranked: bool = False) -> Candidates:
    """The `nodes` best candidates over all levels, still in creation order, or the best first.

    The sort is stable and the scores are float32: a child never scores above its parent, and among
    equals the parent comes first, so the kept set is always connected (EAGLE-2 relies on an
    unstable top-k here and can keep a child without its parent).
    """
    order_SC = candidates.scores_SC.sort(dim=1, descending=True, stable=True).indices
    best_SN = order_SC[:, :nodes]
    return candidates.pick(best_SN if ranked else best_SN.sort(dim=1).values)


def single_path(tokens_SN: Tensor, log_probs_SN: Tensor) -> Proposal:
    """One path per branch: int64 tokens, each with its float32 log-probability."""
    level_SN = torch.arange(tokens_SN.shape[1], device=tokens_SN.device).expand_as(tokens_SN)
    nodes = Candidates(tokens_SN, level_SN - 1, level_SN + 1, log_probs_SN.cumsum(1))
    return replace(nodes.proposal(tokens_SN.shape[1]), is_chain=True)
