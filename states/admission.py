"""Admission: whether a request or a branch fits into the KV pool, as arithmetic over slots."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from .graph.drafter_settings import nodes_for
from .prefix_cache import PrefixCache
from .request import COMPLETE, Branch, Request, Stage
from .request_table import RunLimits

PROMPT_ESTIMATE = 64  # slots of the prompt of a request's first branch, before any is known
FIRST_ESTIMATE = 2  # 1/2 of the budget is expected before any text has ended
MEAN_WINDOW = 8  # texts in the moving mean
REGION_STEP = 64  # larger regions are rounded up to a multiple of it


class LengthEstimator:
    """The number of tokens that admission reserves for a text: an estimate if optimistic."""

    def __init__(self, *, optimistic: bool) -> None:
        self.optimistic = optimistic
        self._mean: dict[str, float] = {}  # of outlines, of answers, of prompts of parts

    def of(self, branch: Branch) -> int:
        """Tokens reserved for a branch, at least those it has decoded."""
        if not self.optimistic or branch.preempted:  # a second preemption would thrash
            return branch.budget
        expected = self._estimate(branch.budget, _kind(branch))
        estimate = expected if branch.point is None else branch.point.length
        return min(branch.budget, max(estimate, len(branch.tokens)))

    def of_new(self, request: Request) -> tuple[int, int]:
        """Tokens reserved for the outline and the first branch of a request without branches."""
        outline = self._estimate(request.outline_budget, "outline")
        return outline, self._estimate(request.budget, "answer")

    def of_first(self, request: Request) -> int:
        """Slots reserved for the first part, its prompt included, before the outline names it."""
        prompt = self._mean.get("prompt", PROMPT_ESTIMATE) if self.optimistic else PROMPT_ESTIMATE
        return self.of_new(request)[1] + round(prompt)

    def _estimate(self, budget: int, kind: str) -> int:
        if not self.optimistic:
            return budget
        mean = self._mean.get(kind)
        return min(budget, -(-budget // FIRST_ESTIMATE) if mean is None else round(mean) + 1)

    def learn(self, branch: Branch) -> None:
        if branch.finish not in COMPLETE:
            return
        lengths = {_kind(branch): len(branch.tokens)}
        if branch.point is not None:
            lengths["prompt"] = len(branch.prompt)
        for kind, length in lengths.items():
            before = self._mean.get(kind, length)
            self._mean[kind] = before + (length - before) / MEAN_WINDOW


def _kind(branch: Branch) -> str:
    return "outline" if branch.is_root else "answer"


RESERVED = LengthEstimator(optimistic=False)


@dataclass(frozen=True)
class CapacityModel:
    """The slots of a row of the target's pool (`capacity`), and those that trees need.

    nodes: drafted tokens per branch (0 without a drafter), or by number of active branches.
    rows: rows of the pool if every branch has a row of its own (``batching``), else 0.
    shared: drafted tokens of all branches together (`rows_per_round`), if they share them.
    beams: hypotheses of a branch, each of which may need rows for the whole budget."""

    capacity: int
    max_active: int
    nodes: int | Mapping[int, int]
    rows: int = 0
    shared: int | None = None
    beams: int = 1

    def tree_slots(self, active: int) -> int:
        """Slots of a row for the trees of a round while up to `active` branches run."""
        return self._tree_slots[max(active, 1) - 1]

    @cached_property
    def _tree_slots(self) -> tuple[int, ...]:
        """By number of branches, never fewer for more of them."""
        counts = range(1, self.max_active + 1)
        if self.rows:  # one tree in each row, as large as it gets with any number of branches
            return (max(self._drafted(count, 1) + 1 for count in counts),) * len(counts)
        return tuple(accumulate((self._drafted(count, count) + count for count in counts), max))

    def round_rows(self, active: int) -> int:
        return active + self._drafted(active, active) if active else 0

    def _drafted(self, active: int, trees: int) -> int:
        drafted = trees * nodes_for(self.nodes, active)
        return drafted if self.shared is None else min(drafted, self.shared)

    def slots_alone(self, prefix: int, prompt: int, budget: int) -> int:
        return prefix + prompt + budget + self.tree_slots(1)


def request_slots(request: Request, beams: int = 1, lengths: LengthEstimator = RESERVED) -> int:
    """Slots that a waiting request reserves: prompt, outline, and its first branch."""
    outline, answer = lengths.of_new(request)
    later = outline + lengths.of_first(request) - answer if request.outline_budget else 0
    if (first := request.first_branch) is not None:
        slots = request.body_size + len(request.common_prompt)
        slots += len(first.prompt) + lengths.of(first)
        return slots + (later if first.is_root else 0)
    slots = len(request.prefix) + len(request.tail) + len(request.given_ids)
    return slots + later + beams * answer


def attended_slots(request: Request, prompt_estimate: int = PROMPT_ESTIMATE) -> int:
    """Slots of a request whose parts stay until one more branch has combined them."""
    waiting = [branch for branch in request.branches if branch.stage is Stage.WAITING]
    slots = retained_slots(request)
    slots += sum((len(b.prompt) or prompt_estimate) + b.budget for b in waiting)
    if request.combine is None or len(request.branches) < 2 or request.branches[-1].combines:
        return slots
    return slots + len(request.combine) + request.budget


def retained_slots(request: Request) -> int:
    """Slots of the parts that stay, and those that the running parts have reserved."""
    parts = sum(branch.num_tokens for branch in request.branches if branch.stays)
    live = sum(len(branch.prompt) + branch.budget for branch in running_branches(request))
    return request.prefix_length + len(request.common_prompt) + parts + live


def running_branches(request: Request) -> list[Branch]:
    return [branch for branch in request.all_branches() if branch.stage is Stage.RUNNING]


class Admission:
    """Decides what fits; cache: the prefix cache, whose idle rows count as free.

    A branch reserves its prompt and its whole budget, and every round needs slots for all trees, so
    an admitted branch can run to its end. If optimistic, it reserves an estimate, and rows may run
    out; beam search, a row per branch and parts that stay always reserve the whole budget."""

    def __init__(
        self, *, capacity: CapacityModel, limits: RunLimits, cache: PrefixCache | None = None
    ) -> None:
        self.capacity = capacity
        self.limits = limits
        self.cache = cache
        skeleton = limits.graph.skeleton
        keeps_parts = skeleton is not None and skeleton.merge == "attend"
        exact = capacity.beams > 1 or capacity.rows > 0 or keeps_parts
        self.optimistic = limits.graph.scheduler.admission == "optimistic" and not exact
        self.lengths = LengthEstimator(optimistic=self.optimistic)

    def claimed(
        self, requests: Iterable[Request], active: int, starting: Iterable[Branch | Request]
    ) -> int:
        """Slots of the only pool row that are held or reserved once `starting` have started."""
        intake = Intake(self, requests, active)
        for item in starting:
            intake.start(item if isinstance(item, Request) else item.request, item)
        return intake.used + self.capacity.tree_slots(intake.count)

    @property
    def pinned(self) -> int:
        return 0 if self.cache is None else self.cache.pinned

    def why_never(self, request: Request) -> str:
        """Why a request can never start, with the numbers; empty if it can."""
        outline = len(request.given_ids) if self.limits.share_outline else 0
        prompt = len(request.prefix) + len(request.tail) + outline
        return self._why_never("prompt", prompt, self._needed(request))

    def why_never_branch(self, branch: Branch) -> str:
        request = branch.request
        prompt = len(branch.prompt)
        prefix = len(request.common_prompt) + request.body_size
        tokens = branch.first_position + prefix - request.prefix_length + prompt
        prefix += sum(part.num_tokens for part in branch.reads)
        needed = self.capacity.slots_alone(prefix, prompt, branch.budget)
        return self._why_never("context", tokens, needed)

    def why_isolated(self, request: Request) -> str:
        """Why the pool has no slots for the next part next to those that ended; empty if it has."""
        needed = attended_slots(request, prompt_estimate=0)
        if not self.capacity.rows and request.combine is not None:
            waiting = [b for b in request.branches if b.stage is Stage.WAITING]
            largest = max((len(b.prompt) + b.budget for b in waiting), default=0)
            live = sum(len(b.prompt) + b.budget for b in running_branches(request))
            last = len(request.combine) + request.budget
            needed = retained_slots(request) - live + (largest if waiting or live else last)
        needed += self.capacity.tree_slots(1)
        return self._why_never("prefix", request.prefix_length, needed)

    def is_tight(self, request: Request) -> bool:
        """Whether its parts at full length do not fit into the pool together."""
        needed = attended_slots(request) + self.capacity.tree_slots(1)
        return not self.capacity.rows and needed > self.capacity.capacity

    def _why_never(self, text: str, tokens: int, needed: int) -> str:
        limit = self.limits.max_positions
        slots = self.capacity.capacity
        if tokens >= limit:
            return f"{text} of {tokens} tokens, the model takes {limit}"
        return f"needs {needed} slots, the pool has {slots}" if needed > slots else ""

    def _needed(self, request: Request) -> int:
        return request_slots(request, self.capacity.beams) + self.capacity.tree_slots(1)

    def region(self, request: Request) -> tuple[int, int]:
        needed = self._needed(request) - request.shared
        share = self.capacity.capacity // self.capacity.max_active
        least = -(-needed // REGION_STEP) * REGION_STEP
        # Equal shares have equal strides, so requests can be computed in one batched product.
        return (share if needed <= share else least), min(least, self.capacity.capacity)


class Intake:
    """The items that start in a step, and the slots that remain; `count` branches would run.

    chunks: requests whose prompts are read on, and by how many tokens.
    live: prefix owners of open requests with a running branch; retaining: of those with a pool row
    of retained parts alone. full: no other item may start, except in a row of its own. blocked: why
    the first item that does not fit has to wait."""

    def __init__(
        self,
        admission: Admission,
        requests: Iterable[Request],
        active: int,
        rows_held_by_others: Callable[[Request], int] | None = None,
    ) -> None:
        self.capacity = admission.capacity
        self.lengths = admission.lengths
        self.count = active
        self.rows_held_by_others = rows_held_by_others
        self.open = [*requests]
        self._pinned = admission.pinned
        self._used = -1  # computed on demand
        self.live = {r.prefix_owner for r in self.open if running_branches(r)}
        self.retaining = {r.prefix_owner for r in self.open if self.capacity.rows and _row_waits(r)}
        self.branches: list[Branch] = []
        self.requests: list[Request] = []
        self.chunks: list[tuple[Request, int]] = []
        self.full = False
        self.blocked = ""

    @property
    def used(self) -> int:
        """Slots of the only pool row that are held or reserved; 0 with a row per branch."""
        if self._used < 0:
            shared_row = not self.capacity.rows
            self._used = self._pinned + sum(map(self._reserved, self.open)) if shared_row else 0
        return self._used

    def allows(self, request: Request) -> bool:
        """Whether no exclusive request prevents the start of this one."""
        others = [other for other in (*self.open, *self.requests) if other is not request]
        why = "runs alone, others run" if request.exclusive and others else ""
        if any(other.exclusive for other in others):
            why = f"{others[0].key} runs alone"
        if why:
            self.blocked = self.blocked or f"{request.key}: {why}"
        return not why

    def admit(self, request: Request, item: Branch | Request) -> bool:
        slots = self._more(request, item)
        why = self._why_not(slots, request)
        if why and item is request and self.count < self.capacity.max_active:
            if self.rows_held_by_others and not request.shared and request.combine is None:
                slots -= self.rows_held_by_others(request)
            why = self._why_not(slots, request)
        if why:
            self.blocked = self.blocked or f"{request.key}: {why}"
            return False
        self.start(request, item, slots)
        return True

    def start(self, request: Request, item: Branch | Request, slots: int | None = None) -> None:
        if not self.capacity.rows:
            self._used = self.used + (self._more(request, item) if slots is None else slots)
        self.live.add(request.prefix_owner)
        self.count += 1
        self.retaining.discard(request.prefix_owner)
        self.add(item)

    @property
    def starts(self) -> bool:
        return bool(self.branches or self.requests or self.chunks)

    def add(self, item: Branch | Request) -> None:
        if isinstance(item, Branch):
            self.branches.append(item)
        else:
            self.requests.append(item)

    def _why_not(self, slots: int, request: Request) -> str:
        capacity = self.capacity
        count = self.count + 1
        if count > capacity.max_active:
            return f"running branches: {self.count} of {capacity.max_active}"
        if capacity.rows and (rows := self._rows(count, request)) > capacity.rows:
            return f"needs row {rows} of {capacity.rows}"
        needed = slots + capacity.tree_slots(count)
        if self.used + needed > capacity.capacity:
            return f"needs {needed} slots, {capacity.capacity - self.used} are free"
        return ""

    def has_row(self, request: Request) -> bool:
        is_open = self.capacity.rows > 0 and request in self.open
        return is_open and request.prefix_owner not in self.live

    def _more(self, request: Request, item: Branch | Request) -> int:
        """Slots that the item needs besides those held: of the shared row, or of its own row."""
        if isinstance(item, Request):
            if item.stage is Stage.PREFILL and not self.capacity.rows:
                return 0  # a request that is read in chunks has reserved all its slots
            return self._of_new(item)
        slots = len(item.prompt) + self.lengths.of(item)
        if self.capacity.rows:
            return request.prefix_length + len(request.common_prompt) + slots
        if request.combine is not None and not request.isolated:
            return slots if request.exclusive else 0  # otherwise reserved since the parse
        if request.prefix_owner in self.live:
            return slots
        return slots - self.lengths.of_first(request)

    def _reserved(self, request: Request) -> int:
        """Slots that an open request holds or has reserved, trees excluded."""
        if request.combine is not None and request.branches and not request.isolated:
            slots = retained_slots(request) if request.exclusive else attended_slots(request)
            return slots - request.shared
        if request.stage is Stage.PREFILL:
            return self._of_new(request)
        slots = request.prefix_length - request.shared + len(request.common_prompt)
        running = running_branches(request)
        for branch in running:
            cached = max(branch.first_own_row - branch.start, 0)
            slots += len(branch.prompt) + self.capacity.beams * self.lengths.of(branch) - cached
        outlines = request.root is not None and request.stage is Stage.OUTLINE
        if outlines or (not running and any(branch.waits for branch in request.all_branches())):
            slots += self.lengths.of_first(request)
        return self._with_parts(request, slots)

    def _of_new(self, request: Request) -> int:
        """Slots that a request without running branches reserves until its outline is parsed."""
        slots = request_slots(request, self.capacity.beams, self.lengths) - request.shared
        return self._with_parts(request, slots)

    def _with_parts(self, request: Request, slots: int) -> int:
        """Slots with those of the parts of an outline that is not parsed yet, if all parts stay."""
        if request.combine is None or request.branches:
            return slots
        most = self.capacity.capacity - self.capacity.tree_slots(1) - request.shared
        parts = request.most_parts * (PROMPT_ESTIMATE + request.budget)
        return max(slots, min(slots + parts, most))

    def _rows(self, count: int, starting: Request) -> int:
        """Pool rows in use: of branches, of open prefixes without one, and of retained parts."""
        live = self.live | {starting.prefix_owner}
        empty = sum(request.prefix_owner not in live for request in self.open)
        return count + empty + len((self.retaining & self.live) - {starting.prefix_owner})


def _row_waits(request: Request) -> bool:
    """Whether a pool row holds retained parts and no running branch."""
    running = any(b.in_shared_row and b.stage is Stage.RUNNING for b in request.branches)
    return not running and any(branch.retained for branch in request.branches)


def ready_branches(request: Request, order: str) -> list[Branch]:
    """Its waiting branches with known prompts, sorted by the lengths that the outline expects."""
    branches = [b for b in request.branches if b.waits and b.prompt]
    sign = {"fcfs": 0, "longest_first": -1, "shortest_first": 1}[order]
    return sorted(branches, key=lambda b: sign * b.point.length if b.point else 0)
