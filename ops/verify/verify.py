"""Acceptance of drafts: the target's own token after each node, and the path that it confirms. A
token that a grammar restricts is the best legal one of the row's order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..forward import largest, top
from ..registry import op
from ..sampling.coins import gumbel, perturbed, ranked, token_keys
from ..sampling.processors import choose, probabilities, process
from ..sampling.settings import Accept, Rule
from ..types import Proposal, Rows
from .rejection import accept_rejection, round_coins, rule_for

BROKEN = -2  # the token of a row with NaN scores
BEST = 64  # ids per node that a grammar sees without a further read


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """Rows under a grammar: the best ids of each, best first, and the data for a full order."""

    best_GC: Tensor
    scores_GV: Tensor
    key_G: Tensor | None = None
    greedy_G: Tensor | None = None

    def whole(self, row: int) -> Tensor:
        """[V]: the values that order all ids of one row."""
        scores_V = self.scores_GV[row]
        if self.key_G is None or self.greedy_G is None:
            return scores_V
        drawn_V = perturbed(scores_V[None], self.key_G[row : row + 1])[0]
        return torch.where(self.greedy_G[row], scores_V.double(), drawn_V)


class Scored:
    """Processed rows: scores of `process` (the logits without a sampler), bool of rows with NaN,
    and int64, their branches in the sampler's order and the keys of the tokens to be drawn."""

    def __init__(self, rows: Rows, logits_RV: Tensor, *, tips: bool) -> None:
        """All nodes of all trees; with `tips` the last rows of prompts, whose branches follow."""
        self.sampler = rows.sampler
        self.scores_RV = logits_RV
        self.largest_R = largest(logits_RV)
        # a NaN is the greatest value of its row
        self.broken_R = logits_RV.gather(1, self.largest_R[:, None]).squeeze(1).isnan()
        self.branch_R = self.key_R = logits_RV.new_empty(0, dtype=torch.int64)
        if self.sampler is None:
            return
        positions_N = rows.positions_BQ.view(-1)
        if tips:
            self.branch_R = torch.arange(len(rows.tips_R), device=logits_RV.device) + rows.trees
            tokens_RC = self.branch_R[:, None][:, :0]
            path_RC = tokens_RC.bool()
            positions_R = positions_N[rows.tips_R]
        else:
            trees, nodes = rows.nodes_ST.shape
            self.branch_R = torch.arange(trees * nodes, device=logits_RV.device) // nodes
            tokens_RC = rows.of_trees(rows.tokens_BQ)[self.branch_R]
            path_RC = rows.ancestors_STT.flatten(0, 1)
            positions_R = positions_N[rows.nodes_ST.reshape(-1)]
        logits_RV = logits_RV.masked_fill(self.broken_R[:, None], 0.0)  # draws fail with NaN
        self.scores_RV = process(
            logits_RV, self.sampler, self.branch_R, tokens_RC=tokens_RC, path_RC=path_RC
        )
        self.key_R = token_keys(self.sampler.key_S[self.branch_R], positions_R + 1)

    def drawn(self) -> Tensor:
        """int64 [R]: the target's own token after each row, BROKEN for broken rows."""
        if self.sampler is None:
            drawn_R = self.largest_R
        else:
            drawn_R = choose(self.scores_RV, self.sampler.rules, self.branch_R, self.key_R)
        return drawn_R.masked_fill(self.broken_R, BROKEN)

    def greedy_R(self) -> Tensor:
        if self.sampler is None:
            return self.scores_RV.new_ones(len(self.scores_RV), dtype=torch.bool)
        return self.sampler.rules.greedy_S[self.branch_R]

    def bound(self, rows: Sequence[int]) -> GrammarRows:
        """The rows that a grammar restricts (host ints); only outlines have any."""
        if not rows:
            none_0C = self.key_R.new_empty(0, min(BEST, self.scores_RV.shape[1]))
            return GrammarRows(none_0C, self.scores_RV[:0])
        rows_G = torch.tensor(rows, device=self.scores_RV.device)
        scores_GV = self.scores_RV[rows_G]
        ids_GC = best(scores_GV).masked_fill(self.broken_R[rows_G, None], BROKEN)
        if self.sampler is None or self.sampler.rules.all_greedy:
            return GrammarRows(ids_GC, scores_GV)
        key_G = self.key_R[rows_G]
        greedy_G = self.greedy_R()[rows_G]
        drawn_GC = ranked(scores_GV, key_G, scores_GV.shape[1], BEST)
        ids_GC = ids_GC.where(greedy_G[:, None] | (ids_GC == BROKEN), drawn_GC)
        return GrammarRows(ids_GC, scores_GV, key_G, greedy_G)


