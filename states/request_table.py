"""The requests of a run, the branches that run, and the segments of their rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic

from ..ops.draft.sizes import RoundCosts
from .graph.drafter_settings import DrafterSettings, nodes_for
from .graph.graph import AnyLayout, SchedulerBlock
from .request import ENDING_OF, Branch, Finish, Request, move
from .segments import SegmentTree

SPARE_DEADLINES = 64  # deadlines of ended requests that stay in the heap


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a graph fixes for all requests of a run.

    holds_parts: finished parts stay until one more branch has read them (`merge: attend`).
    costs, outline_costs: measured costs of a round for the drafters that choose their draft size.
    accept: the acceptance rule of the target.
    """

    layout: AnyLayout
    drafter: DrafterSettings
    share_outline: bool
    max_positions: int
    vocabulary: int
    outline_drafter: DrafterSettings | None = None
    scheduler: SchedulerBlock = field(default_factory=lambda: SchedulerBlock.model_validate({}))
    holds_parts: bool = False
    costs: RoundCosts | None = None
    outline_costs: RoundCosts | None = None
    accept: str = "match"

    @property
    def nodes(self) -> int | Mapping[int, int]:
        """Drafted tokens per tree, or by number of active branches; the larger of both drafters."""
        first = self.drafter.offered
        second = self.outline_drafter
        if second is None:
            return first
        counts = range(1, self.layout.max_num_branches + 1)
        return {n: max(nodes_for(first, n), nodes_for(second.offered, n)) for n in counts}


class RequestTable:
    """Requests in the order of their submission, and the branches that run.

    Attributes:
        open: started requests by prefix owner; a step looks at these alone.
        waiting: requests that have not started, by prefix owner. ended: number of ended requests.
        active: running branches, in the order of every [S, ...] tensor.
        arrived: requests added or requeued since the last plan. cancelled: requests to end at this
            step boundary. deadlines: a heap of (time, id, request).
        segments: the tree of segments; a branch's `owner` and a request's `prefix_owner` are
            segments.
    """

    def __init__(self, limits: RunLimits) -> None:
        self.limits = limits
        self.segments = SegmentTree(separate_homes=limits.layout.kind == "paged")
        self.open: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.active: list[Branch] = []
        self.ended = 0
        self._arrivals = count()
        self._requests: dict[int, Request] = {}
        self._branches: dict[int, Branch] = {}
        self.arrived: list[Request] = []
        self.cancelled: list[Request] = []
        self.deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._finished: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """All requests, finished ones until `forget_finished`."""
        return list(self._requests.values())

    @property
    def unfinished(self) -> list[Request]:
        """Requests that wait or run, in the order of their submission."""
        unfinished = (*self.open.values(), *self.waiting.values())
        return sorted(unfinished, key=lambda request: request.arrival)

    @property
    def any_unfinished(self) -> bool:
        return bool(self.open or self.waiting)

    def request_of(self, owner: int) -> Request:
        """The request with this prefix owner."""
        return self._requests[owner]

    def branch_of(self, owner: int) -> Branch:
        """The branch with this owner, of a request that has not ended."""
        return self._branches[owner]

    def add(self, request: Request) -> None:
        """Queue a request with its branches, if any; budgets are cut to the model's context."""
        request.prefix_owner = self.segments.add()
        for branch in request.all_branches():
            branch.owner = self.segments.add(request.prefix_owner)
            self._branches[branch.owner] = branch
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        if request.deadline is not None:
            heappush(self.deadlines, (request.deadline, id(request), request))
        self._requests[request.prefix_owner] = request
        self.waiting[request.prefix_owner] = request
        self.arrived.append(request)
        limit = self.limits.max_positions
        request.budget = min(request.budget, limit)
        request.outline_budget = min(request.outline_budget, limit)

    def cancel(self, key: str) -> None:
        """End requests with this key at the next step boundary; their tokens until then stay."""
        for request in self.unfinished:
            if request.key == key:
                self.end(request, Finish.CANCELLED)

    def end(self, request: Request, finish: Finish, why: str = "") -> None:
        """End a request at the next step boundary with this reason."""
        if not (request.finished or request.cancelled):
            request.cancelled = True
            request.finish = finish
            request.why = why
            self.cancelled.append(request)

    def expire(self) -> None:
        """End requests past their deadline at this step boundary."""
        deadlines = self.deadlines
        while deadlines and (deadlines[0][2].finished or deadlines[0][0] <= monotonic()):
            request = heappop(deadlines)[2]
            self.end(request, Finish.TIMEOUT, "its time was up")

    def drain_arrived(self) -> list[Request]:
        """Requests added since the last call."""
        arrived = self.arrived
        self.arrived = []
        return arrived

    def drain_cancelled(self) -> list[Request]:
        """Requests to end that have not ended by themselves."""
        cancelled = self.cancelled
        self.cancelled = []
        return [request for request in cancelled if not request.finished]

    def requeue(self, request: Request) -> None:
        """Let a preempted request wait again."""
        del self.open[request.prefix_owner]
        self.waiting[request.prefix_owner] = request
        self.arrived.append(request)

    def begin(self, request: Request) -> None:
        """Mark a request as started; repeated calls (chunks of its prompt) do nothing."""
        if request.prefix_owner in self.waiting:
            self.open[request.prefix_owner] = self.waiting.pop(request.prefix_owner)

    def forget_finished(self) -> list[Request]:
        """Return the ended requests and remove them from the table."""
        ended = self.finished
        self._finished = []
        for request in ended:
            del self._requests[request.prefix_owner]
        if len(self.deadlines) > 2 * len(self._requests) + SPARE_DEADLINES:
            self.deadlines = [entry for entry in self.deadlines if not entry[2].finished]
            heapify(self.deadlines)
        return ended

    @property
    def finished(self) -> list[Request]:
        """Ended requests that were not forgotten, in the order of their submission."""
        return sorted(self._finished, key=lambda request: request.arrival)

    def drop(self, request: Request) -> None:
        """Remove a request without an answer."""
        self.active = [branch for branch in self.active if branch.request is not request]
        move(request, "cancel")
        self._remove(request)
        del self._requests[request.prefix_owner]

    def new_branch(self, request: Request, index: int, budget: int) -> Branch:
        """A new branch, with the tokens that were decoded elsewhere, if any."""
        owner = self.segments.add(request.prefix_owner)
        branch = Branch(request, index, owner, min(budget, self.limits.max_positions))
        branch.tokens = [*request.resumed_tokens.pop(index, ())[: max(branch.budget - 1, 0)]]
        branch.num_cached_tokens = max(len(branch.tokens) - 1, 0)  # the last token has no row yet
        self._branches[owner] = branch
        return branch

    def end_unstarted(self, request: Request, finish: Finish, why: str = "") -> None:
        """End a request without branches; its only branch records the reason."""
        branch = self.new_branch(request, 0, 0)
        branch.end(finish, why)
        request.branches = [branch]

    def close(self, request: Request) -> None:
        """End a request whose branches have all ended."""
        move(request, ENDING_OF[request.finish])
        self.ended += 1
        self._finished.append(request)
        self._remove(request)

    def _remove(self, request: Request) -> None:
        self.open.pop(request.prefix_owner, None)
        self.waiting.pop(request.prefix_owner, None)
        for branch in request.all_branches():
            self._branches.pop(branch.owner, None)

    def bim(self, owner: int) -> int:
        """The branch index map value of a row of this owner: -1 for a prefix."""
        branch = self._branches.get(owner)
        return -1 if branch is None else branch.index
