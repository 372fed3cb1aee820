"""The draft states of a small language model, and what its length policy remembers."""

import torch

from ...ops.draft.drawing import Drawing
from ...ops.draft.vanilla import ChainStart, catch_up_, write_chain_
from ...ops.kv.pool import KVCache
from ...ops.registry import op
from ...ops.types import DraftRows, Proposal, Target
from ..requests.manager import BranchStateManager


@op("draft.expand_root_", drafters="vanilla", writes="frontier", drops="draft_rows")
def expand_root_(
    branches: BranchStateManager, drafter: Target, draft_rows: DraftRows, kv_draft: KVCache
) -> ChainStart:
    """Catch up with what was committed, in one forward, and plan how much to draft."""
    settings = branches.rules.drafter.lengths
    assert settings is not None
    remaining = [b.budget - len(b.tokens) for b in branches.active]
    remaining_S = torch.tensor(remaining, device=kv_draft.data.device)
    states = [branches.length_state(b) for b in branches.active]
    return catch_up_(drafter, draft_rows, kv_draft, settings, states, remaining_S)


@op("draft.grow_tree_", drafters="vanilla", writes="proposal", drops="frontier")
def grow_tree_(
    drafter: Target, frontier: ChainStart, kv_draft: KVCache, *, draws: str, accept: str = "match"
) -> Proposal:
    """One draft after another, for all branches at once."""
    drawing = Drawing.of(frontier.draft_rows, draws, accept)
    return write_chain_(drafter, frontier, kv_draft, drawing)
