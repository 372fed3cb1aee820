"""Who there is: requests, their branches, and the segments that their rows belong to."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...ops.draft.eagle import nodes_for
from ..cache.segments import SegmentTree
from ..graph.drafter_spec import Drafter
from ..graph.graph import AnyLayout
from .branch import Branch, Finish, Request, Stage


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a graph fixes for all requests of a run."""

    layout: AnyLayout
    drafter: Drafter
    share_outline: bool
    max_positions: int
    vocabulary: int
    outline_drafter: Drafter | None = None
    prefix_cache: bool = False

    @property
    def nodes(self) -> int | Mapping[int, int]:
        """Drafted tokens of a tree, or by number of active branches, of either drafter."""
        first, second = self.drafter.offered, self.outline_drafter
        if second is None:
            return first
        counts = range(1, self.layout.max_active + 1)
        return {n: max(nodes_for(first, n), nodes_for(second.offered, n)) for n in counts}


class RequestTable:
    """Requests in the order of their submission, and the branches that run.

    Attributes:
        unfinished: requests that wait or run; nothing but these is looked at between forwards.
        active: branches that run, in the order of every [S, ...] tensor.
        segments: what goes on behind what; a branch's `owner` and a request's `prefix_owner` are
            segments.
    """

    def __init__(self, limits: RunLimits) -> None:
        self.limits = limits
        self.segments = SegmentTree()
        self.unfinished: list[Request] = []
        self.active: list[Branch] = []
        self._requests: dict[int, Request] = {}

    @property
    def requests(self) -> list[Request]:
        """All requests, finished ones until they are forgotten."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Queue a request; budgets are cut to what the model can write at all."""
        request.prefix_owner = self.segments.add()
        self._requests[request.prefix_owner] = request
        self.unfinished.append(request)
        limit = self.limits.max_positions
        request.budget = min(request.budget, limit)
        request.outline_budget = min(request.outline_budget, limit)

    def cancel(self, key: str) -> None:
        """End a request at the next step boundary; what it has written so far is kept."""
        for request in self.unfinished:
            if request.key == key:
                request.cancelled = True

    def forget_finished(self) -> list[Request]:
        """Hand over the requests that have ended; nothing of them stays here."""
        ended = [request for request in self.requests if request.finished]
        for request in ended:
            del self._requests[request.prefix_owner]
        return ended

    def new_branch(self, request: Request, index: int, budget: int) -> Branch:
        owner = self.segments.add(request.prefix_owner)
        return Branch(request, index, owner, min(budget, self.limits.max_positions))

    def end_unstarted(self, request: Request, finish: Finish, why: str = "") -> None:
        """End a request that has no branch; its only branch says how."""
        branch = self.new_branch(request, 0, 0)
        branch.end(finish, why)
        request.branches = [branch]

    def close(self, request: Request) -> None:
        """All of a request's branches have ended."""
        request.stage = Stage.DONE
        self.unfinished.remove(request)

    def bim(self, owner: int) -> int:
        """The number a row of this owner is shown with: -1 for a prefix, else the branch index."""
        everyone = (b for request in self.unfinished for b in request.all_branches())
        return next((branch.index for branch in everyone if branch.owner == owner), -1)