def best(scores_RV: Tensor) -> Tensor:
    """int64 [R, min(BEST, V)]: the ids of the highest scores, best first, of equals the smallest
    id (`topk` does not define it). Ids that equal the last score may be missing, so they are -1:
    a caller that reaches one must read the whole row."""
    size = scores_RV.shape[-1]
    ids_RC = top(scores_RV, BEST)[1].sort(dim=-1).values
    order = scores_RV.gather(-1, ids_RC).sort(dim=-1, descending=True, stable=True)
    ids_RC = ids_RC.gather(-1, order.indices)
    if size <= BEST:
        return ids_RC
    return ids_RC.where(order.values > order.values[..., -1:], -1)


def filler_ids(scores_RV: Tensor, top_k: int) -> Tensor:
    """int64 [R, 2 * top_k]: the most likely tokens of each row, -1 for impossible ones (-inf), then
    the bits of their float64 log-probabilities among these tokens."""
    scores_RK, ids_RK = top(scores_RV, top_k)
    ids_RK = ids_RK.where(scores_RK > -torch.inf, -1)
    return torch.cat((ids_RK, scores_RK.double().log_softmax(-1).view(torch.int64)), -1)


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """The figures of every drafted node: int64 [S, N, C], those of `DraftFigures`, floats as bits.
    adjusted: a rejected draft's probability is removed from the final distribution."""

    bits_SNC: Tensor
    rule: Rule | None = None
    adjusted: bool = False


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """One drafted node, None for missing values: the target's own token after its parent, the
    drafter's score, Gumbel noise; of a tried node under rejection p, q, uniform number, chance."""

    draw: int | None
    score: float | None
    coin: float | None
    p: float | None
    q: float | None
    r: float | None
    chance: float | None


