"""Drafting with EAGLE-1: every branch's tree has the same shape in every round.

The shape says which children of which nodes are drafted, by their rank; only nodes with children
go through the drafter. Further shape letters: W nodes of a level, E those of them with children,
M all nodes with children so far, C children that are looked at.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .eagle import Frontier, top_children
from .eagle import expand_root_ as take_in
from .kv import KVCache
from .registry import op
from .static_tree import Level, StaticTree, lay_out
from .types import DraftRows, HiddenDrafter, Proposal
from .workspace import Workspace


@op("draft.expand_root_", drafters="eagle1", writes="frontier", drops="draft_rows")
def expand_root_(
    drafter: HiddenDrafter,
    draft_rows: DraftRows,
    kv_draft: KVCache,
    *,
    tree: Sequence[Sequence[int]],
) -> Frontier:
    """Take in what was committed, and look at as many first tokens as the tree has use for."""
    breadth = _laid_out(tree).levels[0].breadth
    return take_in(drafter, draft_rows, kv_draft, top_k=breadth)


@op("draft.grow_tree_", drafters="eagle1", writes="proposal", drops="frontier")
def grow_tree_(
    drafter: HiddenDrafter,
    frontier: Frontier,
    kv_draft: KVCache,
    *,
    tree: Sequence[Sequence[int]],
) -> Proposal:
    """Draft the tree of all branches level by level; each node takes the token of its rank."""
    plan = _laid_out(tree)
    growth = _Growth(drafter, frontier, kv_draft, plan)
    found = [growth.deepen_(level) for level in plan.levels]
    growth.work.close_()
    tokens_SN = torch.cat([one.tokens_SW for one in found], dim=1)
    shape = torch.tensor([plan.parents, plan.depths], device=tokens_SN.device)
    parents_SN, depths_SN = shape[:, None].expand(-1, len(tokens_SN), -1)
    return Proposal(
        tokens_SN,
        parents_SN,
        depths_SN,
        torch.ones_like(tokens_SN, dtype=torch.bool),
        torch.cat([one.scores_SW for one in found], dim=1),
        len(plan.levels),
    )


def _laid_out(tree: Sequence[Sequence[int]]) -> StaticTree:
    return lay_out(tuple(tuple(node) for node in tree))


class _Nodes(NamedTuple):
    """The drafted nodes of one level: int64 target ids, float32 cumulative log-probabilities."""

    tokens_SW: Tensor
    scores_SW: Tensor


class _Growth:
    """The state of one grow_tree: what the nodes of the last level may have as children."""

    def __init__(
        self, drafter: HiddenDrafter, frontier: Frontier, kv: KVCache, plan: StaticTree
    ) -> None:
        self.drafter, self.kv, self.plan = drafter, kv, plan
        self.device = frontier.tokens_SK.device
        self.tokens_SEC = frontier.tokens_SK[:, None]
        self.scores_SEC = frontier.scores_SK[:, None]
        self.hidden_SEH = frontier.hidden_SKH[:, :1]
        self.position_S1 = frontier.draft_rows.position_S[:, None]
        self.work = Workspace(kv, frontier.draft_rows, plan.inner)

    def deepen_(self, level: Level) -> _Nodes:
        """Take the level's nodes from the children at hand, then forward those that have some."""
        above_W, ranks_W = torch.tensor((level.above, level.ranks), device=self.device)
        nodes = _Nodes(self.tokens_SEC[:, above_W, ranks_W], self.scores_SEC[:, above_W, ranks_W])
        if level.inner:
            inner_E = torch.tensor(level.inner, device=self.device)
            hidden_SEH = self.hidden_SEH[:, above_W[inner_E]]
            self.hidden_SEH = self._forward(level, nodes.tokens_SW[:, inner_E], hidden_SEH)
            self._look_(nodes.scores_SW[:, inner_E], self.plan.levels[level.depth].breadth)
        return nodes

    def _forward(self, level: Level, tokens_SE: Tensor, hidden_SEH: Tensor) -> Tensor:
        """hidden_SEH of a level's inner nodes, of all branches in one forward."""
        width, frame = len(level.inner), self.work.frame
        depth_M = torch.tensor(level.inner_depths, device=self.device)
        seen_EM = torch.tensor(level.seen, device=self.device)
        position_SM = self.position_S1 + depth_M - 1
        out_BQH = self.drafter.forward(
            frame.spread(tokens_SE),
            frame.spread(hidden_SEH),
            frame.spread(position_SM[:, -width:]),
            self.work.slots_BQ(len(depth_M) - width, width),
            self.work.visible(seen_EM.expand(len(tokens_SE), -1, -1), position_SM),
            self.kv,
        )
        return frame.collect(out_BQH)

    def _look_(self, scores_SE: Tensor, breadth: int) -> None:
        """The best children of the nodes that were forwarded, and how probable their paths are."""
        scores_RC, ids_RC = top_children(self.drafter, self.hidden_SEH.flatten(0, 1), breadth)
        shape = (*scores_SE.shape, -1)
        self.tokens_SEC = self.drafter.to_target(ids_RC).view(shape)
        self.scores_SEC = scores_RC.view(shape) + scores_SE[:, :, None]
