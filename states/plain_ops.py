"""Plain decoding through the same phases: every branch is offered a tree without nodes."""

import torch

from ..ops.registry import op
from ..ops.types import Proposal
from .manager import BranchStateManager


@op("branch.intake_", drafters="none", writes="draft_rows")
def intake_(branches: BranchStateManager) -> int:
    """Nothing to take in; only how many branches are active."""
    return len(branches.active)


@op("draft.expand_root_", drafters="none", writes="frontier", drops="draft_rows")
def expand_root_(draft_rows: int) -> int:
    """No first level."""
    return draft_rows


@op("draft.grow_tree_", drafters="none", writes="proposal", drops="frontier")
def grow_tree_(branches: BranchStateManager, frontier: int) -> Proposal:
    """Trees [S, 0]: verifying them is one ordinary decoding step for all branches."""
    none_S0 = torch.zeros(frontier, 0, dtype=torch.int64, device=branches.kv.data.device)
    return Proposal(none_S0, none_S0, none_S0, none_S0.bool(), none_S0.float(), 0)
