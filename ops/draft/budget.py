"""One number of drafted tokens for all branches of a round: the best nodes over all their trees."""

from dataclasses import replace

import torch
from torch import Tensor

from ..tree import Candidates
from ..types import Proposal


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
    trees, nodes = proposal.tokens_SN.shape
    shared = min(rows_per_round, trees * nodes)
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
    )


def _best(scores_SN: Tensor, valid_SN: Tensor, count: int) -> Tensor:
    """bool [S, N]: the `count` best valid nodes, or all of them if there are fewer."""
    lowest = torch.finfo(scores_SN.dtype).min  # a node of probability 0 still precedes padding
    scores_SN = scores_SN.clamp(min=lowest).where(valid_SN, -torch.inf)
    order_X = scores_SN.reshape(-1).sort(descending=True, stable=True).indices
    keep_X = torch.zeros_like(order_X, dtype=torch.bool).index_fill_(0, order_X[:count], True)
    return keep_X.view_as(valid_SN) & valid_SN