def unpacked(bits_NC: npt.NDArray[np.int64]) -> list[DraftFigures]:
    """One tree's figures from `TreeFigures.bits_SNC`."""
    floats = np.ascontiguousarray(bits_NC[:, 1:]).view(np.float64).tolist()
    rows = zip(bits_NC[:, 0].tolist(), floats, strict=True)
    return [DraftFigures(draw, *(x if np.isfinite(x) else None for x in row)) for draw, row in rows]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The target's verdict on every tree (node 0 is the root).

    drawn_ST: int64, the target's own token after each node. path_ST: bool, root and accepted
        nodes. bonus_S: int64, the token after the last one; BROKEN if its scores are NaN.
    tokens_ST, parents_ST: the trees (node indices, the root its own; tokens of padding are -1).
    bound: the nodes of trees under a grammar, tree by tree."""

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
    """Accept drafts by matching the target's own draws, or by rejection sampling; trees under a
    grammar are matched in any case. logits: [R, V], the tree rows first. filler_top_k: if above
    1, `side_outputs_SC` end with this many best tokens of every node. explain: return `figures`."""
    trees, nodes = rows.nodes_ST.shape
    tokens_SN = proposal.tokens_SN
    parents_SN = proposal.parents_SN + 1
    scored = Scored(rows, logits[: rows.tree_rows], tips=False)
    drawn_ST = scored.drawn().view(trees, nodes)
    used = None
    numbers: tuple[Tensor, ...] = ()
    if accept == Accept.REJECTION:
        used = rule_for(proposal, rule, draws)
        p_STV = probabilities(scored.scores_RV, scored.greedy_R()).view(trees, nodes, -1)
        key_S = tokens_SN.new_zeros(trees) if rows.sampler is None else rows.sampler.key_S[:trees]
        coins = round_coins(key_S, rows.of_trees(rows.positions_BQ)[:, 0], proposal)
        verdict = accept_rejection(
            p_STV, proposal, coins, used, skip_sample_adjustment=skip_sample_adjustment
        )
        path_ST = verdict.path_ST
        broken_ST = scored.broken_R.view(trees, nodes) & path_ST
        bonus_S = verdict.bonus_S.masked_fill(broken_ST.any(1), BROKEN)
        numbers = (verdict.p_SN, verdict.q_SN, coins[0], verdict.chance_SN)
    else:
        path_ST, bonus_S = matching(proposal, rows.ancestors_STT, drawn_ST)
    figures = None
    if explain:
        coin_SN = torch.full_like(tokens_SN, torch.nan, dtype=torch.float64)
        if scored.sampler is not None:  # Gumbel noise of each draft after its parent
            first_S1 = torch.arange(trees, device=drawn_ST.device)[:, None] * nodes
            row_X = (first_S1 + parents_SN).view(-1)
            noise_X = gumbel(scored.key_R[row_X], tokens_SN.reshape(-1, 1)).squeeze(1)
            coin_SN = noise_X.masked_fill(scored.greedy_R()[row_X], torch.nan).view_as(coin_SN)
        if used is None:
            numbers = (torch.full_like(coin_SN, torch.nan),) * 4
        else:  # of tried drafts
            numbers = tuple(number.where(~numbers[-1].isnan(), torch.nan) for number in numbers)
        floats = (proposal.scores_SN, coin_SN, *numbers)
        bits = [value_SN.double().view(torch.int64) for value_SN in floats]
        bits_SNC = torch.stack([drawn_ST.gather(1, parents_SN), *bits], dim=2)
        figures = TreeFigures(bits_SNC, used, used is not None and not skip_sample_adjustment)
    tokens_ST = rows.tokens_BQ.view(-1)[rows.nodes_ST[:, :1]]
    parents_ST = torch.zeros_like(tokens_ST)
    if tokens_SN.shape[1]:
        tokens_ST = torch.cat([tokens_ST, tokens_SN.where(proposal.valid_SN, -1)], dim=1)
        parents_ST = F.pad(parents_SN, (1, 0))
    side_outputs_SC = proposal.side_outputs_SC
    if filler_top_k > 1 and proposal.candidates:
        filler_SC = filler_ids(scored.scores_RV, filler_top_k).view(trees, -1)
        sides = (filler_SC,) if side_outputs_SC is None else (side_outputs_SC, filler_SC)
        side_outputs_SC = torch.cat(sides, 1)
    return Accepted(
        drawn_ST=drawn_ST,
        path_ST=path_ST,
        bonus_S=bonus_S,
        tokens_ST=tokens_ST,
        parents_ST=parents_ST,
        side_outputs_SC=tokens_SN[:, :0] if side_outputs_SC is None else side_outputs_SC,
        bound=scored.bound([tree * nodes + n for tree in rows.bound_trees for n in range(nodes)]),
        figures=figures,
    )


def matching(proposal: Proposal, above_STT: Tensor, drawn_ST: Tensor) -> tuple[Tensor, Tensor]:
    """(path_ST, bonus_S): the longest paths that the target confirms, and its next tokens."""
    if drawn_ST.shape[1] == 1:  # roots alone
        return torch.ones_like(drawn_ST, dtype=torch.bool), drawn_ST[:, 0]
    agrees_SN = drawn_ST.gather(1, proposal.parents_SN + 1) == proposal.tokens_SN
    path_ST = _longest_path(agrees_SN & proposal.valid_SN, above_STT, proposal.depths_SN)
    node_T = torch.arange(path_ST.shape[1], device=path_ST.device)
    last_S1 = (path_ST * node_T).argmax(1, keepdim=True)
    return path_ST, drawn_ST.gather(1, last_S1).squeeze(1)


def _longest_path(agrees_SN: Tensor, ancestors_STT: Tensor, depths_SN: Tensor) -> Tensor:
    """bool [S, T]: the deepest node all of whose ancestors agree, and these (first of equals)."""
    trees, nodes, _ = ancestors_STT.shape
    agrees_ST = F.pad(agrees_SN, (1, 0), value=True)
    confirmed_ST = (agrees_ST[:, None, :] | ~ancestors_STT).all(-1)
    earlier_T = torch.arange(nodes, 0, -1, device=agrees_SN.device)
    rank_ST = F.pad(depths_SN, (1, 0)) * (nodes + 1) + earlier_T
    last_S = rank_ST.where(confirmed_ST, -1).argmax(1)
    return ancestors_STT.gather(1, last_S[:, None, None].expand(trees, 1, nodes)).squeeze(1)


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """First tokens after a prefill, int64, and the rows under a grammar."""

    drawn_R: Tensor
    bound: GrammarRows


@op("branch.root", writes="roots")
def root(rows: Rows, logits: Tensor) -> FirstTokens:
    """Draw the first token of every branch whose prefill ends in these rows."""
    if not rows.tips_R.numel():
        return FirstTokens(rows.tips_R, GrammarRows(rows.tips_R[:, None], logits[:0]))
    scored = Scored(rows, logits[rows.tree_rows :], tips=True)
    return FirstTokens(scored.drawn(), scored.bound(rows.bound_tips))
