"""The requests of a run, the branches that run, and the segments of their rows.

A segment is a run of rows with consecutive positions. A row sees the segments on its path to the
root: a branch, the prefix of its request, cached rows of earlier requests. A fork is a new child: 0
bytes. A branch that combines others reads them in addition to its path."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heapify, heappop, heappush
from itertools import count
from operator import attrgetter
from time import monotonic

import numpy as np

from ..ops.attention.metadata import Visibility
from ..ops.draft.sizes import RoundCosts
from ..ops.kv.pool import NO_SEGMENT
from .graph.graph import Graph
from .request import ENDING_OF, Branch, Finish, Request, move

MAX_VISIBILITIES = 16  # sets of segments whose arrays are reused by later forwards


class SegmentTree:
    """Parents and homes of segments; ids are never reused.

    Segments with the same home take slots next to each other. A root is the home of its
    descendants; with `separate_homes` (the layout ``paged``) every segment is its own.
    lineage: all segments whose rows a segment sees: its path, and what it reads in addition;
    homes: of all these, its own first; visibility: the lineages of some segments as arrays."""

    def __init__(self, *, separate_homes: bool = False) -> None:
        self.separate_homes = separate_homes
        self.parent: dict[int, int] = {}
        self.home: dict[int, int] = {}
        # Cached calls: the hot path has no frame for them.
        self.lineage = cache(self._lineage)
        self.homes = cache(self._homes)
        self.visibility = lru_cache(MAX_VISIBILITIES)(self._visibility)
        self._ids = count()
        self._reads: dict[int, tuple[int, ...]] = {}

    def __contains__(self, segment: int) -> bool:
        return segment in self.parent

    def add(self, parent: int = NO_SEGMENT) -> int:
        segment = next(self._ids)
        self.parent[segment] = parent
        is_home = self.separate_homes or parent == NO_SEGMENT
        self.home[segment] = segment if is_home else self.home[parent]
        return segment

    def set_parent(self, segment: int, parent: int) -> None:
        self._invalidate_()
        self.parent[segment] = parent

    def set_reads(self, segment: int, others: Sequence[int]) -> None:
        """Let a segment attend to segments that are not on its path, in place: 0 bytes."""
        self._invalidate_()
        self._reads[segment] = tuple(others)

    def insert_above(self, segment: int) -> int:
        self._invalidate_()
        above = self.add()
        self.parent[above] = self.parent[segment]
        self.parent[segment] = above
        return above

    def make_home(self, segment: int) -> None:
        self._invalidate_()
        self.home[segment] = segment

    def remove(self, segments: Iterable[int]) -> None:
        """Remove segments without children; unknown ones are ignored."""
        self._invalidate_()
        for segment in segments:
            self.parent.pop(segment, None)
            self.home.pop(segment, None)
            self._reads.pop(segment, None)

    def merge_into_parent(self, segment: int, parent: int) -> None:
        """Remove a segment whose rows joined its parent's."""
        self.remove([segment])
        for child, above in self.parent.items():
            if above == segment:
                self.parent[child] = parent

    def path(self, segment: int) -> list[int]:
        path = [segment]
        while (parent := self.parent[path[-1]]) != NO_SEGMENT:
            path.append(parent)
        return path

    def _lineage(self, segment: int) -> tuple[int, ...]:
        return (*self.path(segment), *self._reads.get(segment, ()))

    def _homes(self, segment: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.home[above] for above in self.lineage(segment)))

    def _visibility(self, segments: tuple[int, ...]) -> Visibility:
        paths = [self.lineage(segment) for segment in segments]
        path_SA = np.full((len(paths), max(map(len, paths), default=1)), NO_SEGMENT, np.int32)
        for row_A, path in zip(path_SA, paths, strict=True):
            row_A[: len(path)] = path
        return Visibility(np.array(segments, np.int32), path_SA, tuple(map(self.homes, segments)))

    def _invalidate_(self) -> None:
        self.lineage.cache_clear()
        self.homes.cache_clear()
        self.visibility.cache_clear()


SPARE_DEADLINES = 64  # deadlines of ended requests that stay in the heap
ARRIVAL = attrgetter("arrival")


