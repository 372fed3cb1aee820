"""Who there is: requests, their branches, and the segments that their rows belong to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic

from ..ops.draft.sizes import RoundCosts
from .graph.drafter_settings import DrafterSettings, nodes_for
from .graph.graph import AnyLayout, SchedulerBlock
from .request import ENDS, Branch, Finish, Request, move
from .segments import SegmentTree

DEADLINES = 64  # of requests that have ended, which are kept at least


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a graph fixes for all requests of a run.

    holds_parts: finished parts stay until one more branch has read them (`merge: attend`).
    costs: of either drafter, if it chooses how much to draft. accept: the rule of acceptance.
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
        """Drafted tokens of a tree, or by number of active branches, of either drafter."""
        first = self.drafter.offered
        second = self.outline_drafter
        if second is None:
            return first
        counts = range(1, self.layout.max_num_branches + 1)
        return {n: max(nodes_for(first, n), nodes_for(second.offered, n)) for n in counts}


class RequestTable:
    """Requests in the order of their submission, and the branches that run.

    Attributes:
        open: requests that have begun; nothing but these is looked at in every step.
        waiting: those that have not; both by prefix owner. ended: how many have come to an end.
        active: branches that run, in the order of every [S, ...] tensor.
        segments: what goes on behind what; a branch's `owner` and a request's `prefix_owner` are
            segments.
    """

    def __init__(self, limits: RunLimits) -> None:
        self.limits = limits
        self.segments = SegmentTree(apart=limits.layout.kind == "paged")
        self.open: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.active: list[Branch] = []
        self.ended = 0
        self._arrivals = count()
        self._requests: dict[int, Request] = {}
        self._branches: dict[int, Branch] = {}
        self._arrived: list[Request] = []
        self._cancelled: list[Request] = []
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap
        self._finished: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """All requests, finished ones until they are forgotten."""
        return list(self._requests.values())

    @property
    def unfinished(self) -> list[Request]:
        """Requests that wait or run, in the order of their submission."""
        return sorted((*self.open.values(), *self.waiting.values()), key=lambda one: one.arrival)

    @property
    def any_unfinished(self) -> bool:
        return bool(self.open or self.waiting)

    def request_of(self, owner: int) -> Request:
        """The request with this prefix."""
        return self._requests[owner]

    def branch_of(self, owner: int) -> Branch:
        """A branch of a request that has not ended."""
        return self._branches[owner]

    def add(self, request: Request) -> None:
        """Queue a request, with the branches that it may bring; budgets are cut to what the model
        can write at all."""
        request.prefix_owner = self.segments.add()
        for branch in request.all_branches():
            branch.owner = self.segments.add(request.prefix_owner)
            self._branches[branch.owner] = branch
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, id(request), request))
        self._requests[request.prefix_owner] = self.waiting[request.prefix_owner] = request
        self._arrived.append(request)
        limit = self.limits.max_positions
        request.budget = min(request.budget, limit)
        request.outline_budget = min(request.outline_budget, limit)

    def cancel(self, key: str) -> None:
        """End a request at the next step boundary; what it has written so far is kept."""
        for request in self.unfinished:
            if request.key == key:
                self.end(request, Finish.CANCELLED)

    def end(self, request: Request, finish: Finish, why: str = "") -> None:
        """End one request at the next step boundary, and say how."""
        if not (request.finished or request.cancelled):
            request.cancelled = True
            request.finish = finish
            request.why = why
            self._cancelled.append(request)

    def expire(self) -> None:
        """Requests whose time is up end at this step boundary."""
        while self._deadlines and (
            self._deadlines[0][2].finished or self._deadlines[0][0] <= monotonic()
        ):
            request = heappop(self._deadlines)[2]
            self.end(request, Finish.TIMEOUT, "its time was up")

    def take_arrived(self) -> list[Request]:
        """Requests that were added since the last call."""
        taken = self._arrived
        self._arrived = []
        return taken

    def take_cancelled(self) -> list[Request]:
        """Requests that are to be ended and have not ended by themselves."""
        taken = self._cancelled
        self._cancelled = []
        return [request for request in taken if not request.finished]

    def requeue(self, request: Request) -> None:
        """A request that has begun waits again."""
        del self.open[request.prefix_owner]
        self.waiting[request.prefix_owner] = request
        self._arrived.append(request)

    def begin(self, request: Request) -> None:
        """A request has been given its place; once, however often its prompt goes on."""
        if request.prefix_owner in self.waiting:
            self.open[request.prefix_owner] = self.waiting.pop(request.prefix_owner)

    def forget_finished(self) -> list[Request]:
        """Hand over the requests that have ended; nothing of them stays here."""
        ended = self.finished
        self._finished = []
        for request in ended:
            del self._requests[request.prefix_owner]
        if len(self._deadlines) > 2 * len(self._requests) + DEADLINES:
            self._deadlines = [one for one in self._deadlines if not one[2].finished]
            heapify(self._deadlines)
        return ended

    @property
    def finished(self) -> list[Request]:
        """Requests that have ended and were not handed over, in the order of their submission."""
        return sorted(self._finished, key=lambda one: one.arrival)

    def drop(self, request: Request) -> None:
        """A request goes as if it had never come."""
        self.active = [branch for branch in self.active if branch.request is not request]
        move("request", request, "cancel")
        self._leave(request)
        del self._requests[request.prefix_owner]

    def new_branch(self, request: Request, index: int, budget: int) -> Branch:
        """A branch that begins, or goes on behind what is written of it."""
        owner = self.segments.add(request.prefix_owner)
        branch = Branch(request, index, owner, min(budget, self.limits.max_positions))
        branch.tokens = [*request.begun.pop(index, ())[: max(branch.budget - 1, 0)]]
        branch.kept = max(len(branch.tokens) - 1, 0)  # the last one has no row yet
        self._branches[owner] = branch
        return branch

    def end_unstarted(self, request: Request, finish: Finish, why: str = "") -> None:
        """End a request that has no branch; its only branch says how."""
        branch = self.new_branch(request, 0, 0)
        branch.end(finish, why)
        request.branches = [branch]

    def close(self, request: Request) -> None:
        """All of a request's branches have ended."""
        move("request", request, ENDS[request.finish])
        self.ended += 1
        self._finished.append(request)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        for here in (self.open, self.waiting):
            here.pop(request.prefix_owner, None)
        for branch in request.all_branches():
            self._branches.pop(branch.owner, None)

    def bim(self, owner: int) -> int:
        """The number a row of this owner is shown with: -1 for a prefix, else the branch index."""
        branch = self._branches.get(owner)
        return -1 if branch is None else branch.index
