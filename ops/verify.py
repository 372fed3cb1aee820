"""Accepting drafts: per node, what the target would have said there, and the path it confirms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .ngram import filler_ids
from .registry import op
from .sampling import Coins, History, best, draw, process, tree_history
from .types import LayerPlan, LayerStatus, Proposal, Rows, Target


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the target confirms of every tree (node 0 is the root).

    drawn_ST: int64, the target's own token after each node.
    path_ST: bool, the root and the accepted nodes: always one path from the root.
    bonus_S: int64, the target's token after the last accepted node.
    tokens_ST, parents_ST: the trees themselves (parents as node indices, the root its own;
        tokens of padding nodes are -1).
    notes_SC: what the drafter wrote for the host, int64; [S, 0] if nothing.
    best_GTC: for trees under a grammar, each node's best tokens; scores_GTV their full scores.
    """

    drawn_ST: Tensor
    path_ST: Tensor
    bonus_S: Tensor
    tokens_ST: Tensor
    parents_ST: Tensor
    notes_SC: Tensor
    best_GTC: Tensor
    scores_GTV: Tensor


@dataclass(frozen=True, slots=True)
class Roots:
    """First tokens after a prefill: drawn_R int64; best_GC, scores_GV for those under a grammar."""

    drawn_R: Tensor
    best_GC: Tensor
    scores_GV: Tensor


@op("plan.compile", writes="plan")
def compile_plan(target: Target, rows: Rows) -> LayerPlan:
    """One status per layer: DECODE when trees are verified, FULL for a prefill alone."""
    status = LayerStatus.DECODE if rows.trees else LayerStatus.FULL
    return (status,) * target.num_layers


@op("verify.accept", writes="accepted")
def accept(rows: Rows, logits: Tensor, proposal: Proposal, *, filler_top_k: int = 1) -> Accepted:
    """Accept a node if its parent is accepted and the target draws its token at the parent.

    Only a token per node is compared; logits are never gathered along paths.

    Args:
        logits: [R, V], the tree rows first.
        proposal: the trees of the active branches, in the rows' order.
        filler_top_k: n-gram drafters that count more than the drawn token get so many best tokens
            of every node in `notes_SC`.
    """
    trees, nodes = rows.nodes_ST.shape
    scores_RV = process(logits[: rows.tree_rows], tree_history(rows.ancestors_STT))
    positions_ST = rows.of_trees(rows.positions_BQ)
    coins = Coins(rows.of_trees(rows.owner_BQ).view(-1), positions_ST.view(-1) + 1)
    drawn_ST = draw(scores_RV, coins).view(trees, nodes)
    parents_SN = proposal.parents_SN + 1
    agrees_SN = (drawn_ST.gather(1, parents_SN) == proposal.tokens_SN) & proposal.valid_SN
    path_ST = _longest_path(agrees_SN, rows.ancestors_STT, proposal.depths_SN)
    last_S = (path_ST * torch.arange(nodes, device=path_ST.device)).argmax(1)
    root_S1 = parents_SN.new_zeros(trees, 1)
    bound_GTV = scores_RV.view(trees, nodes, -1)[list(rows.bound_trees)]
    return Accepted(
        drawn_ST,
        path_ST,
        drawn_ST.gather(1, last_S[:, None]).squeeze(1),
        _offered_tokens(rows, proposal),
        torch.cat([root_S1, parents_SN], dim=1),
        _notes(proposal, scores_RV, filler_top_k),
        best(bound_GTV),
        bound_GTV,
    )


def _notes(proposal: Proposal, scores_RV: Tensor, filler_top_k: int) -> Tensor:
    """int64 [S, C]: the drafter's own notes, or the best tokens after each node of its tree."""
    trees = proposal.tokens_SN.shape[0]
    if filler_top_k > 1:
        return filler_ids(scores_RV, filler_top_k).view(trees, -1)
    return proposal.parents_SN[:, :0] if proposal.notes_SC is None else proposal.notes_SC


def _offered_tokens(rows: Rows, proposal: Proposal) -> Tensor:
    """int64 [S, T]: root and drafted tokens, -1 for padding nodes."""
    root_S1 = rows.tokens_BQ.view(-1)[rows.nodes_ST[:, :1]]
    drafted_SN = proposal.tokens_SN.where(proposal.valid_SN, -1)
    return torch.cat([root_S1, drafted_SN], dim=1)


def _longest_path(agrees_SN: Tensor, ancestors_STT: Tensor, depths_SN: Tensor) -> Tensor:
    """bool [S, T]: the deepest node all of whose ancestors agree, and these (first of equals)."""
    trees, nodes, _ = ancestors_STT.shape
    root_S1 = torch.ones(trees, 1, dtype=torch.bool, device=agrees_SN.device)
    agrees_ST = torch.cat([root_S1, agrees_SN], dim=1)
    confirmed_ST = (agrees_ST[:, None, :] | ~ancestors_STT).all(-1)
    depths_ST = torch.cat([depths_SN.new_zeros(trees, 1), depths_SN], dim=1)
    earlier_T = torch.arange(nodes, 0, -1, device=agrees_SN.device)
    rank_ST = torch.where(confirmed_ST, depths_ST * (nodes + 1) + earlier_T, -1)
    last_S11 = rank_ST.argmax(1)[:, None, None].expand(trees, 1, nodes)
    return ancestors_STT.gather(1, last_S11).squeeze(1)


@op("branch.root", writes="roots")
def root(rows: Rows, logits: Tensor) -> Roots:
    """Process and draw the first token of every branch whose prefill ends in these rows."""
    scores_RV = logits[rows.tree_rows :]
    tip_R = torch.arange(rows.tips_R.shape[0], device=logits.device)
    scores_RV = process(scores_RV, History(tip_R, rows.ancestors_STT[:0]))
    owner_R = rows.owner_BQ.view(-1)[rows.tips_R]
    drawn_R = draw(scores_RV, Coins(owner_R, rows.positions_BQ.view(-1)[rows.tips_R] + 1))
    bound_GV = scores_RV[list(rows.bound_tips)]
    return Roots(drawn_R, best(bound_GV), bound_GV)
