"""The draft phases `expand_root` and `grow_tree`: each op calls the run's drafter."""

from typing import Any

from ...ops.registry import op
from ...ops.types import DraftRows, Proposal
from ..drafter import Drafter
from ..request import Branch


@op("branch.intake_", writes="draft_rows")
def intake_(drafter: Drafter, *, attention: str = "auto") -> DraftRows | tuple[Branch, ...]:
    """Everything committed since the drafter's last forward, of all branches, as its rows.

    The active branches alone for a drafter that needs no forward in this round.
    """
    return drafter.intake_(attention=attention)


@op("draft.expand_root_", writes="frontier", drops="draft_rows")
def expand_root_(drafter: Drafter, draft_rows: DraftRows | tuple[Branch, ...]) -> Any:
    """The drafter's forward over these rows, and the first level of all trees."""
    return drafter.root(draft_rows)


@op("draft.grow_tree_", writes="proposal", drops="frontier")
def grow_tree_(drafter: Drafter, frontier: Any) -> Proposal:
    """A token tree for every active branch."""
    return drafter.grow(frontier)
