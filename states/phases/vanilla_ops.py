"""The draft states of a small language model, and what its length policy remembers."""

from typing import Literal

import torch

from ...ops.draft.drawing import Drawing
from ...ops.draft.gamma_settings import GammaSettings
from ...ops.draft.vanilla import ChainStart, catch_up_, write_chain_
from ...ops.kv.pool import KVCache
from ...ops.registry import op
from ...ops.types import DraftRows, Proposal, Target
from ..requests.draft_state import TextState
from ..requests.drafting import Drafting


@op("draft.expand_root_", drafters="vanilla", writes="frontier", drops="draft_rows")
def expand_root_(
    drafting: Drafting,
    drafter: Target,
    draft_rows: DraftRows,
    kv_draft: KVCache,
    *,
    gamma: int,
    gamma_policy: str,
    gamma_min: int,
    gamma_max: int | None,
    egag_mode: Literal["linear", "seed"],
    egag_ema_beta: float,
    egag_h_ref: float | None,
) -> ChainStart:
    """Catch up with what was committed, in one forward, and plan how much to draft."""
    egag = (egag_mode, egag_ema_beta, egag_h_ref)
    lengths = GammaSettings(gamma, gamma_policy, gamma_min, gamma_max, *egag)
    memory, active = drafting.memory, drafting.active
    assert isinstance(memory, TextState)
    remaining = [b.budget - len(b.tokens) for b in active]
    remaining_S = torch.tensor(remaining, device=kv_draft.data.device)
    states = memory.plan_(active, lengths)
    return catch_up_(drafter, draft_rows, kv_draft, lengths, states, remaining_S)


@op("draft.grow_tree_", drafters="vanilla", writes="proposal", drops="frontier")
def grow_tree_(
    drafter: Target,
    frontier: ChainStart,
    kv_draft: KVCache,
    *,
    draws: str,
    accept: str = "match",
) -> Proposal:
    """One draft after another, for all branches at once."""
    drawing = Drawing.of(frontier.draft_rows, draws, accept)
    return write_chain_(drafter, frontier, kv_draft, drawing)
