"""From logits to tokens in a round: one processing and one drawing for every row ever compared.

Branches are drawn from by their columns and their own coins; a token that a grammar restricts is
the best legal one of the row's order, which for a sampled branch is that of score + Gumbel noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling.coins import gumbel, perturbed, ranked, token_keys
from ..sampling.processors import Past, Sampler, choose, probabilities, process
from ..types import Rows

BROKEN = -2  # the token of a row whose scores are no numbers
BEST = 64  # scores per node that a grammar walk gets to see without a further read


@dataclass(frozen=True, slots=True)
class Scored:
    """Processed rows, ready to be drawn from.

    scores_RV: as from `processors.process`; the logits themselves without a sampler.
    branch_R: int64, the branch of each row in the sampler's order. key_R: int64, the keys of the
    tokens to be drawn. Both are empty without a sampler: nobody asks for them in such a round.
    broken_R: bool, rows with a score that is no number, from which nothing can be drawn.
    """

    sampler: Sampler | None
    scores_RV: Tensor
    branch_R: Tensor
    key_R: Tensor
    broken_R: Tensor

    def drawn(self) -> Tensor:
        """int64 [R]: the target's own token after each row, BROKEN where there is none."""
        if self.sampler is None:
            drawn_R = self.scores_RV.argmax(-1)
        else:
            drawn_R = choose(self.scores_RV, self.sampler.rules, self.branch_R, self.key_R)
        return drawn_R.masked_fill(self.broken_R, BROKEN)

    def probabilities(self) -> Tensor:
        """[R, V]: what each row draws from."""
        return probabilities(self.scores_RV, self._greedy_R())

    def branch_keys(self, branches: int) -> Tensor:
        """int64 [S]: keys of the first branches (those with trees)."""
        if self.sampler is None:
            return self.branch_R.new_zeros(branches)
        return self.sampler.key_S[:branches]

    def noise(self, row_X: Tensor, id_X: Tensor) -> Tensor:
        """float64 [X]: Gumbel noise of an id each, drawn after these rows; NaN for greedy ones."""
        if self.sampler is None:
            return torch.full_like(row_X, torch.nan, dtype=torch.float64)
        noise_X = gumbel(self.key_R[row_X], id_X[:, None]).squeeze(1)
        return noise_X.masked_fill(self._greedy_R()[row_X], torch.nan)

    def bound(self, rows: Sequence[int]) -> "GrammarRows":
        """The rows that a grammar restricts (host ints); only outlines have some."""
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
    """Rows under a grammar: the best ids of each, best first, and all that a full look needs.

    key_G, greedy_G: None where every row is greedy.
    """

    best_GC: Tensor
    scores_GV: Tensor
    key_G: Tensor | None = None
    greedy_G: Tensor | None = None

    def whole(self, row: int) -> Tensor:
        """[V]: what orders all ids of one row, as `best_GC` orders the first of them."""
        scores_V = self.scores_GV[row]
        if self.key_G is None or self.greedy_G is None:
            return scores_V
        drawn_V = perturbed(scores_V[None], self.key_G[row : row + 1])[0]
        return torch.where(self.greedy_G[row], scores_V.double(), drawn_V)


def score_trees(rows: Rows, logits_RV: Tensor) -> Scored:
    """All nodes of all trees, each with its own path behind it."""
    if rows.sampler is None:
        return _unprocessed(logits_RV)
    trees, nodes = rows.nodes_ST.shape
    branch_R = torch.arange(trees * nodes, device=logits_RV.device) // nodes
    tokens_RT = rows.of_trees(rows.tokens_BQ)[branch_R]
    past = rows.sampler.past(tokens_RT, rows.ancestors_STT.flatten(0, 1))
    positions_R = rows.of_trees(rows.positions_BQ).view(-1)
    return _scored(rows.sampler, logits_RV, branch_R, past, positions_R)


def score_tips(rows: Rows, logits_RV: Tensor) -> Scored:
    """The last rows of prompts; their branches stand behind those with trees."""
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
    logits_RV = logits_RV.masked_fill(broken_R[:, None], 0.0)  # what draws cannot do with NaN
    scores_RV = process(logits_RV, sampler.rules, branch_R, past)
    key_R = token_keys(sampler.key_S[branch_R], positions_R + 1)
    return Scored(sampler, scores_RV, branch_R, key_R, broken_R)


def _broken(logits_RV: Tensor) -> Tensor:
    """bool [R]: a NaN is the greatest of its row, so one look at each row tells."""
    return logits_RV.amax(-1).isnan()


def best(scores_RV: Tensor) -> Tensor:
    """The ids of the `BEST` highest scores of each row, best first, int64 [R, min(BEST, V)].

    Of equal scores the smallest id comes first, as in `argmax`; `topk` leaves the order of equals
    open, and bfloat16 logits are often equal. What equals the last score may be cut off in any
    order, so -1 stands there: whoever gets that far must look at the whole row.
    """
    size = scores_RV.shape[-1]
    ids_RC = scores_RV.topk(min(BEST, size), dim=-1).indices.sort(dim=-1).values
    order = scores_RV.gather(-1, ids_RC).sort(dim=-1, descending=True, stable=True)
    ids_RC = ids_RC.gather(-1, order.indices)
    if size <= BEST:
        return ids_RC
    return ids_RC.where(order.values > order.values[..., -1:], -1)
