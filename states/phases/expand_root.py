"""The phase `expand_root`: the drafter reads the new rows and proposes the first level."""

from typing import Any

from ...ops.registry import op
from ...ops.types import DraftRows
from ..drafter import Drafter
from ..request import Branch


@op("branch.intake_", writes="draft_rows")
def intake_(drafter: Drafter, *, attention: str = "auto") -> DraftRows | tuple[Branch, ...]:
    """The rows committed since the drafter's last forward, of all branches. Only the active
    branches for a drafter that needs no forward in this round."""
    return drafter.intake_(attention=attention)


@op("draft.expand_root_", writes="frontier", drops="draft_rows")
def expand_root_(drafter: Drafter, draft_rows: DraftRows | tuple[Branch, ...]) -> Any:
    """The drafter's forward over these rows, and the first level of all trees."""
    return drafter.root(draft_rows)
