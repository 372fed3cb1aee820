"""The draft states that read host memory: a small language model's, n-grams', and no drafter's."""

from collections.abc import Mapping
from typing import Literal

from ...ops.draft.drawing import Drawing
from ...ops.draft.eagle import nodes_for
from ...ops.draft.gamma_settings import LOOKING, GammaSettings
from ...ops.draft.host_tree import pack
from ...ops.draft.proposals import nothing
from ...ops.draft.vanilla import ChainStart, catch_up_, write_chain_
from ...ops.forward import Target
from ...ops.kv.pool import KVCache
from ...ops.registry import op
from ...ops.types import DraftRows, Proposal
from ..draft_state import TextState
from ..drafting import Drafting
from ..ngram_state import NgramState
from ..request import Branch


@op("draft.expand_root_", drafters="none ngram", writes="frontier", drops="draft_rows")
def expand_nothing(draft_rows: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """No first level: there is no tree, or all of it is looked up at once."""
    return draft_rows


@op("draft.grow_tree_", drafters="none", writes="proposal", drops="frontier")
def grow_nothing(drafting: Drafting, frontier: tuple[Branch, ...]) -> Proposal:
    """Trees [S, 0]: verifying them is one ordinary decoding step for all branches."""
    return nothing(len(frontier), drafting.layout.device)


@op("draft.grow_tree_", drafters="ngram", writes="proposal", drops="frontier")
def grow_ngrams_(
    drafting: Drafting,
    frontier: tuple[Branch, ...],
    *,
    method: str,
    nodes: int | Mapping[int, int] | str,
    levels: int,
    longest: int,
    width: int,
    scope: str,
) -> Proposal:
    """What followed the last tokens of each branch before, as a tree."""
    memory = drafting.memory
    assert isinstance(memory, NgramState)
    choice = drafting.choice
    if choice is not None and not choice.size:
        return nothing(len(frontier), drafting.layout.device)
    count = nodes_for(nodes, len(frontier)) if choice is None else choice.size
    if method == "lookup":
        trees = [memory.lookup_(one, count, levels, longest, width) for one in frontier]
    else:
        trees = [memory.count_(one, count, levels, longest, width, scope) for one in frontier]
    return pack(trees, drafting.layout.device)


@op("draft.expand_root_", drafters="vanilla", writes="frontier", drops="draft_rows")
def catch_text_up_(
    drafting: Drafting,
    drafter: Target,
    draft_rows: DraftRows | tuple[Branch, ...],
    kv_draft: KVCache,
    *,
    gamma: int,
    gamma_policy: str,
    gamma_min: int,
    gamma_max: int | None,
    gamma_limit: float | None,
    egag_mode: Literal["linear", "seed"],
    egag_ema_beta: float,
    egag_h_ref: float | None,
) -> ChainStart | tuple[Branch, ...]:
    """Plan how much to draft, and catch up with what was committed, in one forward; where a round
    drafts nothing, that waits."""
    egag = (egag_mode, egag_ema_beta, egag_h_ref)
    settings = GammaSettings(gamma, gamma_policy, gamma_min, gamma_max, gamma_limit, *egag)
    memory = drafting.memory
    assert isinstance(memory, TextState)
    active = drafting.active
    choice = drafting.choice
    lengths = memory.plan_(active, settings, drafter.vocab_size, choice if active else None)
    if isinstance(draft_rows, tuple):
        return draft_rows
    return catch_up_(drafter, draft_rows, kv_draft, lengths, gamma_policy in LOOKING)


@op("draft.grow_tree_", drafters="vanilla", writes="proposal", drops="frontier")
def grow_chain_(
    drafting: Drafting,
    drafter: Target,
    frontier: ChainStart | tuple[Branch, ...],
    kv_draft: KVCache,
    *,
    draws: str,
    accept: str = "match",
) -> Proposal:
    """One draft after another, for all branches at once."""
    if isinstance(frontier, tuple):
        return nothing(len(frontier), kv_draft.data.device)
    drawing = Drawing.of(frontier.draft_rows, draws, accept)
    return write_chain_(drafter, frontier, kv_draft, drawing)
