"""A part of a request that a worker does: what of it the driver has been told."""

from collections.abc import Callable

from ....states.request import Branch, Request
from ...run.engine import Handle
from .messages import Assign, BranchEnded, Committed, Reply

OUTLINE = -1  # the number of the root branch


class PartialWork:
    """A part of a request on its way: what of it has been told."""

    def __init__(self, order: Assign, handle: Handle) -> None:
        self.name = order.work
        self.handle = handle
        assert handle.request is not None
        self.request = handle.request
        handed = order.handed
        self._told = {one.index: len(one.tokens) for one in handed.branches}
        self._told[-1] = len(handed.outline)
        self._ended: set[int] = set()

    def tell_news(
        self, tell: Callable[[Reply], None], rows_of: Callable[[Request], tuple[int, ...]]
    ) -> None:
        """What its branches have written since the last time, and which of them have ended; with an
        outline, which is told to have ended once its rows are kept, `rows_of` it."""
        self.request = self.handle.request or self.request  # another one, if it was run again
        root = self.request.root
        branches = self.request.branches
        if self.request.budget:
            for branch in branches:
                self._tell_tokens(branch, branch.index, tell)
                self._tell_end(branch, branch.index, tell)
            return
        outline = branches[0] if branches else root  # it may have ended before there was one
        if outline is not None:
            self._tell_tokens(outline, OUTLINE, tell)
            if self.handle.done:
                self._tell_end(outline, OUTLINE, tell, rows_of(self.request))

    def _tell_tokens(self, branch: Branch, index: int, tell: Callable[[Reply], None]) -> None:
        told = self._told.get(index, 0)
        if len(branch.tokens) > told:
            tell(Committed(self.name, index, told, tuple(branch.tokens[told:])))
            self._told[index] = len(branch.tokens)

    def _tell_end(
        self,
        branch: Branch,
        index: int,
        tell: Callable[[Reply], None],
        rows: tuple[int, ...] = (),
    ) -> None:
        if branch.ended and index not in self._ended:
            self._ended.add(index)
            tell(BranchEnded(self.name, index, str(branch.finish), branch.note, rows))
