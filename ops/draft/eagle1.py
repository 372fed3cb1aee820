"""Drafting with EAGLE-1: every branch's tree has the same shape in every round.

The shape says which children of which nodes are drafted, by their rank; only nodes with children
go through the drafter. Further shape letters: W nodes of a level, E those of them with children,
M all nodes with children so far, C children that are looked at.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forward import HiddenDrafter
from ..kv.pool import KVCache
from ..types import Proposal
from .drawing import Drawing
from .eagle import Frontier, Workspace, top_children
from .static_tree import Level, StaticTree


def grow_tree_(
    drafter: HiddenDrafter,
    frontier: Frontier,
    kv_draft: KVCache,
    *,
    plan: StaticTree,
    draws: str,
    accept: str = "match",
) -> Proposal:
    """Draft the tree of all branches level by level; each node takes the token of its rank."""
    drawing = Drawing.of(frontier.draft_rows, draws, accept)
    growth = _Growth(drafter, frontier, kv_draft, plan, drawing, draws)
    levels = [growth.deepen_(level) for level in plan.levels]
    growth.work.close_()
    tokens_SN, scores_SN = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    shape = torch.tensor([plan.parents, plan.depths], device=tokens_SN.device)
    parents_SN, depths_SN = shape[:, None].expand(-1, len(tokens_SN), -1)
    return Proposal(
        tokens_SN.clamp(min=0),
        parents_SN,
        depths_SN,
        _valid(tokens_SN, plan),
        scores_SN,
        len(plan.levels),
        draft_probs_STV=growth.draft_probs_STV(),
        work=frontier.draft_rows.work.plus(growth.work.spent),
    )


def _valid(tokens_SN: Tensor, plan: StaticTree) -> Tensor:
    """bool [S, N]: nodes that have a token, as have all above them; draws can run out of tokens."""
    there = list((tokens_SN >= 0).unbind(1))
    for node, parent in enumerate(plan.parents):
        there[node] = there[node] if parent < 0 else there[node] & there[parent]
    return torch.stack(there, 1)


class _Growth:
    """The state of one grow_tree: what the nodes of the last level may have as children.

    draft_probs: [S, E, V] of the forwarded nodes, level by level, if verification needs them.
    """

    def __init__(
        self,
        drafter: HiddenDrafter,
        frontier: Frontier,
        kv: KVCache,
        plan: StaticTree,
        drawing: Drawing | None,
        draws: str,
    ) -> None:
        self.drafter = drafter
        self.kv = kv
        self.plan = plan
        self.drawing = drawing
        self.draws = draws
        self.draft_probs: list[Tensor] = []
        self.device = frontier.tokens_SK.device
        self.tokens_SEC = frontier.tokens_SK[:, None]
        self.scores_SEC = frontier.scores_SK[:, None]
        self.hidden_SEH = frontier.hidden_SKH[:, :1]
        if drawing is not None:
            self._expand_(torch.zeros_like(self.scores_SEC[:, :, 0]), plan.levels[0])
        self.position_S1 = frontier.draft_rows.position_S[:, None]
        self.work = Workspace(kv, frontier.draft_rows, plan.inner)

    def deepen_(self, level: Level) -> tuple[Tensor, Tensor]:
        """Take the level's nodes from the children at hand, then forward those that have some.

        Returns:
            (int64 target ids, float32 cumulative log-probabilities) of the nodes, [S, W].
        """
        above_W, ranks_W = torch.tensor((level.above, level.ranks), device=self.device)
        tokens_SW = self.tokens_SEC[:, above_W, ranks_W]
        scores_SW = self.scores_SEC[:, above_W, ranks_W]
        if level.inner:
            inner_E = torch.tensor(level.inner, device=self.device)
            hidden_SEH = self.hidden_SEH[:, above_W[inner_E]]
            self.hidden_SEH = self._forward(level, tokens_SW[:, inner_E].clamp(min=0), hidden_SEH)
            self._expand_(scores_SW[:, inner_E], self.plan.levels[level.depth])
        return tokens_SW, scores_SW

    def _forward(self, level: Level, tokens_SE: Tensor, hidden_SEH: Tensor) -> Tensor:
        """hidden_SEH of a level's inner nodes, of all branches in one forward."""
        frame = self.work.frame
        depth_M = torch.tensor(level.inner_depths, device=self.device)
        seen_EM = torch.tensor(level.ancestors, device=self.device)
        position_SM = self.position_S1 + depth_M - 1
        out_BQH = self.drafter.forward(
            frame.spread(tokens_SE),
            frame.spread(hidden_SEH),
            *self.work.fresh(seen_EM.expand(len(tokens_SE), -1, -1), position_SM),
            self.kv,
        )
        return frame.collect(out_BQH)

    def _expand_(self, scores_SE: Tensor, below: Level) -> None:
        """The children of the nodes that were forwarded, and how probable their paths are."""
        tokens_RC, scores_RC = self._children_(below)
        shape = (*scores_SE.shape, -1)
        self.tokens_SEC = tokens_RC.view(shape)
        self.scores_SEC = scores_RC.view(shape) + scores_SE[:, :, None]

    def _children_(self, below: Level) -> tuple[Tensor, Tensor]:
        """(target ids, log-probabilities), each [R, C]: the best ones, or draws."""
        hidden_RH = self.hidden_SEH.flatten(0, 1)
        if self.drawing is None:
            scores_RC, ids_RC = top_children(self.drafter, hidden_RH, below.breadth)
            return self.drafter.to_target(ids_RC), scores_RC
        logits_RV = self.drafter.logits(hidden_RH)
        trees, width = self.hidden_SEH.shape[:2]
        branch_R = torch.arange(trees * width, device=self.device) // width
        behind_R1 = self.drawing.root_S[branch_R][:, None]
        scores_RV = self.drawing.scores(logits_RV, branch_R, behind_R1)
        if self.drawing.shows_probs:
            probs_RV = self.drawing.probabilities(scores_RV, branch_R)
            self.draft_probs.append(probs_RV.view(trees, width, -1))
        depth_R = torch.full_like(branch_R, below.depth)
        ids_RC = self.drawing.children(scores_RV, branch_R, depth_R, below.breadth, self.draws)
        ids_RC = F.pad(ids_RC, (0, below.breadth - ids_RC.shape[1]), value=-1)
        return ids_RC, logits_RV.log_softmax(-1).gather(1, ids_RC.clamp(min=0))

    def draft_probs_STV(self) -> Tensor | None:
        """The distributions by node, zeros at nodes without children."""
        if not self.draft_probs:
            return None
        probs_SEV = torch.cat(self.draft_probs, 1)
        inner_E = torch.tensor(sorted({parent + 1 for parent in self.plan.parents}))
        trees, _, size = probs_SEV.shape
        draft_probs_STV = probs_SEV.new_zeros(trees, len(self.plan.parents) + 1, size)
        return draft_probs_STV.index_copy_(1, inner_E.to(probs_SEV.device), probs_SEV)
