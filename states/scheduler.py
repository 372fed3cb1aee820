"""The scheduler: what is ready in a step, and which requests and branches start in it.

A step is planned once, from host integers. Guards of the graph test the plan, and the order of the
graph's transitions is the priority. No step looks at every waiting request."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, merge
from itertools import islice
from threading import Condition

from .admission import Intake, ready_branches
from .graph.graph import SchedulerBlock
from .lifecycle import Lifecycle
from .policies import Candidate, PolicyError, Rank, find_policy
from .request import WAITING_STAGES, Branch, Finish, Request, Stage, reason_of

MAX_OVERTAKEN = 16  # waiting requests that an overtaking policy considers in a step
MAX_NAMES = 4  # names in a reason
MIN_CHUNK = 8  # prompt tokens that a step reads at least, however many rows the trees need


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What is ready in a step; guards test nothing else.

    A step has at most one target forward, so at most one of the lists of branches is filled.

    why: the reason, in words. outlines: keys of requests whose outlines are complete. answers: how
    many are due. folds: branches that combine finished parts; parallel: branches that start in a
    forward of their own; branches: others that start. requests: those that start; chunks: those
    whose prompts are read on, and by how many tokens. running, waiting: numbers of branches and of
    requests; blocked: why the first of these does not fit. preempted: names."""

    number: int
    why: str
    outlines: tuple[str, ...] = ()
    answers: int = 0
    folds: tuple[Branch, ...] = ()
    parallel: tuple[Branch, ...] = ()
    branches: tuple[Branch, ...] = ()
    requests: tuple[Request, ...] = ()
    chunks: tuple[tuple[Request, int], ...] = ()
    running: int = 0
    waiting: int = 0
    blocked: str = ""
    preempted: tuple[str, ...] = ()

    @property
    def starting(self) -> tuple[Branch, ...]:
        return self.folds or self.parallel or self.branches

    @property
    def num_starts(self) -> int:
        return len(self.starting) + len(self.requests) + len(self.chunks)

    @property
    def is_idle(self) -> bool:
        return not (self.outlines or self.answers or self.running or self.num_starts)


class Inbox:
    """Requests submitted and ended from any thread. stays: more may come. serves: answers are due
    one by one, not all at the end. sleeps: `wait` blocks; otherwise the caller of the run waits."""

    def __init__(self, *, stays: bool = False, serves: bool = False, sleeps: bool = True) -> None:
        self.stays = stays
        self.serves = serves
        self.sleeps = sleeps
        self._changed = Condition()
        self._arrived: list[Request] = []
        self._ended: list[tuple[Request, Finish]] = []

    @property
    def over(self) -> bool:
        return not (self.stays or self._arrived or self._ended)

    def submit(self, requests: Iterable[Request]) -> bool:
        with self._changed:
            if self.stays:
                self._arrived += requests
                self._changed.notify_all()
            return self.stays

    def end(self, request: Request, finish: Finish) -> None:
        with self._changed:
            self._ended.append((request, finish))
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.stays = False
            self._changed.notify_all()

    def drain(self) -> tuple[list[Request], list[tuple[Request, Finish]]]:
        if not (self._arrived or self._ended):  # the usual case needs no lock
            return [], []
        with self._changed:
            arrived = self._arrived
            ended = self._ended
            self._arrived = []
            self._ended = []
            return arrived, ended

    def wait(self, seconds: float | None = None) -> None:
        if not self.sleeps:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self.stays or self._arrived or self._ended, seconds)


def trim_(intake: Intake, rows: int) -> None:
    """Reduce an intake to what fits into these rows of the next forward. Prompts that are half read
    come first, then branches, then new requests. The first prompt that does not fit is read in
    part, or alone if it contains reused documents."""
    finishing = [request for request in intake.requests if request.stage is Stage.PREFILL]
    new = [request for request in intake.requests if request.stage is not Stage.PREFILL]
    items: list[Branch | Request] = [*finishing, *intake.branches, *new]
    intake.branches = []
    intake.requests = []
    remaining = max(rows, MIN_CHUNK)
    for request in intake.open:
        if request.stage is not Stage.PREFILL or request in finishing:
            continue
        # Its first branch has no slot yet, so only the prefix is prefilled.
        if (count := min(_max_chunk(request), remaining)) > 0:
            intake.chunks.append((request, count))
            remaining -= count
    for item in items:
        if remaining <= 0:
            break
        if isinstance(item, Branch):
            max_chunk = 0
            cost = len(item.rows) + len(item.request.common_prompt)
        else:
            max_chunk = _max_chunk(item)
            cost = item.prompt_size - item.prefix_length
        if cost <= remaining or not (max_chunk or intake.starts):
            intake.add(item)
        elif isinstance(item, Request) and max_chunk:
            intake.chunks.append((item, min(remaining, max_chunk)))
            cost = remaining
        else:
            break
        remaining -= cost


