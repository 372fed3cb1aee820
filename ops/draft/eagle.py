"""EAGLE-2 and EAGLE-3: token trees grown for all branches at once (EAGLE-2, section 4).

Drafter row j pairs the target's feature of token j with token j + 1, at position j."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..attention.backends import AttentionPlan, backend
from ..attention.metadata import AttentionMetadata, QuerySequence, tensor
from ..forward import HiddenDrafter, plan_attention, top
from ..kv.pool import KVCache
from ..types import Candidates, DraftRows, DraftWork, Proposal, rerank


class Workspace:
    """Temporary slots of each branch after its committed rows, and the attention of rows in them.
    slots_SM: int64, of each branch's M fresh rows; `slots`, which are to be released, on the host.
    spent: the forwards that `fresh` prepared."""

    def __init__(self, kv: KVCache, draft_rows: DraftRows, each: int) -> None:
        self.kv = kv
        self.frame = draft_rows.frame
        self.spent = DraftWork()
        visibility = draft_rows.rows.visibility
        segment_S = draft_rows.segment_S
        rows_S = self.frame.rows_S if kv.rows > 1 else (0,) * len(self.frame.rows_S)
        rows = np.repeat(np.asarray(rows_S, np.int32), each)
        owner = np.repeat(visibility.ids_S[segment_S], each)
        homes_S = [visibility.homes_S[segment] for segment in segment_S]
        groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for branch, (row, homes) in enumerate(zip(rows_S, homes_S, strict=True)):
            groups.setdefault((row, () if kv.rows > 1 else homes), []).append(branch)
        sequences = [QuerySequence(np.array(group), *key) for key, group in groups.items()]
        home = np.repeat([homes[0] for homes in homes_S], each)
        # position 0, not committed: only rows that `fresh` names see them
        self.slots = kv.append_(owner, np.zeros(rows.size), rows, home)
        slots_SM = self.slots.reshape(len(rows_S), each)
        self.slots_SM = tensor(slots_SM, draft_rows.position_S.device)
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
        """positions_BQ, slots_BQ and attention of the last K of M fresh rows of each branch: a row
        sees its branch's history and the fresh rows in `seen_SKM` (bool)."""
        fresh = position_SM.shape[1]
        width = seen_SKM.shape[1]
        spread = self.frame.spread
        rows = slice(fresh - width, fresh)
        slots_BQ = spread(self.slots_SM[:, rows], self.kv.scratch)
        padding = slots_BQ.numel() - position_SM.shape[0] * width
        self.spent = self.spent.plus(DraftWork(1, slots_BQ.numel(), padding))
        first_S = self.frame.place_S * width
        total = self.frame.places * width
        groups = [g.widened(seen_SKM, position_SM, first_S, total) for g in self.plan.groups]
        return spread(position_SM[:, rows]), slots_BQ, replace(self.plan, groups=tuple(groups))


@dataclass(frozen=True, slots=True)
class Frontier:
    """The first level of all trees: int64 target ids, best first, their float32 log-probabilities,
    and the drafter's output that each was proposed from."""

    tokens_SK: Tensor
    scores_SK: Tensor
    hidden_SKH: Tensor
    draft_rows: DraftRows


def first_level(
    drafter: HiddenDrafter, draft_rows: DraftRows, kv_draft: KVCache, top_k: int
) -> Frontier:
    """Read the committed rows of all branches in one forward and propose the first level."""
    rows = draft_rows.rows
    assert draft_rows.features_NF is not None
    hidden_RH = drafter.fuse(draft_rows.features_NF)
    height, queries = rows.tokens_BQ.shape
    if len(hidden_RH) != height * queries:  # padding holds zeros
        zeros_RH = hidden_RH.new_zeros(height * queries, hidden_RH.shape[-1])
        hidden_RH = zeros_RH.index_copy_(0, draft_rows.index_N, hidden_RH)
    hidden_BQH = hidden_RH.view(height, queries, -1)
    plan = plan_attention(rows, kv_draft, attention=draft_rows.attention)
    out_BQH = drafter.forward(
        rows.tokens_BQ, hidden_BQH, rows.positions_BQ, rows.slots_BQ, attention=plan, kv=kv_draft
    )
    tip_SH = out_BQH.view(-1, out_BQH.shape[-1])[rows.tips_R]
    scores_SK, ids_SK = top_children(drafter, tip_SH, top_k)
    hidden_SKH = tip_SH[:, None, :].expand(-1, ids_SK.shape[1], -1)
    return Frontier(drafter.to_target(ids_SK), scores_SK, hidden_SKH, draft_rows)


