"""The draft states of n-gram drafting: no model and no forward, only what was written before."""

from collections.abc import Mapping

from ...ops.draft.eagle import nodes_for
from ...ops.draft.host_tree import pack
from ...ops.registry import op
from ...ops.types import Proposal
from ..requests.branch import Branch
from ..requests.drafting import Drafting
from ..requests.ngram_state import NgramState


@op("draft.expand_root_", drafters="ngram", writes="frontier", drops="draft_rows")
def expand_root_(draft_rows: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """No level of its own: the whole tree is looked up at once."""
    return draft_rows


@op("draft.grow_tree_", drafters="ngram", writes="proposal", drops="frontier")
def grow_tree_(
    drafting: Drafting,
    frontier: tuple[Branch, ...],
    *,
    method: str,
    nodes: int | Mapping[int, int],
    levels: int,
    longest: int,
    width: int,
    scope: str,
) -> Proposal:
    """What followed the last tokens of each branch before, as a tree."""
    memory = drafting.memory
    assert isinstance(memory, NgramState)
    count = nodes_for(nodes, len(frontier))
    if method == "lookup":
        trees = [memory.lookup_(one, count, levels, longest, width) for one in frontier]
    else:
        trees = [memory.count_(one, count, levels, longest, width, scope) for one in frontier]
    return pack(trees, drafting.device)
