"""Plain decoding through the same phases: every branch is offered a tree without nodes."""

import torch

from ...ops.registry import op
from ...ops.types import Proposal
from ..requests.branch import Branch
from ..requests.drafting import Drafting


@op("draft.expand_root_", drafters="none", writes="frontier", drops="draft_rows")
def expand_root_(draft_rows: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """No first level."""
    return draft_rows


@op("draft.grow_tree_", drafters="none", writes="proposal", drops="frontier")
def grow_tree_(drafting: Drafting, frontier: tuple[Branch, ...]) -> Proposal:
    """Trees [S, 0]: verifying them is one ordinary decoding step for all branches."""
    trees, device = len(frontier), drafting.device
    none_S0 = torch.zeros(trees, 0, dtype=torch.int64, device=device)
    return Proposal(none_S0, none_S0, none_S0, none_S0.bool(), none_S0.float(), 0, is_chain=True)
