"""EAGLE-2 and EAGLE-3: token trees grown for all branches at once (EAGLE-2, section 4).

Drafter row j pairs the target's feature of token j with token j + 1, at position j. The rows that
expand_root writes stay in the drafter's pool; those of grow_tree are given back.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..attention.backends import AttentionPlan, backend
from ..attention.metadata import AttentionMetadata, QuerySequence, tensor
from ..forward import HiddenDrafter, plan_attention
from ..kv.pool import KVCache
from ..types import Candidates, DraftRows, DraftWork, Proposal, rerank


class Workspace:
    """Slots of each branch after its committed rows, and the attention of rows in them.

    Attributes:
        slots_SM: int64, flat slots of each branch's M fresh rows.
        spent: the forwards that `fresh` has prepared.
    """

    def __init__(self, kv: KVCache, draft_rows: DraftRows, each: int) -> None:
        self.kv = kv
        self.frame = draft_rows.frame
        self.spent = DraftWork()
        device = draft_rows.position_S.device
        branches = len(self.frame.rows_S)
        visibility = draft_rows.rows.visibility
        segment_S = draft_rows.segment_S
        rows_S = self.frame.rows_S if kv.rows > 1 else (0,) * branches
        rows = np.repeat(np.asarray(rows_S, np.int32), each)
        owner = np.repeat(visibility.ids_S[segment_S], each)
        sequences = []
        first_homes = []
        by_homes: dict[tuple[int, ...], list[int]] = {}
        for branch, segment in enumerate(segment_S):
            homes = visibility.homes_S[segment]
            first_homes.append(homes[0])
            if kv.rows > 1:
                sequences.append(QuerySequence(np.array([branch]), rows_S[branch], ()))
            else:
                by_homes.setdefault(homes, []).append(branch)
        for homes, group in by_homes.items():
            sequences.append(QuerySequence(np.array(group), 0, homes))
        # position 0, not committed: only rows that `fresh` names see them
        self.slots = kv.append_(owner, np.zeros(rows.size), rows, np.repeat(first_homes, each))
        slots_SM = self.slots.reshape(branches, each)
        self.slots_SM = tensor(slots_SM, device)
        metadata = AttentionMetadata(
            kv=kv,
            sequences=tuple(sequences),
            visibility=visibility,
            segment_N=segment_S,
            positions_N=draft_rows.position_S,
            readable=kv.committed,
            fresh_SM=slots_SM,
        )
        self.plan = backend(draft_rows.attention).plan(metadata)

    def fresh(self, seen_SKM: Tensor, position_SM: Tensor) -> tuple[Tensor, Tensor, AttentionPlan]:
        """positions_BQ, slots_BQ and attention of the last K of M fresh rows of each branch.

        A row sees its branch's history, and of the M fresh rows those in `seen_SKM` (bool), whose
        positions are `position_SM`. Padding is written to the scratch slot.
        """
        fresh = position_SM.shape[1]
        width = seen_SKM.shape[1]
        spread = self.frame.spread
        rows = slice(fresh - width, fresh)
        slots_BQ = spread(self.slots_SM[:, rows], self.kv.scratch)
        padding = slots_BQ.numel() - position_SM.shape[0] * width
        self.spent = self.spent.plus(DraftWork(1, slots_BQ.numel(), padding))
        first_S = self.frame.place_S * width
        plan = self.plan.widened(seen_SKM, position_SM, first_S, self.frame.places * width)
        return spread(position_SM[:, rows]), slots_BQ, plan

    def close_(self) -> None:
        """Give the slots back."""
        self.kv.release_(self.slots)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The first level of all trees.

    tokens_SK: int64 target ids, best first; scores_SK: float32 log-probabilities.
    hidden_SKH: the drafter's output that each token was proposed from (its parent's).
    draft_rows: the branches; the drafter row of a first-level token has the position of the root
        token.
    """

    tokens_SK: Tensor
    scores_SK: Tensor
    hidden_SKH: Tensor
    draft_rows: DraftRows


def first_level(
    drafter: HiddenDrafter, draft_rows: DraftRows, kv_draft: KVCache, top_k: int
) -> Frontier:
    """Read the committed rows of all branches in one forward and propose the first level.

    The rows that it writes stay in the pool.
    """
    rows = draft_rows.rows
    assert draft_rows.features_NF is not None
    hidden_BQH = _placed(drafter.fuse(draft_rows.features_NF), draft_rows)
    attention = plan_attention(rows, kv_draft, attention=draft_rows.attention)
    out_BQH = drafter.forward(
        rows.tokens_BQ, hidden_BQH, rows.positions_BQ, rows.slots_BQ, attention, kv_draft
    )
    tip_SH = out_BQH.view(-1, out_BQH.shape[-1])[rows.tips_R]
    scores_SK, ids_SK = top_children(drafter, tip_SH, top_k)
    return Frontier(
        drafter.to_target(ids_SK),
        scores_SK,
        tip_SH[:, None, :].expand(-1, ids_SK.shape[1], -1),
        draft_rows,
    )


