"""The forward in flight: what a placing op lays out and a committing op reads."""

from dataclasses import dataclass

from ...ops.drafted import NO_WORK, DraftWork
from ...ops.types import Rows
from ..layout.layout import Span
from ..layout.tree_rows import PlacedRows
from ..requests.branch import Branch, Request


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward and whom they belong to; on the blackboard until it is committed.

    placed: the rows, where they went, and where the trees' nodes are. rows: the same with how their
        tokens are drawn and which of them are cached.
    ran: the branches with a tree in it, in the proposal's order. newcomers: those that start with
        it; opened: the requests that do. spans: prefill rows, as in `placed.spans`.
    forced: trees, as in the proposal; work: what drafting them cost.
    """

    rows: Rows
    placed: PlacedRows
    ran: tuple[Branch, ...]
    newcomers: tuple[Branch, ...]
    opened: tuple[Request, ...]
    spans: tuple[Span, ...]
    forced: tuple[int, ...] = ()
    work: DraftWork = NO_WORK

    @property
    def everyone(self) -> tuple[Branch, ...]:
        """Who gets tokens from it: those that had a tree, then those that begin."""
        return self.ran + self.newcomers
