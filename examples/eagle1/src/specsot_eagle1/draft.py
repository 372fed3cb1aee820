"""Drafting with EAGLE-1: every branch's tree has the same shape in every round.

The shape says which children of which nodes are drafted, by their rank; only nodes with children
go through the drafter. Further shape letters: W nodes of a level, E those of them with children,
M all nodes with children so far, C children that are looked at.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specsot.ops.draft.eagle import Frontier, Workspace, top_children
from specsot.ops.draft.proposals import Drawing
from specsot.ops.forward import HiddenDrafter
from specsot.ops.kv.pool import KVCache
from specsot.ops.sampling.coins import ranked
from specsot.ops.sampling.processors import choose
from specsot.ops.sampling.settings import Accept, Draws
from specsot.ops.types import Proposal

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
    draft_rows = frontier.draft_rows
    drawing = Drawing.of(draft_rows, draws, accept)
    work = Workspace(kv_draft, draft_rows, plan.inner)
    frame = work.frame
    device = frontier.tokens_SK.device
    draft_probs: list[Tensor] = []  # [S, E, V] of the forwarded nodes, level by level

    def children(scores_SE: Tensor, below: Level) -> tuple[Tensor, Tensor]:
        """(target ids, cumulative log-probabilities), each [S, E, C], of the nodes in hidden_SEH:
        the best ones, or draws."""
        hidden_RH = hidden_SEH.flatten(0, 1)
        if drawing is None:
            scores_RC, ids_RC = top_children(drafter, hidden_RH, below.breadth)
            tokens_RC = drafter.to_target(ids_RC)
        else:
            logits_RV = drafter.logits(hidden_RH)
            trees, width = scores_SE.shape
            branch_R = torch.arange(trees * width, device=device) // width
            scores_RV = drawing.scores(logits_RV, branch_R, drawing.root_S[branch_R][:, None])
            if drawing.shows_probs:
                probs_RV = drawing.probabilities(scores_RV, branch_R)
                draft_probs.append(probs_RV.view(trees, width, -1))
            depth_R = torch.full_like(branch_R, below.depth)
            drawn_RC = drawn_children(drawing, scores_RV, branch_R, depth_R, below.breadth, draws)
            tokens_RC = F.pad(drawn_RC, (0, below.breadth - drawn_RC.shape[1]), value=-1)
            scores_RC = logits_RV.log_softmax(-1).gather(1, tokens_RC.clamp(min=0))
        shape = (*scores_SE.shape, -1)
        return tokens_RC.view(shape), scores_RC.view(shape) + scores_SE[:, :, None]

    tokens_SEC = frontier.tokens_SK[:, None]
    scores_SEC = frontier.scores_SK[:, None]
    hidden_SEH = frontier.hidden_SKH[:, :1]
    if drawing is not None:
        tokens_SEC, scores_SEC = children(torch.zeros_like(scores_SEC[:, :, 0]), plan.levels[0])
    tokens: list[Tensor] = []
    scores: list[Tensor] = []
    for level in plan.levels:
        above_W, ranks_W = torch.tensor((level.above, level.ranks), device=device)
        tokens_SW = tokens_SEC[:, above_W, ranks_W]
        scores_SW = scores_SEC[:, above_W, ranks_W]
        tokens.append(tokens_SW)
        scores.append(scores_SW)
        if level.inner:  # all of them, of all branches, in one forward
            inner_E = torch.tensor(level.inner, device=device)
            depth_M = torch.tensor(level.inner_depths, device=device)
            seen_EM = torch.tensor(level.ancestors, device=device)
            position_SM = draft_rows.position_S[:, None] + depth_M - 1
            out_BQH = drafter.forward(
                frame.spread(tokens_SW[:, inner_E].clamp(min=0)),
                frame.spread(hidden_SEH[:, above_W[inner_E]]),
                *work.fresh(seen_EM.expand(len(tokens_SW), -1, -1), position_SM),
                kv_draft,
            )
            hidden_SEH = frame.collect(out_BQH)
            below = plan.levels[level.depth]
            tokens_SEC, scores_SEC = children(scores_SW[:, inner_E], below)
    kv_draft.release_(work.slots)
    tokens_SN = torch.cat(tokens, 1)
    # Draws can run out of tokens: a node is real if it has one, as have all above it.
    is_real = list((tokens_SN >= 0).unbind(1))
    for node, parent in enumerate(plan.parents):
        is_real[node] = is_real[node] if parent < 0 else is_real[node] & is_real[parent]
    shape = torch.tensor([plan.parents, plan.depths], device=device)
    parents_SN, depths_SN = shape[:, None].expand(-1, len(tokens_SN), -1)
    draft_probs_STV = None
    if draft_probs:  # by node, zeros at nodes without children
        probs_SEV = torch.cat(draft_probs, 1)
        inner_E = torch.tensor(sorted({parent + 1 for parent in plan.parents}), device=device)
        trees, _, size = probs_SEV.shape
        draft_probs_STV = probs_SEV.new_zeros(trees, len(plan.parents) + 1, size)
        draft_probs_STV.index_copy_(1, inner_E, probs_SEV)
    return Proposal(
        tokens_SN=tokens_SN.clamp(min=0),
        parents_SN=parents_SN,
        depths_SN=depths_SN,
        valid_SN=torch.stack(is_real, 1),
        scores_SN=torch.cat(scores, 1),
        levels=len(plan.levels),
        draft_probs_STV=draft_probs_STV,
        work=draft_rows.work.plus(work.spent),
    )


def drawn_children(
    drawing: Drawing,
    scores_RV: Tensor,
    branch_R: Tensor,
    depth_R: Tensor,
    count: int,
    draws: str,
) -> Tensor:
    """int64 [R, count]: the children of each row in the order they are tried; -1 for none.

    draws: SAMPLED for independent draws, DISTINCT for draws without their earlier siblings. With
        the target's coins there are no two independent ones.
    """
    rules = drawing.sampler.rules
    rank_R = torch.zeros_like(depth_R)
    if draws == Draws.SAMPLED and drawing.accept is Accept.REJECTION:
        keys = [drawing.keys(branch_R, depth_R, rank_R + rank) for rank in range(count)]
        return torch.stack([choose(scores_RV, rules, branch_R, key_R) for key_R in keys], 1)
    key_R = drawing.keys(branch_R, depth_R, rank_R)
    drawn_RC = ranked(scores_RV, key_R, rules.most_kept, count)
    best_RC = scores_RV.topk(drawn_RC.shape[1]).indices
    greedy_R1 = rules.greedy_S[branch_R][:, None]
    first_C = torch.arange(drawn_RC.shape[1], device=drawn_RC.device) == 0
    return drawn_RC.where(~greedy_R1, best_RC.where(first_C, -1))