@dataclass(frozen=True, slots=True)
class RunLimits:
    """What a graph and its models fix for all requests of a run. costs, outline_costs: measured,
    for the drafters that choose their draft size."""

    graph: Graph
    max_positions: int
    vocabulary: int
    costs: RoundCosts | None = None
    outline_costs: RoundCosts | None = None

    @property
    def share_outline(self) -> bool:
        return self.graph.skeleton is None or self.graph.skeleton.share == "outline"


class RequestTable:
    """Requests in the order of their submission, and the branches that run.

    open: started requests by prefix owner; waiting: those that have not started; ended: how many.
    active: running branches, in the order of [S, ...] tensors. arrived: requests added or requeued
    since the last plan. cancelled: requests to end at this step boundary. deadlines: a heap."""

    def __init__(self, limits: RunLimits) -> None:
        self.limits = limits
        self.segments = SegmentTree(separate_homes=limits.graph.layout.kind == "paged")
        self.open: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.active: list[Branch] = []
        self.ended = 0
        self._arrivals = count()
        self.arrived: list[Request] = []
        self.cancelled: list[Request] = []
        self.deadlines: list[tuple[float, int, Request]] = []
        self._finished: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """All that were not forgotten, in the order of their submission."""
        return sorted((*self.open.values(), *self.waiting.values(), *self._finished), key=ARRIVAL)

    @property
    def unfinished(self) -> list[Request]:
        """Requests that wait or run, in the order of their submission."""
        return sorted((*self.open.values(), *self.waiting.values()), key=ARRIVAL)

    def add(self, request: Request) -> None:
        request.prefix_owner = self.segments.add()
        for branch in request.all_branches():
            branch.owner = self.segments.add(request.prefix_owner)
        if request.arrival < 0:
            request.arrival = next(self._arrivals)
        if request.deadline is not None:
            heappush(self.deadlines, (request.deadline, id(request), request))
        self.waiting[request.prefix_owner] = request
        self.arrived.append(request)
        request.budget = min(request.budget, self.limits.max_positions)
        request.outline_budget = min(request.outline_budget, self.limits.max_positions)

    def cancel(self, key: str) -> None:
        """End requests with this key at the next step boundary; their tokens until then stay."""
        for request in self.unfinished:
            if request.key == key:
                self.end(request, Finish.CANCELLED)

    def end(self, request: Request, finish: Finish, why: str = "") -> None:
        if not (request.finished or request.cancelled):
            request.cancelled = True
            request.finish = finish
            request.why = why
            self.cancelled.append(request)

    def expire(self) -> None:
        """End requests past their deadline at this step boundary."""
        deadlines = self.deadlines
        while deadlines and (deadlines[0][2].finished or deadlines[0][0] <= monotonic()):
            self.end(heappop(deadlines)[2], Finish.TIMEOUT, "its time was up")

    def begin(self, request: Request) -> None:
        if request.prefix_owner in self.waiting:
            self.open[request.prefix_owner] = self.waiting.pop(request.prefix_owner)

    def forget_finished(self) -> list[Request]:
        """Return the ended requests and remove them from the table."""
        ended = self.finished
        self._finished = []
        if len(self.deadlines) > 2 * (len(self.open) + len(self.waiting)) + SPARE_DEADLINES:
            self.deadlines = [entry for entry in self.deadlines if not entry[2].finished]
            heapify(self.deadlines)
        return ended

    @property
    def finished(self) -> list[Request]:
        """Ended requests that were not forgotten, in the order of their submission."""
        return sorted(self._finished, key=ARRIVAL)

    def drop(self, request: Request) -> None:
        """Remove a request without an answer."""
        self.active = [branch for branch in self.active if branch.request is not request]
        move(request, "cancel")
        self._remove(request)

    def new_branch(self, request: Request, index: int, budget: int) -> Branch:
        """A new branch, with the tokens that were decoded elsewhere, if any."""
        owner = self.segments.add(request.prefix_owner)
        branch = Branch(request, index, owner, min(budget, self.limits.max_positions))
        branch.continue_(request.resumed_tokens.pop(index, ())[: max(branch.budget - 1, 0)])
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
