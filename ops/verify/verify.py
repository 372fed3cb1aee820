"""Acceptance of drafts: the target's own token after each node, and the path that it confirms.

Processed rows are drawn from by their branches' columns and coins; a token that a grammar restricts
is the best legal one of the row's order, which for a sampled branch is that of score + Gumbel
noise. After a prefill, the same gives the first token of every branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import op
from ..sampling.coins import gumbel, perturbed, ranked, token_keys
from ..sampling.processors import Past, Sampler, choose, filler_ids, probabilities, process
from ..sampling.settings import Accept, Rule
from ..types import Proposal, Rows
from .rejection import Acceptance, RoundCoins, accept_rejection, rule_for

BROKEN = -2  # the token of a row with NaN scores
BEST = 64  # ids per node that a grammar sees without a further read


@dataclass(frozen=True, slots=True)
class Scored:
    """Processed rows, ready to be drawn from.

    scores_RV: as from `processors.process`; the logits themselves without a sampler.
    branch_R: int64, the branch of each row in the sampler's order. key_R: int64, the keys of the
        tokens
    to be drawn. Both are empty without a sampler, where they are not used.
    broken_R: bool, rows with a NaN score, from which nothing can be drawn.
    """

    sampler: Sampler | None
    scores_RV: Tensor
    branch_R: Tensor
    key_R: Tensor
    broken_R: Tensor

    def drawn(self) -> Tensor:
        """int64 [R]: the target's own token after each row, BROKEN for broken rows."""
        if self.sampler is None:
            drawn_R = self.scores_RV.argmax(-1)
        else:
            drawn_R = choose(self.scores_RV, self.sampler.rules, self.branch_R, self.key_R)
        return drawn_R.masked_fill(self.broken_R, BROKEN)

    def probabilities(self) -> Tensor:
        """[R, V]: the distribution that each row draws from."""
        return probabilities(self.scores_RV, self._greedy_R())

    def branch_keys(self, branches: int) -> Tensor:
        """int64 [S]: keys of the first branches (those with trees)."""
        if self.sampler is None:
            return self.branch_R.new_zeros(branches)
        return self.sampler.key_S[:branches]

    def noise(self, row_X: Tensor, id_X: Tensor) -> Tensor:
        """float64 [X]: Gumbel noise of an id each, drawn after these rows; NaN for greedy rows."""
        if self.sampler is None:
            return torch.full_like(row_X, torch.nan, dtype=torch.float64)
        noise_X = gumbel(self.key_R[row_X], id_X[:, None]).squeeze(1)
        return noise_X.masked_fill(self._greedy_R()[row_X], torch.nan)

    def bound(self, rows: Sequence[int]) -> "GrammarRows":
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
        greedy_G = self._greedy_R()[rows_G]
        drawn_GC = ranked(scores_GV, key_G, scores_GV.shape[1], BEST)
        ids_GC = ids_GC.where(greedy_G[:, None] | (ids_GC == BROKEN), drawn_GC)
        return GrammarRows(ids_GC, scores_GV, key_G, greedy_G)

    def _greedy_R(self) -> Tensor:
        if self.sampler is None:
            return self.scores_RV.new_ones(len(self.scores_RV), dtype=torch.bool)
        return self.sampler.rules.greedy_S[self.branch_R]


@dataclass(frozen=True, slots=True)
class GrammarRows:
    """Rows under a grammar: the best ids of each, best first, and the data for a full order.

    key_G, greedy_G: None if every row is greedy.
    """

    best_GC: Tensor
    scores_GV: Tensor
    key_G: Tensor | None = None
    greedy_G: Tensor | None = None

    def whole(self, row: int) -> Tensor:
        """[V]: the values that order all ids of one row, as `best_GC` orders the first of them."""
        scores_V = self.scores_GV[row]
        if self.key_G is None or self.greedy_G is None:
            return scores_V
        drawn_V = perturbed(scores_V[None], self.key_G[row : row + 1])[0]
        return torch.where(self.greedy_G[row], scores_V.double(), drawn_V)


def score_trees(rows: Rows, logits_RV: Tensor) -> Scored:
    """All nodes of all trees, each with the tokens on its path."""
    if rows.sampler is None:
        return _unprocessed(logits_RV)
    trees, nodes = rows.nodes_ST.shape
    branch_R = torch.arange(trees * nodes, device=logits_RV.device) // nodes
    tokens_RT = rows.of_trees(rows.tokens_BQ)[branch_R]
    past = rows.sampler.past(tokens_RT, rows.ancestors_STT.flatten(0, 1))
    positions_R = rows.of_trees(rows.positions_BQ).view(-1)
    return _scored(rows.sampler, logits_RV, branch_R, past, positions_R)


def score_tips(rows: Rows, logits_RV: Tensor) -> Scored:
    """The last rows of prompts; their branches come after those with trees."""
    if rows.sampler is None:
        return _unprocessed(logits_RV)
    branch_R = torch.arange(len(rows.tips_R), device=logits_RV.device) + rows.trees
    nothing_R0 = branch_R[:, None][:, :0]
    past = rows.sampler.past(nothing_R0, nothing_R0.bool())
    return _scored(rows.sampler, logits_RV, branch_R, past, rows.positions_BQ.view(-1)[rows.tips_R])


def _unprocessed(logits_RV: Tensor) -> Scored:
    none_0 = logits_RV.new_empty(0, dtype=torch.int64)
    return Scored(None, logits_RV, none_0, none_0, _broken(logits_RV))