def top_children(drafter: HiddenDrafter, hidden_RH: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities, draft ids), each [R, top_k], of the best successors, best first."""
    return top(drafter.logits(hidden_RH).log_softmax(-1), top_k)


def grow_tree_(
    drafter: HiddenDrafter,
    frontier: Frontier,
    kv_draft: KVCache,
    *,
    nodes: int,
    levels: int,
    ranked: bool = False,
) -> Proposal:
    """Deepen all trees level by level, each from the best children of the last one, then keep the
    best `nodes` (at least one) of each, `ranked` or in creation order."""
    levels = min(levels, nodes)
    tokens_SK = frontier.tokens_SK[:, :nodes]
    scores_SK = frontier.scores_SK[:, :nodes]
    hidden_SKH = frontier.hidden_SKH[:, :nodes]
    trees, width = tokens_SK.shape
    device = tokens_SK.device
    index_SK = torch.arange(width, device=device).expand(trees, -1)
    self_SKK = torch.eye(width, dtype=torch.bool, device=device).expand(trees, -1, -1)
    seen_SKM = self_SKK
    root_SK = torch.full_like(index_SK, -1)
    created = [Candidates(tokens_SK, root_SK, torch.ones_like(root_SK), scores_SK)]
    count = width  # candidates of a tree
    work = Workspace(kv_draft, frontier.draft_rows, (levels - 1) * width)
    frame = work.frame
    for level in range(1, levels):
        if level > 1:
            last = created[-1]
            best = last.scores_SC.sort(dim=1, descending=True, stable=True)
            pick_SK = best.indices[:, :width]
            scores_SK = best.values[:, :width]
            tokens_SK = last.tokens_SC.gather(1, pick_SK)
            index_SK = count - last.tokens_SC.shape[1] + pick_SK
            parent_SK1 = (pick_SK // (last.tokens_SC.shape[1] // width))[:, :, None]
            hidden_SKH = hidden_SKH.gather(1, parent_SK1.expand(-1, -1, hidden_SKH.shape[-1]))
            seen_SKM = seen_SKM.gather(1, parent_SK1.expand(-1, -1, seen_SKM.shape[2]))
            seen_SKM = torch.cat([seen_SKM, self_SKK], dim=2)
        level_M = torch.arange(level * width, device=device) // width
        position_SM = frontier.draft_rows.position_S[:, None] + level_M
        inputs = frame.spread(hidden_SKH), *work.fresh(seen_SKM, position_SM)
        hidden_SKH = frame.collect(drafter.forward(frame.spread(tokens_SK), *inputs, kv_draft))
        scores_RC, ids_RC = top_children(drafter, hidden_SKH.flatten(0, 1), width)
        scores_SC = (scores_RC.view(trees, width, -1) + scores_SK[:, :, None]).flatten(1)
        tokens_SC = drafter.to_target(ids_RC).view(trees, -1)
        parents_SC = index_SK.repeat_interleave(scores_SC.shape[1] // width, dim=1)
        depths_SC = torch.full_like(parents_SC, level + 1)
        created.append(Candidates(tokens_SC, parents_SC, depths_SC, scores_SC))
        count += scores_SC.shape[1]
    kv_draft.release_(work.slots)
    proposal = rerank(created, nodes, ranked).proposal(levels)
    return replace(proposal, work=frontier.draft_rows.work.plus(work.spent))
