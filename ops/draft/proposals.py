"""The proposals of a round: none, those of two drafters as one, one number of nodes for all."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..tree import Candidates
from ..types import NO_WORK, DraftWork, Proposal, no_drafts


def nothing(trees: int, device: torch.device, work: DraftWork = NO_WORK) -> Proposal:
    """Trees [S, 0]: verifying them is one ordinary decoding step for all branches."""
    none_S0, valid_S0, scores_S0 = no_drafts(trees, device)
    return Proposal(none_S0, none_S0, none_S0, valid_S0, scores_S0, 0, is_chain=True, work=work)


def join(proposals: Sequence[Proposal | None], places: Sequence[Sequence[int]]) -> Proposal:
    """One tree per branch, smaller trees padded with nodes that nobody may accept.

    Args:
        proposals: None for a drafter whose branches are none of this round's.
        places: for each drafter which of the S trees are its own (host ints).
    """
    parts = [(one, own) for one, own in zip(proposals, places, strict=True) if one is not None]
    if len(parts) == 1:
        return parts[0][0]
    trees = [one for one, _ in parts]
    order = np.argsort([place for _, own in parts for place in own])
    order_S = torch.from_numpy(order)
    sizes = [size for one in trees for size in one.laid_out]

    def joined(values: Sequence[Tensor], empty: float = 0) -> Tensor:
        most = max(value.shape[1] for value in values)
        wide = [F.pad(value, (0, most - value.shape[1]), value=empty) for value in values]
        return torch.cat(wide)[order_S.to(wide[0].device)]

    notes = [p.tokens_SN[:, :0] if p.side_outputs_SC is None else p.side_outputs_SC for p in trees]
    notes_SC = joined(notes)
    return Proposal(
        joined([one.tokens_SN for one in trees]),
        joined([one.parents_SN for one in trees], -1),
        joined([one.depths_SN for one in trees], 1),
        joined([one.valid_SN for one in trees], False),
        joined([one.scores_SN for one in trees], -torch.inf),
        max(one.levels for one in trees),
        side_outputs_SC=notes_SC if notes_SC.shape[1] else None,
        is_chain=all(one.is_chain for one in trees),
        sizes=tuple(sizes[place] for place in order),
        work=reduce(DraftWork.plus, (one.work for one in trees)),
    )


def share(proposal: Proposal, rows_per_round: int | None) -> Proposal:
    """The nodes that are most probable over all trees together; None keeps every tree as it is.

    Nodes are ranked by their cumulative log-probability, of equals the earlier branch's first and
    then the earlier node. No child scores above its parent and none comes before it, so what is
    kept of a tree is a tree. It moves to the front of its own, in the order it had; the rest is
    padding.

    Raises:
        ValueError: drafts that come with the laws they were drawn by. Those that are kept for how
            probable they are follow other laws.
    """
    if rows_per_round is None:
        return proposal
    if proposal.draft_probs_STV is not None:
        raise ValueError("drawn drafts are not ranked by their probability")
    nodes = proposal.tokens_SN.shape[1]
    shared = min(rows_per_round, sum(proposal.laid_out))
    keep_SN = _best(proposal.scores_SN, proposal.valid_SN, shared)
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


def _best(scores_SN: Tensor, valid_SN: Tensor, count: int) -> Tensor:
    """bool [S, N]: the `count` best valid nodes, or all of them if there are fewer."""
    lowest = torch.finfo(scores_SN.dtype).min  # a node of probability 0 still precedes padding
    scores_SN = scores_SN.clamp(min=lowest).where(valid_SN, -torch.inf)
    order_X = scores_SN.reshape(-1).sort(descending=True, stable=True).indices
    keep_X = torch.zeros_like(order_X, dtype=torch.bool).index_fill_(0, order_X[:count], True)
    return keep_X.view_as(valid_SN) & valid_SN
