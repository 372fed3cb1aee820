"""How much of the pools requests and branches need: arithmetic over slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...ops.draft.eagle import nodes_for
from .branch import Branch, Request, Stage
from .expected import BRANCH_PROMPT, Expected


@dataclass(frozen=True)
class Room:
    """The target pool's capacity and what a round's trees take of it.

    capacity: slots of a row of the pool.
    nodes: drafted tokens per branch (0 without a drafter), or by number of active branches.
    rows: of the pool if every branch has one of its own (``batching``), else 0.
    shared: drafted tokens of all branches together, if they share them.
    beams: hypotheses of a branch, each of which may need rows for the whole budget.
    """

    capacity: int
    max_active: int
    nodes: int | Mapping[int, int]
    rows: int = 0
    shared: int | None = None
    beams: int = 1

    def tree_slots(self, active: int) -> int:
        """Slots of a row for the trees of a round while up to `active` branches run."""
        if self.rows:  # one tree in each row, as large as it gets with any number of branches
            return max(self._drafted(count, 1) + 1 for count in range(1, self.rows + 1))
        known = self._by_count
        while len(known) < active:
            count = len(known) + 1
            known.append(max(known[-1], self._drafted(count, count) + count))
        return known[max(active, 1) - 1]

    @cached_property
    def _by_count(self) -> list[int]:
        """Slots for the trees of up to 1, 2, ... branches, as far as somebody has asked."""
        return [self._drafted(1, 1) + 1]

    def round_rows(self, active: int) -> int:
        """Rows of a forward for the trees of so many branches."""
        return active + self._drafted(active, active) if active else 0

    def _drafted(self, active: int, trees: int) -> int:
        """Most drafted tokens of so many trees while `active` branches run."""
        most = trees * nodes_for(self.nodes, active)
        return most if self.shared is None else min(most, self.shared)

    @property
    def most(self) -> int:
        """Slots that one request may have beside its trees."""
        return self.capacity - self.tree_slots(1)

    def alone(self, prefix: int, prompt: int, budget: int) -> int:
        """Slots that one branch needs if nothing else runs."""
        return prefix + prompt + budget + self.tree_slots(1)


RESERVED = Expected(optimistic=False)


def reserved(request: Request, beams: int, expected: Expected) -> int:
    """Slots that an open request holds or has reserved, trees not counted."""
    if request.stage is Stage.PREFILL:
        return request_slots(request, beams, expected) - request.shared
    live = 0
    waits = False
    for branch in request.all_branches():
        if branch.stage is Stage.RUNNING:
            live += _at_most(branch, beams, expected)
        elif branch.waits:
            waits = True
    outlines = request.root is not None and request.stage is Stage.OUTLINE
    first = 0
    if outlines or (waits and not live):
        first = expected.of_first(request)
    return request.prefix_length - request.shared + len(request.hoist) + live + first


def _at_most(branch: Branch, beams: int, expected: Expected) -> int:
    """Slots of a running branch's own in the end, kept ones not counted."""
    kept = max(branch.shared - branch.start, 0)
    return len(branch.prompt) + beams * expected.of(branch) - kept


def request_slots(request: Request, beams: int = 1, expected: Expected = RESERVED) -> int:
    """Slots that a waiting request reserves: prompt, outline, and its first branch."""
    outline, answer = expected.of_new(request)
    later = outline + expected.of_first(request) - answer if request.outline_budget else 0
    if (first := request.first) is not None:
        own = request.body_size + len(request.hoist) + len(first.prompt) + expected.of(first)
        return own + (later if first.is_root else 0)
    own = len(request.prefix) + len(request.tail) + len(request.given_ids)
    return own + later + beams * answer


def attended_slots(request: Request, unknown: int = BRANCH_PROMPT) -> int:
    """Slots of a request whose parts stay until one more branch has combined them.

    Args:
        unknown: taken for prompts that are not known yet.
    """
    later = (b for b in request.branches if b.stage is Stage.WAITING)
    slots = kept_for(request) + sum((len(b.prompt) or unknown) + b.budget for b in later)
    if request.combine is None or len(request.branches) < 2 or request.branches[-1].combines:
        return slots
    return slots + len(request.combine) + request.budget


def kept_for(request: Request) -> int:
    """What of them is there already, and what the running parts have reserved."""
    parts = sum(b.own for b in request.branches if b.stays)
    live = sum(len(b.prompt) + b.budget for b in running(request))
    return request.prefix_length + len(request.hoist) + parts + live


def running(request: Request) -> list[Branch]:
    return [b for b in request.all_branches() if b.stage is Stage.RUNNING]
