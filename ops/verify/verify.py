"""Accepting drafts: per node, what the target would have said there, and the path it confirms.

Behind a prefill, where nothing was drafted, it says the first token of every branch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import op
from ..sampling.processors import filler_ids
from ..sampling.settings import Accept, Rule
from ..types import Proposal, Rows
from .explain import RejectionRecord, TreeFigures, figures
from .rejection_rounds import RoundCoins, accept_rejection, rule_for
from .score import BROKEN, GrammarRows, Scored, score_tips, score_trees


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the target confirms of every tree (node 0 is the root).

    drawn_ST: int64, the target's own token after each node.
    path_ST: bool, the root and the accepted nodes: always one path from the root.
    bonus_S: int64, the target's token after the last accepted node; BROKEN if its scores are no
        numbers.
    tokens_ST, parents_ST: the trees themselves (parents as node indices, the root its own;
        tokens of padding nodes are -1).
    side_outputs_SC: what the drafter wrote for the host, int64; [S, 0] if nothing.
    bound: the nodes of trees under a grammar, tree by tree.
    figures: what the drafts were judged by, if somebody asked.
    """

    drawn_ST: Tensor
    path_ST: Tensor
    bonus_S: Tensor
    tokens_ST: Tensor
    parents_ST: Tensor
    side_outputs_SC: Tensor
    bound: GrammarRows
    figures: TreeFigures | None = None


@op("verify.accept", writes="accepted")
def accept(
    rows: Rows,
    logits: Tensor,
    proposal: Proposal,
    *,
    accept: str = "match",
    rule: str | None = None,
    draws: str = "best",
    skip_sample_adjustment: bool = False,
    filler_top_k: int = 1,
    explain: bool = False,
) -> Accepted:
    """Accept drafts by matching the target's own draws, or by rejection sampling.

    A draft matches if its parent is accepted and the target draws its token at the parent. Only a
    token per node is compared; logits are never gathered along paths.

    Args:
        logits: [R, V], the tree rows first.
        proposal: the trees of the active branches, in the rows' order.
        accept: `sampling_settings.Accept`; with "rejection", `rule` and the drafter's `draws` as in
            `rejection_rounds.rule_for`, `skip_sample_adjustment` as in `accept_rejection`. Trees
            under a grammar are matched in any case.
        filler_top_k: n-gram drafters that count more than the drawn token get so many best tokens
            of every node in `side_outputs_SC`.
        explain: bring `figures` too.
    """
    trees, nodes = rows.nodes_ST.shape
    scored = score_trees(rows, logits[: rows.tree_rows])
    drawn_ST = scored.drawn().view(trees, nodes)
    judged = None
    if accept == Accept.REJECTION:
        used = rule_for(proposal, rule, draws)
        judged = _judged(rows, scored, proposal, used, not skip_sample_adjustment)
        path_ST = judged.verdict.path_ST
        bonus_S = judged.verdict.bonus_S
        broken_ST = scored.broken_R.view(trees, nodes) & path_ST
        bonus_S = bonus_S.masked_fill(broken_ST.any(1), BROKEN)
    else:
        path_ST, bonus_S = matching(proposal, rows.ancestors_STT, drawn_ST)
    return Accepted(
        drawn_ST,
        path_ST,
        bonus_S,
        *_with_roots(proposal, rows.tokens_BQ.view(-1)[rows.nodes_ST[:, :1]]),
        _notes(proposal, scored.scores_RV, filler_top_k),
        scored.bound([tree * nodes + n for tree in rows.bound_trees for n in range(nodes)]),
        figures(scored, proposal, drawn_ST, judged) if explain else None,
    )


def _judged(
    rows: Rows, scored: Scored, proposal: Proposal, rule: Rule, adjusted: bool
) -> RejectionRecord:
    trees, nodes = rows.nodes_ST.shape
    p_STV = scored.probabilities().view(trees, nodes, -1)
    root_S = rows.of_trees(rows.positions_BQ)[:, 0]
    coins = RoundCoins.of(scored.branch_keys(trees), root_S, proposal)
    verdict = accept_rejection(p_STV, proposal, coins, rule, skip_sample_adjustment=not adjusted)
    return RejectionRecord(verdict, coins.r_SN, rule, adjusted)


def matching(proposal: Proposal, above_STT: Tensor, drawn_ST: Tensor) -> tuple[Tensor, Tensor]:
    """(path_ST, bonus_S): the longest paths that the target confirms, and what it says next."""
    if drawn_ST.shape[1] == 1:  # roots alone
        return torch.ones_like(drawn_ST, dtype=torch.bool), drawn_ST[:, 0]
    agrees_SN = drawn_ST.gather(1, proposal.parents_SN + 1) == proposal.tokens_SN
    agrees_SN = agrees_SN & proposal.valid_SN
    path_ST = _longest_path(agrees_SN, above_STT, proposal.depths_SN)
    node_T = torch.arange(path_ST.shape[1], device=path_ST.device)
    last_S1 = (path_ST * node_T).argmax(1, keepdim=True)
    return path_ST, drawn_ST.gather(1, last_S1).squeeze(1)


def _with_roots(proposal: Proposal, root_S1: Tensor) -> tuple[Tensor, Tensor]:
    """tokens_ST and parents_ST, as in `Accepted`."""
    if not proposal.tokens_SN.shape[1]:
        return root_S1, torch.zeros_like(root_S1)
    tokens_SN = proposal.tokens_SN.where(proposal.valid_SN, -1)
    return torch.cat([root_S1, tokens_SN], dim=1), F.pad(proposal.parents_SN + 1, (1, 0))


def _notes(proposal: Proposal, scores_RV: Tensor, filler_top_k: int) -> Tensor:
    """int64 [S, C]: the drafter's own notes, or the best tokens after each node of its tree."""
    trees = proposal.tokens_SN.shape[0]
    if filler_top_k > 1:
        return filler_ids(scores_RV, filler_top_k).view(trees, -1)
    notes_SC = proposal.side_outputs_SC
    return proposal.parents_SN[:, :0] if notes_SC is None else notes_SC


def _longest_path(agrees_SN: Tensor, ancestors_STT: Tensor, depths_SN: Tensor) -> Tensor:
    """bool [S, T]: the deepest node all of whose ancestors agree, and these (first of equals)."""
    trees, nodes, _ = ancestors_STT.shape
    agrees_ST = F.pad(agrees_SN, (1, 0), value=True)
    confirmed_ST = (agrees_ST[:, None, :] | ~ancestors_STT).all(-1)
    earlier_T = torch.arange(nodes, 0, -1, device=agrees_SN.device)
    rank_ST = F.pad(depths_SN, (1, 0)) * (nodes + 1) + earlier_T
    rank_ST = rank_ST.where(confirmed_ST, -1)
    last_S11 = rank_ST.argmax(1)[:, None, None].expand(trees, 1, nodes)
    return ancestors_STT.gather(1, last_S11).squeeze(1)


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """First tokens after a prefill: drawn_R int64; `bound` the rows under a grammar."""

    drawn_R: Tensor
    bound: GrammarRows


@op("branch.root", writes="roots")
def root(rows: Rows, logits: Tensor) -> FirstTokens:
    """Process and draw the first token of every branch whose prefill ends in these rows."""
    if not rows.tips_R.numel():
        return FirstTokens(rows.tips_R, GrammarRows(rows.tips_R[:, None], logits[:0]))
    scored = score_tips(rows, logits[rows.tree_rows :])
    return FirstTokens(scored.drawn(), scored.bound(rows.bound_tips))
