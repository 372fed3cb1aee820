"""The proposals of two drafters as one: each drafts for some of a round's branches."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import Proposal


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
    order_S = torch.tensor([place for _, own in parts for place in own]).argsort()

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
    )
