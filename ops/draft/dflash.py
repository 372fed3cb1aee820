"""Drafting with DFlash: one block per branch, filled in one forward for all branches.

DDTree (liranringel/ddtree): the probability of a prefix is the product of its positions' marginals,
and the best tree has the most probable prefixes. The reference pops them from a heap; here each
level keeps what can still be among the best, which gives the same nodes. Shape letters: W prefixes
kept at a level, E extensions of them, C all kept nodes."""

from dataclasses import replace

import torch
from torch import Tensor

from ..forward import BlockDrafter, largest, top
from ..kv.pool import KVCache
from ..types import (
    Candidates,
    DraftRows,
    DraftWork,
    Proposal,
    rerank,
    single_path,
)
from .eagle import Workspace
from .proposals import Drawing


def draft_tree_(
    drafter: BlockDrafter, draft_rows: DraftRows, kv_draft: KVCache, *, size: int, nodes: int
) -> Proposal:
    """The `nodes` most probable prefixes of each branch's block of `size` rows (DDTree)."""
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
        return replace(chain(log_probs_SDV, largest(log_probs_SDV)), work=work)
    trees, levels, _ = logits_SDV.shape
    index_R = torch.arange(trees * levels, device=logits_SDV.device)
    branch_R = index_R // levels
    behind_R1 = drawing.root_S[branch_R][:, None]
    scores_RV = drawing.scores(logits_SDV.flatten(0, 1), branch_R, behind_R1)
    tokens_R = drawing.draw(scores_RV, branch_R, index_R % levels + 1)
    probs_STV = None
    if drawing.shows_probs:
        probs_SDV = drawing.probabilities(scores_RV, branch_R).view_as(logits_SDV)
        probs_STV = torch.cat([probs_SDV, probs_SDV[:, -1:]], 1)
    drafted = chain(log_probs_SDV, tokens_R.view(trees, levels))
    return replace(drafted, draft_probs_STV=probs_STV, work=work)


def _block(
    drafter: BlockDrafter, frontier: DraftRows, kv: KVCache, size: int
) -> tuple[Tensor, DraftWork]:
    """logits_SDV of the positions behind each root, in one forward."""
    work = Workspace(kv, frontier, size)
    frame = work.frame
    device = frontier.root_S.device
    trees = len(frontier.root_S)
    tokens_SQ = torch.full((trees, size), drafter.mask_token_id, device=device)
    tokens_SQ[:, 0] = frontier.root_S
    position_SQ = frontier.position_S[:, None] + torch.arange(size, device=device)
    seen_SQQ = torch.ones(trees, size, size, dtype=torch.bool, device=device)
    hidden_BQH = drafter.forward(frame.spread(tokens_SQ), *work.fresh(seen_SQQ, position_SQ), kv)
    kv.release_(work.slots)
    hidden_SDH = frame.collect(hidden_BQH)[:, 1:]
    return drafter.logits(hidden_SDH.flatten(0, 1)).view(trees, size - 1, -1), work.spent


def chain(log_probs_SDV: Tensor, tokens_SN: Tensor) -> Proposal:
    """One path per branch, with these tokens (int64) for the drafted positions."""
    log_probs_SN = log_probs_SDV.gather(-1, tokens_SN[..., None]).squeeze(-1).float()
    return single_path(tokens_SN, log_probs_SN)


def tree(log_probs_SDV: Tensor, nodes: int) -> Proposal:
    """The `nodes` most probable prefixes of each branch (or all), the most probable first, of
    equals by length, parent, id; a smaller budget gives the first nodes of a larger one."""
    trees, levels, _ = log_probs_SDV.shape
    if nodes < 1 or levels < 1:
        return chain(log_probs_SDV[:, :0], log_probs_SDV[:, :0, 0].long())
    # `topk` leaves the order of equals open, and differently on every device. Its keys are unique:
    # the bits of a float, read as an integer that rises with it, and below them the id.
    all_SDV = log_probs_SDV.float() + 0.0  # -0.0 has other bits than 0.0
    vocabulary = all_SDV.shape[-1]
    bits_SDV = all_SDV.view(torch.int32)
    rising_SDV = bits_SDV ^ ((bits_SDV >> 31) & 0x7FFFFFFF)
    keys_SDV = (rising_SDV.long() << 32) - torch.arange(vocabulary, device=all_SDV.device)
    ids_SDK = top(keys_SDV, nodes)[1]
    top_SDK = all_SDV.gather(-1, ids_SDK)
    scores_SW = top_SDK.new_zeros(trees, 1)
    first = -1  # creation index of the first of the prefixes
    created = []
    for level in range(levels):
        # The prefix of rank j with the token of rank r is beaten by every prefix up to j with every
        # token up to r, so only (j + 1) * (r + 1) <= nodes can matter: about nodes * log(nodes).
        width = scores_SW.shape[1]
        tokens = top_SDK.shape[2]
        total = sum(min(tokens, nodes // (prefix + 1)) for prefix in range(width))
        index_W = torch.arange(width, device=scores_SW.device)
        count_W = (nodes // (index_W + 1)).clamp(max=tokens)
        prefix_E = index_W.repeat_interleave(count_W, output_size=total)
        start_W = count_W.cumsum(0) - count_W
        rank_E = torch.arange(total, device=scores_SW.device) - start_W[prefix_E]
        scores_SE = scores_SW[:, prefix_E] + top_SDK[:, level, rank_E]
        best = scores_SE.sort(dim=1, descending=True, stable=True)
        pick_SC = best.indices[:, :nodes]
        longer = Candidates(
            ids_SDK[:, level].gather(1, rank_E[pick_SC]),
            prefix_E[pick_SC] + first,
            torch.full_like(pick_SC, level + 1),
            best.values[:, :nodes],
        )
        created.append(longer)
        first += width
        scores_SW = longer.scores_SC
    # No child scores above its parent and the sort is stable, so a parent comes before its children
    # and is never cut off without them.
    chosen = rerank(created, nodes, ranked=True)
    return chosen.proposal(min(levels, chosen.tokens_SC.shape[1]))
