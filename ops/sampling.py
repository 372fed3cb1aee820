"""From logits to tokens: one processing and one drawing function for every row ever compared."""

from dataclasses import dataclass

import torch
from torch import Tensor

BEST = 64  # scores per node that a grammar walk gets to see without a further read


@dataclass(frozen=True, slots=True)
class History:
    """What each scored row has behind it: its own branch and its own path in the tree.

    branch_R: int64, which active branch (or which prefill tip, counted on) a row belongs to.
    ancestors_STT: bool, the path of each tree row; empty for prefill tips.
    """

    branch_R: Tensor
    ancestors_STT: Tensor


@dataclass(frozen=True, slots=True)
class Coins:
    """The keys of the coins of each row: owner_R and position_R of the token to be drawn."""

    owner_R: Tensor
    position_R: Tensor


def process(logits_RV: Tensor, history: History) -> Tensor:
    """Scores [R, V] that tokens are drawn from: at temperature 0 the logits themselves.

    The order of equal scores is the order of token ids, as in `argmax`.
    """
    if history.branch_R.shape[0] != logits_RV.shape[0]:
        raise ValueError(f"{logits_RV.shape[0]} rows but {history.branch_R.shape[0]} histories")
    return logits_RV


def draw(scores_RV: Tensor, coins: Coins) -> Tensor:
    """The token of each row, int64 [R]: at temperature 0 the best one, whatever the coin."""
    if coins.position_R.shape[0] != scores_RV.shape[0]:
        raise ValueError(f"{scores_RV.shape[0]} rows but {coins.position_R.shape[0]} coins")
    return scores_RV.argmax(-1)


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


def tree_history(ancestors_STT: Tensor) -> History:
    """History of the rows of trees laid out one after another."""
    trees, nodes, _ = ancestors_STT.shape
    branch_S = torch.arange(trees, device=ancestors_STT.device)
    return History(branch_S[:, None].expand(trees, nodes).reshape(-1), ancestors_STT)
