"""The proposals of two drafters as one: each drafts for some of a round's branches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types import Proposal


def join(proposals: Sequence[Proposal | None], places: Sequence[Sequence[int]]) -> Proposal:
    """One tree per branch, smaller trees padded with nodes that nobody may accept.

    Args:
        proposals: None for a drafter whose branches are none of this round's.
        places: for each drafter which of the S trees are its own (host ints).
    """
    given = [(one, place) for one, place in zip(proposals, places, strict=True) if one is not None]
    if len(given) == 1:
        return given[0][0]
    nodes = max(one.tokens_SN.shape[1] for one, _ in given)
    order_S = torch.tensor([at for _, place in given for at in place]).argsort()

    def joined(name: str, empty: float) -> Tensor:
        parts = [_wide(getattr(one, name), nodes, empty) for one, _ in given]
        return torch.cat(parts)[order_S.to(parts[0].device)]

    return Proposal(
        joined("tokens_SN", 0),
        joined("parents_SN", -1),
        joined("depths_SN", 1),
        joined("valid_SN", False),
        joined("scores_SN", -torch.inf),
        max(one.levels for one, _ in given),
        side_outputs_SC=_side_outputs(given, order_S),
        is_chain=all(one.is_chain for one, _ in given),
    )


def _wide(value_SN: Tensor, nodes: int, empty: float) -> Tensor:
    more = value_SN.new_full((len(value_SN), nodes - value_SN.shape[1]), empty)
    return torch.cat([value_SN, more], 1)


def _side_outputs(
    given: Sequence[tuple[Proposal, Sequence[int]]], order_S: Tensor
) -> Tensor | None:
    """[S, C]; a drafter's own columns come first, zeros behind them."""
    outputs = [one.side_outputs_SC for one, _ in given]
    columns = max((value.shape[1] for value in outputs if value is not None), default=0)
    if not columns:
        return None
    none_S0 = [one.tokens_SN[:, :0] for one, _ in given]
    parts = [
        _wide(none if value is None else value, columns, 0)
        for value, none in zip(outputs, none_S0, strict=True)
    ]
    return torch.cat(parts)[order_S.to(parts[0].device)]