def _max_chunk(item: Request) -> int:
    """Prompt tokens that can be read before the first branch starts; 0: all or nothing."""
    if item.body.chunks or item.tail.chunks:
        return 0
    if item.first_branch is not None:
        return item.body_size - item.prefix_length
    if item.given_outline is not None:
        return len(item.prefix) - item.prefix_length
    return max(item.prompt_size - 1 - item.prefix_length, 0)


# Rank, then two numbers that are never equal, then the request and its branch.
Item = tuple[Rank, int, int, Request, Branch | None]


class Scheduler:
    """Plans each step from host integers. Raises PolicyError if its policy cannot be found."""

    def __init__(self, lifecycle: Lifecycle, block: SchedulerBlock) -> None:
        self.lifecycle = lifecycle
        self.table = lifecycle.table
        self.kv_cache = lifecycle.kv_cache
        self.admission = lifecycle.admission
        self.block = block
        self.policy = find_policy(block.policy)
        self.steps = 0
        self._answered = 0  # requests that had ended when answers were last due
        self._parsed = False  # whether the last step parsed outlines
        self._queue: list[Item] = []  # a heap of requests that have not started
        self._queued: set[int] = set()  # those in it, by prefix owner
        self._preempted: list[Branch | Request] = []  # in this step
        self._last_turn = 0  # the last step in which a request started in spite of its rank

    def plan_(self, *, serves: bool) -> StepPlan:
        """The plan of the next step; serves: answers are due one by one, not all at the end."""
        self.steps += 1
        self._preempted = []
        arrived = self.table.arrived
        self.table.arrived = []
        for request in arrived:
            request.step = request.step or self.steps
            if request.prefix_owner not in self._queued:
                self._queued.add(request.prefix_owner)
                heappush(self._queue, self._item(request, None, -1))
        after_parse = self._parsed
        outlines = [r for r in self.table.open.values() if r.outline_ended]
        self._parsed = bool(outlines)
        if outlines:
            plan = self._plan(f"outlines are complete: {_names(outlines)}")
            return replace(plan, outlines=tuple(request.key for request in outlines))
        all_ended = not (self.table.open or self.table.waiting)
        if self.table.ended > self._answered and (serves or all_ended):
            count = self.table.ended - self._answered
            self._answered = self.table.ended
            return replace(self._plan(f"{count} ended"), answers=count)
        return self._plan_forward(after_parse)

    def _plan_forward(self, after_parse: bool) -> StepPlan:
        """The prompts that start and the branches that run."""
        self._free_rows_for_round_()
        running = len(self.table.active)
        if running and not (self._queue or self._some_wait()):
            return self._plan(f"{running} run")
        intake = self._choose()
        if folds := tuple(branch for branch in intake.branches if branch.combines):
            return replace(self._plan(f"parts are complete: {_names(folds)}", intake), folds=folds)
        if self.block.max_num_batched_tokens is not None:
            tree_rows = self.admission.capacity.round_rows(running)
            trim_(intake, self.block.max_num_batched_tokens - tree_rows)
        branches = tuple(intake.branches)
        if any(b.request.outline_budget for b in branches) and (after_parse or not running):
            why = "outlines were parsed" if after_parse else "no branch runs"
            return replace(self._plan(f"{why}: {_names(branches)}", intake), parallel=branches)
        names = _names((*branches, *intake.requests))
        if running:
            why = f"{running} run" + (f", {names} join" if names else "")
        elif intake.starts:
            why = f"no branch runs: {names}"
        elif self.admission.optimistic and self._free_rows_():
            return self._plan_forward(after_parse)
        else:
            why = "nothing can start"
        for request, count in intake.chunks:
            first = request.prefix_length
            part = f"from {first} to {first + count} of {request.prompt_size}"
            why += f", {request.key} is read {part}"
        return replace(
            self._plan(why, intake),
            branches=branches,
            requests=tuple(intake.requests),
            chunks=tuple(intake.chunks),
        )

    def _some_wait(self) -> bool:
        """Whether an open request has a prompt to read or a branch that waits."""
        for request in self.table.open.values():
            if request.stage is Stage.PREFILL:
                return True
            for branch in request.branches:  # no call per branch
                if branch.stage in WAITING_STAGES:
                    return True
        return False

    def _plan(self, why: str, intake: Intake | None = None) -> StepPlan:
        """The plan of a step in which nothing starts."""
        if self._preempted:
            why += f"; rows ran out: {_names(self._preempted)} preempted"
        return StepPlan(
            number=self.steps,
            why=why,
            running=len(self.table.active),
            waiting=len(self.table.waiting),
            blocked="" if intake is None else intake.blocked,
            preempted=tuple(item.name for item in self._preempted),
        )

    def _free_rows_for_round_(self) -> None:
        """Free rows until the trees of the next round fit; the oldest request is not preempted."""
        if not self.admission.optimistic:
            return
        kv = self.kv_cache.pools[0]
        capacity = self.admission.capacity
        active = self.table.active
        while kv.needed_length + capacity.tree_slots(len(active)) > capacity.capacity:
            if not self._free_rows_():
                return
        if self.kv_cache.prefixes is not None:
            free = kv.slots - kv.current_length
            cache = self.kv_cache.prefixes.cache
            cache.evict_to_(cache.idle - max(capacity.tree_slots(len(active)) - free, 0))

    def _free_rows_(self) -> bool:
        """Preempt the youngest branch, or the youngest request if it has only one and is not alone,
        or return borrowed cached rows; whether anything changed."""
        youngest = max(self.table.open.values(), key=lambda item: item.arrival, default=None)
        running = [branch for branch in self.table.active if branch.request is youngest]
        victim = running[-1] if len(running) > 1 else youngest
        if victim is None or (victim is youngest and len(self.table.open) == 1):
            prefixes = self.kv_cache.prefixes
            return prefixes is not None and prefixes.return_borrowed_()
        self._preempted.append(victim)
        self.lifecycle.preempt_(victim)
        return True

    def _choose(self) -> Intake:
        """The items that can start next to the running branches, in the order of their rank.

        When an item does not fit, no item after it starts, unless the policy lets others overtake
        it, for at most `max_wait` steps, or a branch has the row of its own idle prefix. While
        nothing runs, later items may start, because only their rows can block the first one."""
        prefixes = self.kv_cache.prefixes
        intake = Intake(
            self.admission,
            self.table.open.values(),
            len(self.table.active),
            None if prefixes is None else prefixes.rows_held_by_others,
        )
        popped: list[Item] = []
        turn = self._turn()
        overdue = [] if turn is None or not turn.waits else [_first_item(turn)]
        branches = sorted([*overdue, *self._branches(turn)])
        for item in merge(branches, self._requests(intake, popped, turn)):
            request, branch = item[3:]
            if branch is None and not intake.allows(request):
                intake.full = True
            if intake.full and not intake.has_row(request):
                continue
            if intake.admit(request, branch or request):
                self._last_turn = self.steps if request is turn else self._last_turn
                continue
            if not intake.count:
                continue
            crowded = intake.count >= intake.capacity.max_active
            strict = not self.policy.overtakes or request is turn
            intake.full |= crowded or strict or self.steps - request.step > self.block.max_wait
        for item in popped:  # requests that do start are skipped when they are popped again
            heappush(self._queue, item)
        for request in intake.requests:
            if request.stage is Stage.WAITING and not request.shared:
                request.drafted = self.kv_cache.drafter.reads()
        if prefixes is not None and intake.requests:
            intake.requests = prefixes.select_(intake.requests)
        return intake

    def _turn(self) -> Request | None:
        """The request that has waited longest, if it starts next in spite of its rank."""
        if self.policy.fair or self.steps - self._last_turn <= self.block.max_wait:
            return None
        candidates = [*islice(self.table.waiting.values(), 1), *self.table.open.values()]
        waiting = [r for r in candidates if r.waits or any(b.waits for b in r.branches)]
        return min(waiting, key=lambda request: request.arrival, default=None)

    def _requests(self, intake: Intake, popped: list[Item], turn: Request | None) -> Iterator[Item]:
        """Requests that have not started, except the overdue one."""
        while self._queue and not intake.full:
            if self.policy.overtakes and intake.count and len(popped) >= MAX_OVERTAKEN:
                return
            item = heappop(self._queue)
            if item[3].waits:
                popped.append(item)
                if item[3] is not turn:
                    yield item
            else:
                self._queued.discard(item[3].prefix_owner)

    def _branches(self, turn: Request | None) -> Iterator[Item]:
        for request in self.table.open.values():
            if request.stage is Stage.PREFILL:  # a half-read prompt is read to its end first
                yield _first_item(request)
                continue
            order = self.table.limits.graph.layout.order
            for place, branch in enumerate(ready_branches(request, order)):
                item = self._item(request, branch, place)
                yield ((), *item[1:]) if request is turn else item

    def _item(self, request: Request, branch: Branch | None, place: int) -> Item:
        remaining = request.remaining_tokens
        candidate = Candidate(
            arrival=request.arrival,
            step=request.step,
            is_open=branch is not None or request.stage is Stage.PREEMPTED,
            place=max(place, 0),
            prompt=request.prompt_size if branch is None else len(branch.prompt),
            request_tokens=remaining,
            own_tokens=remaining if branch is None else branch.budget - len(branch.tokens),
        )
        try:
            rank = self.policy.rank(candidate)
            if not (isinstance(rank, tuple) and all(map(int.__instancecheck__, rank))):
                raise TypeError(f"a rank is a tuple of integers, not {rank!r}")
        except Exception as error:
            name = self.block.policy
            raise PolicyError(f"scheduler.policy {name!r}: {reason_of(error)}") from error
        return rank, request.prefix_owner, place, request, branch


def _first_item(request: Request) -> Item:
    return (), request.prefix_owner, -1, request, None


def _names(items: Sequence[Branch | Request]) -> str:
    more = len(items) - MAX_NAMES
    names = ", ".join(item.name for item in items[:MAX_NAMES])
    return names + (f" and {more} more" if more > 0 else "")
