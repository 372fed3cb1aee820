"""Proposals: how their tokens are drawn, and those that are packed on the host or made of others.

Under ``match`` a draft drawn with the target's coin for its position agrees with the target far
more often than the best token; under ``rejection`` the coins have a role of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling.coins import CoinRole, round_keys, token_keys
from ..sampling.processors import Sampler, choose, probabilities, process
from ..sampling.settings import Accept, Draws
from ..types import Candidates, DraftRows, DraftWork, Proposal
from .ngram import HostTree as HostTree


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the drafts of a round are drawn, after the roots' positions and tokens (int64)."""

    sampler: Sampler
    accept: Accept
    position_S: Tensor
    root_S: Tensor

    @classmethod
    def of(cls, draft_rows: DraftRows, draws: str, accept: str) -> "Drawing | None":
        """None where the drafts are the drafter's best tokens."""
        if draft_rows.sampler is None or draws == Draws.BEST:
            return None
        return cls(draft_rows.sampler, Accept(accept), draft_rows.position_S, draft_rows.root_S)

    @property
    def shows_probs(self) -> bool:
        """Whether verification needs the distributions of the drafts."""
        return self.accept is Accept.REJECTION

    def scores(self, logits_RV: Tensor, branch_R: Tensor, behind_RC: Tensor) -> Tensor:
        """[R, V]: processed logits; behind_RC: int64, the root and drafts that lead to each row."""
        path_RC = torch.ones_like(behind_RC, dtype=torch.bool)
        return process(logits_RV, self.sampler, branch_R, tokens_RC=behind_RC, path_RC=path_RC)

    def draw(self, scores_RV: Tensor, branch_R: Tensor, depth_R: Tensor) -> Tensor:
        """int64 [R]: a draft of each row, at this depth of its tree."""
        key_R = self.keys(branch_R, depth_R, torch.zeros_like(depth_R))
        return choose(scores_RV, self.sampler.rules, branch_R, key_R)

    def probabilities(self, scores_RV: Tensor, branch_R: Tensor) -> Tensor:
        return probabilities(scores_RV, self.sampler.rules.greedy_S[branch_R])

    def keys(self, branch_R: Tensor, depth_R: Tensor, rank_R: Tensor) -> Tensor:
        """int64 [R]: keys of drafts at these depths, with these ranks among their siblings."""
        key_R = self.sampler.key_S[branch_R]
        root_R = self.position_S[branch_R]
        if self.accept is Accept.MATCH:
            return token_keys(key_R, root_R + depth_R)
        return round_keys(key_R, root_R, depth_R, rank_R, role=CoinRole.DRAFT)


def pack(trees: Sequence[HostTree], device: torch.device, *, candidates: bool = True) -> Proposal:
    """The trees of all active branches, padded to the largest with invalid children of the root."""
    sizes = tuple(len(tree.tokens) for tree in trees)
    most = max(sizes, default=0)
    ints = np.zeros((4, len(trees), most), np.int64)
    ints[1] = -1
    ints[2] = 1
    scores = np.full((len(trees), most), -np.inf, np.float32)
    for row, (tree, count) in enumerate(zip(trees, sizes, strict=True)):
        ints[:3, row, :count] = tree.tokens, tree.parents, tree.depths
        ints[3, row, :count] = 1
        scores[row, :count] = tree.scores
    tokens_SN, parents_SN, depths_SN, valid_SN = torch.from_numpy(ints).to(device).unbind()
    levels = max((max(tree.depths, default=0) for tree in trees), default=0)
    drafts = tokens_SN, parents_SN, depths_SN, valid_SN.bool(), torch.from_numpy(scores).to(device)
    return Proposal(*drafts, levels, sizes=sizes, candidates=candidates)


def join(proposals: Sequence[Proposal | None], places: Sequence[Sequence[int]]) -> Proposal:
    """The proposals of several drafters (None for one without branches in this round) as one;
    places: for each drafter the indices of its trees among the S trees."""
    trees = [part for part in proposals if part is not None]
    if len(trees) == 1:
        return trees[0]
    pairs = zip(proposals, places, strict=True)
    order = np.argsort([place for part, at in pairs if part is not None for place in at])
    order_S = torch.from_numpy(order)
    sizes = [size for part in trees for size in part.laid_out]

    def joined(values: Sequence[Tensor], empty: float = 0) -> Tensor:
        most = max(value.shape[1] for value in values)
        wide = [F.pad(value, (0, most - value.shape[1]), value=empty) for value in values]
        return torch.cat(wide)[order_S.to(wide[0].device)]

    none = [part.tokens_SN[:, :0] for part in trees]
    sides = [part.side_outputs_SC for part in trees]
    side_SC = joined([n if side is None else side for n, side in zip(none, sides, strict=True)])
    return Proposal(
        joined([part.tokens_SN for part in trees]),
        joined([part.parents_SN for part in trees], -1),
        joined([part.depths_SN for part in trees], 1),
        joined([part.valid_SN for part in trees], False),
        scores_SN=joined([part.scores_SN for part in trees], -torch.inf),
        levels=max(part.levels for part in trees),
        side_outputs_SC=side_SC if side_SC.shape[1] else None,
        is_chain=all(part.is_chain for part in trees),
        sizes=tuple(sizes[place] for place in order),
        work=reduce(DraftWork.plus, (part.work for part in trees)),
    )


def share(proposal: Proposal, rows_per_round: int) -> Proposal:
    """The nodes that are most probable over all trees together, of equals the earlier branch's,
    then the earlier node. No child scores above its parent, so that the kept nodes are trees.
    Raises ValueError for drawn drafts, whose distribution would change."""
    if proposal.draft_probs_STV is not None:
        raise ValueError("drawn drafts are not ranked by their probability")
    nodes = proposal.tokens_SN.shape[1]
    shared = min(rows_per_round, sum(proposal.laid_out))
    lowest = torch.finfo(proposal.scores_SN.dtype).min  # probability 0 still precedes padding
    scores_SN = proposal.scores_SN.clamp(min=lowest).where(proposal.valid_SN, -torch.inf)
    order_X = scores_SN.reshape(-1).sort(descending=True, stable=True).indices
    keep_X = torch.zeros_like(order_X, dtype=torch.bool).index_fill_(0, order_X[:shared], True)
    keep_SN = keep_X.view_as(scores_SN) & proposal.valid_SN
    pick_SN = (~keep_SN).sort(dim=1, stable=True).indices[:, : min(nodes, shared)]
    valid_SN = keep_SN.gather(1, pick_SN)
    nodes_SN = (proposal.tokens_SN, proposal.parents_SN, proposal.depths_SN, proposal.scores_SN)
    best = Candidates(*nodes_SN).pick(pick_SN)
    return replace(
        proposal,
        tokens_SN=best.tokens_SC,
        parents_SN=best.parents_SC.where(valid_SN, -1),
        depths_SN=best.depths_SC.where(valid_SN, 1),
        valid_SN=valid_SN,
        scores_SN=best.scores_SC.where(valid_SN, -torch.inf),
        shared=shared,
        sizes=None,
    )
