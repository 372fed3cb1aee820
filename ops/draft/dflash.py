"""Drafting with DFlash: one block per branch, filled in one forward for all branches.

A block is the root token and masks behind it. Its rows see the branch's context, which the
drafter keeps as keys and values made of the target's features, and each other in both directions.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..forward import BlockDrafter
from ..kv.pool import KVCache
from ..types import DraftRows, DraftWork, Proposal
from .ddtree import chain, tree
from .drawing import Drawing
from .workspace import Workspace


def write_context_(drafter: BlockDrafter, draft_rows: DraftRows, kv_draft: KVCache) -> None:
    """Write the keys and values of the committed rows of all branches."""
    assert draft_rows.features_NF is not None
    rows = draft_rows.rows
    index_N = draft_rows.index_N
    drafter.write_context_(
        drafter.fuse(draft_rows.features_NF),
        rows.positions_BQ.view(-1)[index_N],
        rows.slots_BQ.view(-1)[index_N],
        kv_draft,
    )


def draft_tree_(
    drafter: BlockDrafter, draft_rows: DraftRows, kv_draft: KVCache, *, size: int, nodes: int
) -> Proposal:
    """The `nodes` most probable prefixes of each branch's block (DDTree).

    Args:
        size: rows of a block, the root's included.
    """
    logits_SDV, work = _block(drafter, draft_rows, kv_draft, size)
    return replace(tree(logits_SDV.log_softmax(-1), nodes), work=work)


def draft_chain_(
    drafter: BlockDrafter,
    draft_rows: DraftRows,
    kv_draft: KVCache,
    *,
    size: int,
    draws: str,
    accept: str = "match",
) -> Proposal:
    """One path through each branch's block: the best token of every position, or draws."""
    logits_SDV, work = _block(drafter, draft_rows, kv_draft, size)
    log_probs_SDV = logits_SDV.log_softmax(-1)
    drawing = Drawing.of(draft_rows, draws, accept)
    if drawing is None:
        drafted = chain(log_probs_SDV, log_probs_SDV.argmax(-1))
    else:
        drafted = _drawn_chain(drawing, logits_SDV, log_probs_SDV)
    return replace(drafted, work=work)


def _drawn_chain(drawing: Drawing, logits_SDV: Tensor, log_probs_SDV: Tensor) -> Proposal:
    """A token of every position, drawn from the block's own law there: it knows the root only."""
    trees, levels, _ = logits_SDV.shape
    index_R = torch.arange(trees * levels, device=logits_SDV.device)
    branch_R = index_R // levels
    depth_R = index_R % levels + 1
    behind_R1 = drawing.root_S[branch_R][:, None]
    scores_RV = drawing.scores(logits_SDV.flatten(0, 1), branch_R, behind_R1)
    tokens_SN = drawing.one(scores_RV, branch_R, depth_R).view(trees, levels)
    drafted = chain(log_probs_SDV, tokens_SN)
    if not drawing.shows_probs:
        return drafted
    laws_SDV = drawing.laws(scores_RV, branch_R).view_as(logits_SDV)
    return replace(drafted, draft_probs_STV=torch.cat([laws_SDV, laws_SDV[:, -1:]], 1))


def _block(
    drafter: BlockDrafter, frontier: DraftRows, kv: KVCache, size: int
) -> tuple[Tensor, DraftWork]:
    """logits_SDV of the positions behind each root, in one forward."""
    work = Workspace(kv, frontier, size)
    device = frontier.root_S.device
    trees = len(frontier.root_S)
    tokens_SQ = torch.full((trees, size), drafter.mask_token_id, device=device)
    tokens_SQ[:, 0] = frontier.root_S
    position_SQ = frontier.position_S[:, None] + torch.arange(size, device=device)
    seen_SQQ = torch.ones(trees, size, size, dtype=torch.bool, device=device)
    hidden_BQH = drafter.forward(
        work.frame.spread(tokens_SQ),
        *work.fresh(seen_SQQ, position_SQ),
        kv,
    )
    work.close_()
    hidden_SDH = work.frame.collect(hidden_BQH)[:, 1:]
    return drafter.logits(hidden_SDH.flatten(0, 1)).view(trees, size - 1, -1), work.spent
