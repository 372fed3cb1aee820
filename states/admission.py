"""How long texts get: what admission reserves of the pool for them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .graph.drafter_settings import nodes_for
from .graph.graph import Order
from .prefix_cache import PrefixCache
from .request import Branch, Finish, Request, Stage
from .request_table import RunLimits

BRANCH_PROMPT = 64  # slots of the prompt of a request's first branch, before any is known
AT_FIRST = 2  # half the budget is expected before any text has ended
MEMORY = 8  # texts that the mean remembers


class Expected:
    """Under reserved admission every text may need its whole budget. Under optimistic admission a
    part is expected to be as long as its outline says, other texts, and the prompts of parts that
    no outline names yet, as long as those before them; whoever has been preempted reserves
    everything, so that it is not soon again.
    """

    def __init__(self, *, optimistic: bool) -> None:
        self.optimistic = optimistic
        self._mean: dict[str, float] = {}  # of outlines, of answers, of prompts of parts

    def of(self, branch: Branch) -> int:
        """Tokens that are reserved for a branch: what it has written at least."""
        if not self.optimistic or branch.preempted:
            return branch.budget
        if branch.point is not None:
            return min(branch.budget, max(branch.point.length, len(branch.tokens)))
        guess = self._guess(branch.budget, _kind(branch))
        return min(branch.budget, max(guess, len(branch.tokens)))

    def of_new(self, request: Request) -> tuple[int, int]:
        """The same of a request that has no branch yet: for its outline, and its first branch."""
        if not self.optimistic:
            return request.outline_budget, request.budget
        outline = self._guess(request.outline_budget, "outline")
        return outline, self._guess(request.budget, "answer")

    def of_first(self, request: Request) -> int:
        """Tokens that are reserved for a request's first part, its prompt with them, before an
        outline names it."""
        prompt = self._mean.get("prompt", BRANCH_PROMPT) if self.optimistic else BRANCH_PROMPT
        return self.of_new(request)[1] + round(prompt)

    def _guess(self, budget: int, kind: str) -> int:
        mean = self._mean.get(kind)
        return min(budget, -(-budget // AT_FIRST) if mean is None else round(mean) + 1)

    def learn(self, branch: Branch) -> None:
        """A branch that has just ended, or goes on."""
        if branch.finish in (Finish.STOP, Finish.LENGTH):
            self._take(_kind(branch), len(branch.tokens))
            if branch.point is not None:
                self._take("prompt", len(branch.prompt))

    def _take(self, kind: str, length: int) -> None:
        before = self._mean.get(kind, length)
        self._mean[kind] = before + (length - before) / MEMORY


def _kind(branch: Branch) -> str:
    return "outline" if branch.is_root else "answer"


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


REGION = 64  # what a larger region is rounded up to


class Admission:
    """Who may start: what fits; `order` ranks the branches of one request.

    cache: of kept rows, of which those that nobody goes on from are as good as free.

    Attributes:
        expected: how long texts get. optimistic: they may get longer, and rows run out; a beam
            search, a branch in a row of its own and parts that stay until they are combined always
            reserve all that they may need.
    """

    def __init__(
        self, room: Room, order: Order, limits: RunLimits, cache: PrefixCache | None = None
    ) -> None:
        self.room = room
        self.order = order
        self.limits = limits
        self.cache = cache
        asked = limits.scheduler.admission == "optimistic"
        self.optimistic = asked and room.beams == 1 and not (room.rows or limits.holds_parts)
        self.expected = Expected(optimistic=self.optimistic)

    def missing(self, needed: int, active: int) -> int:
        """Rows that a round of so many branches lacks beside those that are needed; negative: so
        many are free."""
        return needed + self.room.tree_slots(active) - self.room.capacity

    def intake(
        self, requests: Iterable[Request], active: int, held_for: "HeldFor | None" = None
    ) -> "Intake":
        """Room for those that may start beside the open requests and so many active branches."""
        return Intake([*requests], active, self.room, self.pinned, self.expected, held_for)

    def claimed(
        self, requests: Iterable[Request], active: int, starting: Iterable[Branch | Request]
    ) -> int:
        """Slots of the only row that are held or reserved once these start, the trees of a round
        and the kept rows that somebody goes on from among them."""
        plan = self.intake(requests, active)
        for item in starting:
            plan.start(item if isinstance(item, Request) else item.request, item)
        return plan.used + self.room.tree_slots(plan.count)

    @property
    def pinned(self) -> int:
        return 0 if self.cache is None else self.cache.pinned

    def why_never(self, request: Request) -> str:
        """Why a request can never start, with the numbers; nothing if it can."""
        outline = len(request.given_ids) if self.limits.share_outline else 0
        prompt = len(request.prefix) + len(request.tail) + outline
        return self._why_never("prompt", prompt, self._needed(request))

    def why_never_branch(self, branch: Branch) -> str:
        """Why a branch whose prompt is known can never start; nothing if it can."""
        request = branch.request
        prompt = len(branch.prompt)
        more = len(request.hoist) + request.body_size - request.prefix_length  # that has no rows
        prefix = request.prefix_length + more + sum(one.own for one in branch.reads)
        needed = self.room.alone(prefix, prompt, branch.budget)
        return self._why_never("context", branch.begins + more + prompt, needed)

    def why_apart(self, request: Request) -> str:
        """Why parts cannot stay until they are combined, with the numbers; nothing if they can:
        there is room for the next one beside those that have ended, or (rows) for all."""
        needed = attended_slots(request, unknown=0)
        if not self.room.rows and request.combine is not None:
            later = [b for b in request.branches if b.stage is Stage.WAITING]
            one = max((len(b.prompt) + b.budget for b in later), default=0)
            live = sum(len(b.prompt) + b.budget for b in running(request))
            last = len(request.combine) + request.budget
            needed = kept_for(request) - live + (one if later or live else last)
        needed += self.room.tree_slots(1)
        return self._why_never("prefix", request.prefix_length, needed)

    def is_tight(self, request: Request) -> bool:
        """Whether its parts, all of them at their longest, do not fit side by side."""
        return not self.room.rows and attended_slots(request) > self.room.most

    def _why_never(self, what: str, tokens: int, needed: int) -> str:
        limit = self.limits.max_positions
        capacity = self.room.capacity
        if tokens >= limit:
            return f"{what} of {tokens} tokens, the model takes {limit}"
        return f"needs {needed} slots, the pool has {capacity}" if needed > capacity else ""

    def _needed(self, request: Request) -> int:
        return request_slots(request, self.room.beams) + self.room.tree_slots(1)  # all it may need

    def region(self, request: Request) -> tuple[int, int]:
        """Slots that a request's rows should find side by side, and the least of them."""
        needed = self._needed(request) - request.shared
        share = self.room.capacity // self.room.max_active
        least = -(-needed // REGION) * REGION
        # equal shares lie at equal distances, so that requests can be computed side by side
        return (share if needed <= share else least), min(least, self.room.capacity)


HeldFor = Callable[[Request], int]
"""Rows that a request which has not begun would go on behind, and that others hold anyway."""


class Intake:
    """Who starts in a step, and what that leaves for the next one; `count` branches would run.

    Attributes:
        full: nobody else may start, but in a row of its own. held: why the first who does not fit
            does not.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        active: int,
        room: Room,
        pinned: int,
        expected: Expected = RESERVED,
        held_for: HeldFor | None = None,
    ) -> None:
        self.room = room
        self.count = active
        self.expected = expected
        self.held_for = held_for
        self.open = requests
        # it is counted when somebody asks
        self._pinned = pinned
        self._used = -1
        self.live = {r.prefix_owner for r in self.open if running(r)}
        self.aside = {r.prefix_owner for r in self.open if room.rows and r.row_waits}
        self.branches: list[Branch] = []
        self.opened: list[Request] = []
        self.full = False
        self.held = ""

    @property
    def used(self) -> int:
        """Slots of the only row that are held or reserved."""
        if self._used < 0:
            rows = self.room.rows  # of its own each: nothing is counted
            self._used = 0 if rows else self._pinned + sum(map(self._all_of, self.open))
        return self._used

    def may_begin(self, request: Request) -> bool:
        """Whether one that must be alone would be, and nobody else is."""
        others = [one for one in (*self.open, *self.opened) if one is not request]
        if any(one.alone for one in others):
            self.held = self.held or f"{request.key}: {others[0].key} runs alone"
            return False
        if request.alone and others:
            self.held = self.held or f"{request.key}: runs alone, others are there"
            return False
        return True

    def take(self, request: Request, item: Branch | Request) -> bool:
        """Let a branch or a request start if there is room for it."""
        more = self._more(request, item)
        count = self.count + 1
        why = self._why_not(more, count, request)
        if why and item is request and count <= self.room.max_active:
            more -= self._held(request)
            why = self._why_not(more, count, request)
        if why:
            self.held = self.held or f"{request.key}: {why}"
            return False
        self.start(request, item, more)
        return True

    def start(self, request: Request, item: Branch | Request, more: int | None = None) -> None:
        """Let a branch or a request start, which takes so many slots more."""
        if not self.room.rows:
            self._used = self.used + (self._more(request, item) if more is None else more)
        self.live = self.live | {request.prefix_owner}
        self.count = self.count + 1
        self.aside = self.aside - {request.prefix_owner}
        if isinstance(item, Branch):
            self.branches.append(item)
        else:
            self.opened.append(item)

    def _held(self, request: Request) -> int:
        """Slots that a request which begins needs no room for."""
        if self.held_for is None or request.shared or request.combine is not None:
            return 0
        return self.held_for(request)

    def _why_not(self, more: int, count: int, request: Request) -> str:
        room = self.room
        if count > room.max_active:
            return f"{self.count} of {room.max_active} branches run"
        if room.rows and (rows := self._rows(count, request)) > room.rows:
            return f"needs row {rows} of {room.rows}"
        needed = more + room.tree_slots(count)
        if self.used + needed > room.capacity:
            return f"needs {needed} slots, {room.capacity - self.used} are free"
        return ""

    def has_row(self, request: Request) -> bool:
        """Whether a row holds its prefix and nothing else."""
        return self.room.rows > 0 and request in self.open and request.prefix_owner not in self.live

    def _more(self, request: Request, item: Branch | Request) -> int:
        """Slots that it takes beyond what is held: of the shared row, or of its own."""
        if isinstance(item, Request):  # one that is read in chunks has reserved all of it
            begun = item.stage is Stage.PREFILL and not self.room.rows
            slots = request_slots(item, self.room.beams, self.expected) - item.shared
            return 0 if begun else slots if item.combine is None else self._whole(item, slots)
        own = len(item.prompt) + self.expected.of(item)
        if self.room.rows:
            return request.prefix_length + len(request.hoist) + own
        if request.combine is not None and not request.apart:
            return own if request.alone else 0  # else it is reserved since the outline was read
        if request.prefix_owner in self.live:
            return own
        return own - self.expected.of_first(request)

    def _all_of(self, request: Request) -> int:
        """Slots that an open request holds or has reserved."""
        if request.combine is None:
            return reserved(request, self.room.beams, self.expected)
        if request.apart or not request.branches:
            return self._whole(request, reserved(request, self.room.beams, self.expected))
        whole = kept_for(request) if request.alone else attended_slots(request)
        return whole - request.shared

    def _whole(self, request: Request, slots: int) -> int:
        """Slots with those of the parts of an outline that is not read yet, if all must stay: then
        as much as a request may have, which runs alone if that is all."""
        if request.branches:
            return slots
        most = self.room.most - request.shared
        return max(slots, min(slots + request.most_parts * (BRANCH_PROMPT + request.budget), most))

    def _rows(self, count: int, starting: Request) -> int:
        """Rows in use: one for each branch, one for each open prefix without a branch, and one for
        each where finished parts are held and no branch runs."""
        own = {starting.prefix_owner}
        live = self.live | own
        empty = sum(r.prefix_owner not in live for r in self.open)
        return count + empty + len((self.aside & self.live) - own)


def ready(request: Request, order: Order) -> list[Branch]:
    """Its waiting branches whose prompts are known: by the outline's expected lengths, equal ones
    in reading order."""
    found = [b for b in request.branches if b.waits and b.prompt]
    sign = {"fcfs": 0, "longest_first": -1, "shortest_first": 1}[order]
    return sorted(found, key=lambda b: sign * b.point.length if b.point else 0)
