"""Trees of several drafters as one: the nodes that are most probable under all of them.

Every source has its own `Reliability`. Paths with the same tokens are one node. Shape letters: X
nodes of all sources together, K ends of the buckets of a reliability."""

from collections.abc import Sequence
from math import isnan

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..types import Candidates, Proposal
from .reliability import BUCKETS, STEP, Reliability

MULTIPLIER = 6364136223846793005  # of a path's key, as in Knuth's MMIX


def ends(reliability: Reliability, device: torch.device) -> Tensor:
    """float32 [BUCKETS + 1]: log-probabilities at the ends of the buckets; they never rise."""
    return torch.tensor([0.0, *(-loss for loss in reliability.losses)], device=device)


def calibrated(scores_SN: Tensor, log_K: Tensor) -> Tensor:
    """Log-probabilities of nodes as a reliability has them, linear between the ends of buckets;
    log_K: float32, see `ends`. -inf stays; below the last bucket the scores fall as before."""
    place_SN = (-scores_SN / STEP).clamp(0, BUCKETS)
    low_SN = place_SN.floor().clamp(max=BUCKETS - 1)
    index_SN = low_SN.long()
    part_SN = place_SN - low_SN
    above_SN = log_K[index_SN]
    below_SN = log_K[index_SN + 1]
    # never below the lower end by rounding: a child must not score above its parent
    inside_SN = (above_SN + (below_SN - above_SN) * part_SN).maximum(below_SN)
    return inside_SN + (scores_SN + BUCKETS * STEP).clamp(max=0)


def mix(proposals: Sequence[Proposal], logs: Sequence[Tensor], nodes: int) -> Proposal:
    """The `nodes` most probable nodes of the trees of several sources, whose reliabilities are
    `logs`. Side outputs: int64 [S, (2 + sources) * nodes], the tokens and parents of the nodes, and
    the bits of the float64 score that each source gave to each; NaN for one that it did not
    draft."""
    tokens_SX = torch.cat([part.tokens_SN for part in proposals], 1)
    valid_SX = torch.cat([part.valid_SN for part in proposals], 1)
    depths_SX = torch.cat([part.depths_SN for part in proposals], 1)
    raw_SX = torch.cat([part.scores_SN for part in proposals], 1)
    count = tokens_SX.shape[1]
    if not count:
        return proposals[0]
    levels = max(part.levels for part in proposals)
    parents = []
    scores = []
    start = 0
    for part, log_K in zip(proposals, logs, strict=True):
        parents.append(torch.where(part.parents_SN < 0, -1, part.parents_SN + start))
        scores.append(calibrated(part.scores_SN, log_K))
        start += part.tokens_SN.shape[1]
    parents_SX = torch.cat(parents, 1)
    scores_SX = torch.cat(scores, 1).where(valid_SX, -torch.inf)
    # the key of a path follows from its tokens: nodes of equal paths have equal keys
    keys_SX = torch.zeros_like(tokens_SX)
    for _ in range(levels):
        above_SX = keys_SX.gather(1, parents_SX.clamp(min=0)).where(parents_SX >= 0, 0)
        keys_SX = (above_SX + tokens_SX + 1) * MULTIPLIER
    alike_SXX = (keys_SX[:, :, None] == keys_SX[:, None]) & valid_SX[:, None]
    first_SX = alike_SXX.int().argmax(2)  # itself, or the same path of an earlier source
    index_X = torch.arange(count, device=tokens_SX.device)
    is_first_SX = (first_SX == index_X) & valid_SX
    best_SX = scores_SX[:, None].where(alike_SXX, -torch.inf).amax(2)
    parents_SX = first_SX.gather(1, parents_SX.clamp(min=0)).where(parents_SX >= 0, -1)
    best = best_SX.where(is_first_SX, -torch.inf).sort(dim=1, descending=True, stable=True)
    pick_SN = best.indices[:, :nodes]
    valid_SN = is_first_SX.gather(1, pick_SN)
    chosen = Candidates(tokens_SX, parents_SX, depths_SX, best_SX).pick(pick_SN)
    given = []
    start = 0
    for part in proposals:
        size = part.tokens_SN.shape[1]
        own_SNX = alike_SXX.gather(1, pick_SN[..., None].expand(-1, -1, count))
        own_SNX = own_SNX[:, :, start : start + size]
        raw_SNX = raw_SX[:, None, start : start + size].where(own_SNX, -torch.inf)
        score_SN = raw_SNX.amax(2) if size else best.values[:, :nodes].new_full((), -torch.inf)
        given.append(score_SN.where(score_SN > -torch.inf, torch.nan).expand_as(pick_SN))
        start += size
    return Proposal(
        chosen.tokens_SC,
        chosen.parents_SC.where(valid_SN, -1),
        chosen.depths_SC.where(valid_SN, 1),
        valid_SN,
        scores_SN=chosen.scores_SC.where(valid_SN, -torch.inf),
        levels=levels,
        side_outputs_SC=torch.cat(
            (
                chosen.tokens_SC.where(valid_SN, -1),
                chosen.parents_SC,
                torch.cat(given, 1).double().view(torch.int64),
            ),
            1,
        ),
    )


def learn_(
    sources: Sequence[Reliability],
    sides_C: npt.NDArray[np.int64],
    tokens: Sequence[int],
    parents: Sequence[int],
    path: Sequence[int],
) -> None:
    """Count the outcome of one verified tree, by the side outputs of `mix`. Nodes are found by
    their paths, since a shared budget or a grammar may have changed the tree."""
    sides_XN = sides_C.reshape(2 + len(sources), -1)
    scores_XN = np.ascontiguousarray(sides_XN[2:]).view(np.float64).tolist()
    edges = zip(parents[1:], tokens[1:], strict=True)
    node_of = {edge: node for node, edge in enumerate(edges, 1) if edge[1] >= 0}
    place = {-1: 0}
    for drafted, (token, parent) in enumerate(sides_XN[:2].T.tolist()):
        node = node_of.get((place.get(parent, -1), token))
        if node is not None:
            place[drafted] = node
            for source, scores in zip(sources, scores_XN, strict=True):
                if not isnan(scores[drafted]):
                    source.count_(scores[drafted], node in path)
