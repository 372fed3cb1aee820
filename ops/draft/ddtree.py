"""Token trees from a block's marginals (DDTree, liranringel/ddtree), for all branches at once.

A block drafter gives every position a distribution that does not depend on the tokens chosen at
the others, so a prefix of tokens has the product of its marginals as its probability. The tree
with the highest expected accepted length is made of the most probable prefixes, and these are
closed under taking parents. The reference pops them from a heap, one by one; here each level is
cut down to what can still be among the best, which gives the same nodes in a few large operations.

Further shape letters: W prefixes kept at a level, E extensions of them that are looked at, C all
nodes that were kept at some level.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..tree import Candidates, single_path
from ..types import Proposal


def chain(log_probs_SDV: Tensor, tokens_SN: Tensor) -> Proposal:
    """One path per branch, with these tokens; as published, DFlash takes every position's best.

    Args:
        log_probs_SDV: log-probabilities of the drafted positions (a block without its anchor).
        tokens_SN: int64, one token for each of them.
    """
    log_probs_SN = log_probs_SDV.gather(-1, tokens_SN[..., None]).squeeze(-1).float()
    return single_path(tokens_SN, log_probs_SN)


def tree(log_probs_SDV: Tensor, nodes: int) -> Proposal:
    """The `nodes` most probable prefixes of each branch, the most probable first.

    A smaller budget gives the first nodes of a larger one. Of equals the shorter prefix comes
    first, then the one whose parent does, then the one whose token has the smaller id. Where the
    positions have fewer prefixes than `nodes`, all of them are taken.

    Args:
        log_probs_SDV: log-probabilities of the drafted positions, none above zero.
    """
    trees, levels, _ = log_probs_SDV.shape
    if nodes < 1 or levels < 1:
        return chain(log_probs_SDV[:, :0], log_probs_SDV[:, :0, 0].long())
    top_SDK, ids_SDK = _top_tokens(log_probs_SDV, nodes)
    scores_SW = top_SDK.new_zeros(trees, 1)
    first = -1
    created = []
    for level in range(levels):
        choice = _Choice(top_SDK[:, level], ids_SDK[:, level], level + 1)
        created.append(_extend(scores_SW, first, choice, nodes))
        first += scores_SW.shape[1]
        scores_SW = created[-1].scores_SC
    # No child scores above its parent and the sort is stable, so a parent comes before its children
    # and is never cut off without them.
    candidates = Candidates.joined(created)
    order_SC = candidates.scores_SC.sort(dim=1, descending=True, stable=True).indices
    best = candidates.pick(order_SC[:, :nodes])
    return best.proposal(min(levels, best.tokens_SC.shape[1]))


class _Choice(NamedTuple):
    """What may stand at one position: log-probabilities and ids, best first."""

    top_SK: Tensor
    ids_SK: Tensor
    depth: int


def _top_tokens(log_probs_SDV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities float32, ids), each [S, D, min(count, V)], best first.

    `topk` leaves the order of equals open, and differently on every device. Its keys are made
    unique: the bits of a float, read as an integer that rises with it, and below them the id.
    """
    scores_SDV = log_probs_SDV.float() + 0.0  # -0.0 has other bits than 0.0
    size = scores_SDV.shape[-1]
    bits_SDV = scores_SDV.view(torch.int32)
    rising_SDV = bits_SDV ^ ((bits_SDV >> 31) & 0x7FFFFFFF)
    keys_SDV = (rising_SDV.long() << 32) - torch.arange(size, device=scores_SDV.device)
    ids_SDK = keys_SDV.topk(min(count, size), dim=-1).indices
    return scores_SDV.gather(-1, ids_SDK), ids_SDK


def _extend(scores_SW: Tensor, first: int, choice: _Choice, nodes: int) -> Candidates:
    """The `nodes` best prefixes that are one token longer, best first.

    The prefix of rank j with the token of rank r is beaten by every prefix up to j with every
    token up to r, so only (j + 1) * (r + 1) <= nodes can matter: about nodes * log(nodes) of all.

    Args:
        first: creation index of the first of the prefixes.
    """
    width = scores_SW.shape[1]
    tokens = choice.top_SK.shape[1]
    total = sum(min(tokens, nodes // (prefix + 1)) for prefix in range(width))
    index_W = torch.arange(width, device=scores_SW.device)
    count_W = (nodes // (index_W + 1)).clamp(max=tokens)
    prefix_E = index_W.repeat_interleave(count_W, output_size=total)
    start_W = count_W.cumsum(0) - count_W
    rank_E = torch.arange(total, device=scores_SW.device) - start_W[prefix_E]
    scores_SE = scores_SW[:, prefix_E] + choice.top_SK[:, rank_E]
    best = scores_SE.sort(dim=1, descending=True, stable=True)
    pick_SC = best.indices[:, :nodes]
    return Candidates(
        choice.ids_SK.gather(1, rank_E[pick_SC]),
        prefix_E[pick_SC] + first,
        torch.full_like(pick_SC, choice.depth),
        best.values[:, :nodes],
    )