def _placed(hidden_NH: Tensor, draft_rows: DraftRows) -> Tensor:
    """Hidden states where their rows are, [B, Q, H]; padding holds zeros."""
    height, queries = draft_rows.rows.tokens_BQ.shape
    if len(hidden_NH) == height * queries:
        return hidden_NH.view(height, queries, -1)
    out_RH = hidden_NH.new_zeros(height * queries, hidden_NH.shape[-1])
    return out_RH.index_copy_(0, draft_rows.index_N, hidden_NH).view(height, queries, -1)


def grow_tree_(
    drafter: HiddenDrafter,
    frontier: Frontier,
    kv_draft: KVCache,
    *,
    nodes: int,
    levels: int,
    ranked: bool = False,
) -> Proposal:
    """Deepen all trees level by level, then keep the best `nodes` of each.

    These can be neither deeper nor wider than `nodes`: what could not be kept is not drafted.

    Args:
        nodes: drafted nodes of each tree, at least one.
        ranked: number the nodes of a tree by their ranks.
    """
    levels = min(levels, nodes)
    growth = _Growth(drafter, frontier, kv_draft, levels, nodes)
    for level in range(1, levels):
        if level > 1:
            growth.choose_()
        growth.deepen_(level)
    growth.work.close_()
    proposal = rerank(Candidates.joined(growth.created), nodes, ranked).proposal(levels)
    return replace(proposal, work=frontier.draft_rows.work.plus(growth.work.spent))


def top_children(drafter: HiddenDrafter, hidden_RH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities, draft ids), each [R, top_k], of the best successors, best first."""
    logits_RV = drafter.logits(hidden_RH)
    top = logits_RV.topk(min(top_k, logits_RV.shape[-1]), dim=-1)
    return top.values - logits_RV.logsumexp(-1, keepdim=True), top.indices


class _Growth:
    """The state of one grow_tree: the current frontier and all candidates so far."""

    def __init__(
        self, drafter: HiddenDrafter, frontier: Frontier, kv: KVCache, levels: int, width: int
    ) -> None:
        self.drafter = drafter
        self.kv = kv
        self.frontier = frontier
        self.tokens_SK = frontier.tokens_SK[:, :width]
        self.scores_SK = frontier.scores_SK[:, :width]
        self.hidden_SKH = frontier.hidden_SKH[:, :width]
        self.trees, self.width = self.tokens_SK.shape
        device = frontier.tokens_SK.device
        width_K = torch.arange(self.width, device=device)
        self.index_SK = width_K.expand(self.trees, -1)
        self.seen_SKM = torch.zeros(self.trees, self.width, 0, dtype=torch.bool, device=device)
        root_SK = torch.full_like(self.index_SK, -1)
        first = Candidates(self.tokens_SK, root_SK, torch.ones_like(root_SK), self.scores_SK)
        self.created = [first]
        self.count = self.width  # candidates of a tree
        self.work = Workspace(kv, frontier.draft_rows, (levels - 1) * self.width)

    def deepen_(self, level: int) -> None:
        """Forward the frontiers of all branches at once; their best children become candidates.

        The rows of a frontier have one position per branch, and see their ancestors and themselves.
        """
        trees = self.trees
        width = self.width
        frame = self.work.frame
        device = self.tokens_SK.device
        self_KK = torch.eye(width, dtype=torch.bool, device=device)
        self.seen_SKM = torch.cat([self.seen_SKM, self_KK.expand(trees, -1, -1)], dim=2)
        level_M = torch.arange(level * width, device=device) // width
        position_SM = self.frontier.draft_rows.position_S[:, None] + level_M
        out_BQH = self.drafter.forward(
            frame.spread(self.tokens_SK),
            frame.spread(self.hidden_SKH),
            *self.work.fresh(self.seen_SKM, position_SM),
            self.kv,
        )
        self.hidden_SKH = frame.collect(out_BQH)
        scores_RC, ids_RC = top_children(self.drafter, self.hidden_SKH.flatten(0, 1), width)
        scores_SC = (scores_RC.view(trees, width, -1) + self.scores_SK[:, :, None]).flatten(1)
        tokens_SC = self.drafter.to_target(ids_RC).view(trees, -1)
        parents_SC = self.index_SK.repeat_interleave(scores_SC.shape[1] // width, dim=1)
        depths_SC = torch.full_like(parents_SC, level + 1)
        self.created.append(Candidates(tokens_SC, parents_SC, depths_SC, scores_SC))
        self.count += scores_SC.shape[1]

    def choose_(self) -> None:
        """The best of the last candidates become the frontier, each behind its parent."""
        last = self.created[-1]
        width = self.width
        before = self.count - last.tokens_SC.shape[1]
        best = last.scores_SC.sort(dim=1, descending=True, stable=True)
        pick_SK = best.indices[:, :width]
        self.scores_SK = best.values[:, :width]
        self.tokens_SK = last.tokens_SC.gather(1, pick_SK)
        self.index_SK = before + pick_SK
        parent_SK1 = (pick_SK // (last.tokens_SC.shape[1] // width))[:, :, None]
        out_SKH = self.hidden_SKH
        seen_SKM = self.seen_SKM
        self.hidden_SKH = out_SKH.gather(1, parent_SK1.expand(-1, -1, out_SKH.shape[-1]))
        self.seen_SKM = seen_SKM.gather(1, parent_SK1.expand(-1, -1, seen_SKM.shape[2]))