def _scored(
    sampler: Sampler, logits_RV: Tensor, branch_R: Tensor, past: Past, positions_R: Tensor
) -> Scored:
    broken_R = _broken(logits_RV)
    logits_RV = logits_RV.masked_fill(broken_R[:, None], 0.0)  # draws fail with NaN
    scores_RV = process(logits_RV, sampler.rules, branch_R, past)
    key_R = token_keys(sampler.key_S[branch_R], positions_R + 1)
    return Scored(sampler, scores_RV, branch_R, key_R, broken_R)


def _broken(logits_RV: Tensor) -> Tensor:
    """bool [R]: a NaN is the greatest value of its row."""
    return logits_RV.amax(-1).isnan()


def best(scores_RV: Tensor) -> Tensor:
    """The ids of the `BEST` highest scores of each row, best first, int64 [R, min(BEST, V)].

    Of equal scores the smallest id comes first, as in `argmax`; `topk` does not define the order of
    equals, and bfloat16 logits are often equal. Ids that equal the last score may be missing, so
    they are replaced by -1: a caller that reaches one must read the whole row.
    """
    size = scores_RV.shape[-1]
    ids_RC = scores_RV.topk(min(BEST, size), dim=-1).indices.sort(dim=-1).values
    order = scores_RV.gather(-1, ids_RC).sort(dim=-1, descending=True, stable=True)
    ids_RC = ids_RC.gather(-1, order.indices)
    if size <= BEST:
        return ids_RC
    return ids_RC.where(order.values > order.values[..., -1:], -1)


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """The figures of every drafted node; made only if `verify.accept` has `explain`.

    They are part of the round's one read: floats as the bits of float64.

    bits_SNC: int64: the target's own token after the parent, then the numbers of `DraftFigures` in
        their order, as bits.
    rule: of rejection sampling; None where drafts are matched.
    adjusted: whether a rejected draft's probability is removed from the final token's distribution.
    """

    bits_SNC: Tensor
    rule: Rule | None = None
    adjusted: bool = False


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """One drafted node; None for missing values.

    draw: the target's own token after the node's parent, where drafts are matched.
    score: cumulative log-probability of the node under the drafter.
    coin: Gumbel noise of its token at its position; None at temperature 0.
    p, q, r, chance: under rejection, the values that a tried node was compared by, its uniform
        number, and the probability of accepting it (`rejection.Acceptance`).
    """

    draw: int | None
    score: float | None
    coin: float | None
    p: float | None
    q: float | None
    r: float | None
    chance: float | None


@dataclass(frozen=True, slots=True)
class RejectionRecord:
    """The result of rejection sampling, its rule, and its uniform numbers."""

    verdict: Acceptance
    r_SN: Tensor
    rule: Rule
    adjusted: bool


def figures(
    scored: Scored, proposal: Proposal, drawn_ST: Tensor, judged: RejectionRecord | None
) -> TreeFigures:
    """Collect the figures of a round.

    Args:
        scored: the rows of all nodes, tree by tree. drawn_ST: int64, their draws.
        judged: None where drafts are matched.
    """
    trees, nodes = drawn_ST.shape
    parents_SN = proposal.parents_SN + 1
    row_SN = torch.arange(trees, device=drawn_ST.device)[:, None] * nodes + parents_SN
    coin_SN = scored.noise(row_SN.view(-1), proposal.tokens_SN.view(-1)).view(row_SN.shape)
    numbers = [torch.full_like(coin_SN, torch.nan)] * 4
    if judged is not None:
        verdict = judged.verdict
        tried_SN = ~verdict.chance_SN.isnan()
        values = (verdict.p_SN, verdict.q_SN, judged.r_SN, verdict.chance_SN)
        numbers = [value_SN.where(tried_SN, torch.nan) for value_SN in values]
    floats = (proposal.scores_SN, coin_SN, *numbers)
    bits = [value_SN.double().view(torch.int64) for value_SN in floats]
    bits_SNC = torch.stack([drawn_ST.gather(1, parents_SN), *bits], dim=2)
    if judged is None:
        return TreeFigures(bits_SNC)
    return TreeFigures(bits_SNC, judged.rule, judged.adjusted)


def unpacked(bits_NC: npt.NDArray[np.int64]) -> list[DraftFigures]:
    """One tree's figures from the read values of `TreeFigures.bits_SNC`."""
    floats = np.ascontiguousarray(bits_NC[:, 1:]).view(np.float64).tolist()
    values = ([number if np.isfinite(number) else None for number in row] for row in floats)
    rows = zip(bits_NC[:, 0].tolist(), values, strict=True)
    return [DraftFigures(draw, *numbers) for draw, numbers in rows]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The target's verdict on every tree (node 0 is the root).

    drawn_ST: int64, the target's own token after each node.
    path_ST: bool, the root and the accepted nodes: always one path from the root.
    bonus_S: int64, the target's token after the last accepted node; BROKEN if its scores are NaN.
    tokens_ST, parents_ST: the trees themselves (parents as node indices, the root its own; tokens
        of padding nodes are -1).
    side_outputs_SC: the drafter's values for the host, int64; [S, 0] without any.
    bound: the nodes of trees under a grammar, tree by tree.
    figures: the figures of the drafts, with `explain`.
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
        accept: `settings.Accept`; with "rejection", `rule` and the drafter's `draws` as in
            `rejection.rule_for`, `skip_sample_adjustment` as in `accept_rejection`. Trees under a
            grammar are matched in any case.
        filler_top_k: for n-gram drafters that count several tokens: this many best tokens of every
            node are in `side_outputs_SC`.
        explain: return `figures`, too.
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
    """(path_ST, bonus_S): the longest paths that the target confirms, and its next tokens."""
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
    """int64 [S, C]: the drafter's own values, or the best tokens after each node of its tree."""
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
