"""What a step does and for whom: decided once, by the op of the state `schedule`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush, merge
from threading import Condition
from typing import Protocol

from .admission import Admission, Intake, ready
from .graph.graph import SchedulerBlock
from .policies import Candidate, PolicyError, Rank, find_policy
from .request import Branch, Finish, Request, Stage, reason_of
from .request_table import RequestTable


class Does(StrEnum):
    """The one thing that a step does."""

    PARSE = "parse"  # read outlines that are written
    ANSWER = "answer"  # hand over the answers of requests that have ended
    FOLD = "fold"  # combine the finished parts of requests
    OPEN = "open"  # read the prompts of requests, nobody runs
    FORK = "fork"  # read the prompts of branches in a forward of their own
    ROUND = "round"  # draft and verify for everybody who runs; prompts may ride along
    REST = "rest"  # nobody is there


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step of the run, in host integers and ids; the ways out of `schedule` read nothing else.

    number: of the step, from 1. why: the reason for what it does, in words.
    branches: owners of the branches that start. requests: prefix owners of those that begin.
    chunks: prefix owners of requests whose prompts go on, and by how many tokens.
    running: branches that are drafted for and verified.
    waiting: requests that have not begun. held: why the first of all that could start does not.
    preempted: names of branches, and requests, that make way from this step on.
    """

    number: int
    does: Does
    why: str
    branches: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    running: int = 0
    waiting: int = 0
    held: str = ""
    preempted: tuple[str, ...] = ()

    @property
    def starts(self) -> int:
        """How many branches and requests begin, or are read on."""
        return len(self.branches) + len(self.requests) + len(self.chunks)


class Inbox:
    """New requests, and those that somebody wants to end. A closed inbox takes no new ones.

    A run over a closed list has an inbox that is closed from the start.

    Args:
        stays: whether requests may still come.
        serves: whether answers are wanted one by one, not all of them at the end.
        sleeps: whether to wait for what comes; else whoever drives the run does.
    """

    def __init__(self, *, stays: bool = False, serves: bool = False, sleeps: bool = True) -> None:
        self._stays = stays
        self.serves = serves
        self.sleeps = sleeps
        self._changed = Condition()
        self._arrived: list[Request] = []
        self._ended: list[tuple[Request, Finish]] = []

    @property
    def stays(self) -> bool:
        """Whether requests may still come."""
        return self._stays

    @property
    def over(self) -> bool:
        """Nothing is left to be taken in, and nothing will come."""
        return not (self._stays or self._arrived or self._ended)

    def submit(self, requests: Iterable[Request]) -> bool:
        """Hand requests over; False if none are taken any more."""
        with self._changed:
            if self._stays:
                self._arrived += requests
                self._changed.notify_all()
            return self._stays

    def end(self, request: Request, finish: Finish) -> None:
        """End a request at the next step; what it has written until then is kept."""
        with self._changed:
            self._ended.append((request, finish))
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more requests."""
        with self._changed:
            self._stays = False
            self._changed.notify_all()

    def take(self) -> tuple[list[Request], list[tuple[Request, Finish]]]:
        """Everything since the last call: who came, and who is to end."""
        if not (self._arrived or self._ended):  # the usual case takes no lock
            return [], []
        with self._changed:
            taken = self._arrived, self._ended
            self._arrived = []
            self._ended = []
            return taken

    def wait(self, seconds: float | None = None) -> None:
        """Sleep until there is something to take, or nothing will come any more."""
        if not self.sleeps:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._stays or self._arrived or self._ended, seconds)


LEAST = 8  # tokens that are read in a step at least, however many rows the trees take


@dataclass(slots=True)
class Portion:
    """Who starts within the budget, and which prompts go on; what does not fit waits."""

    branches: list[Branch] = field(default_factory=list)
    opened: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)

    def add(self, item: Branch | Request) -> None:
        """Somebody starts."""
        if isinstance(item, Branch):
            self.branches.append(item)
        else:
            self.opened.append(item)


def portion(intake: Intake, reading: Sequence[Request], rows: int, most: int | None) -> Portion:
    """Of all that could start, what has rows in the next forward.

    Prompts that are half read come first, then branches, then new requests. One that fits into what
    is left is read to its end, the next one as far as it goes. One that cannot be cut (documents
    that are reused stand in it) is read alone.

    Args:
        reading: open requests whose prompts are half read. rows: of the trees in that forward.
        most: rows of a forward; None for no limit.
    """
    if most is None:
        return Portion(intake.branches, intake.opened)
    found = Portion()
    left = max(most - rows, LEAST)
    known = {id(request) for request in reading}
    first = [one for one in intake.opened if id(one) in known]
    for request in (one for one in reading if one not in first):  # no place for its branch yet
        if (count := min(_cut(request), left)) > 0:
            found.chunks.append((request, count))
            left -= count
    later = [one for one in intake.opened if id(one) not in known]
    items: list[Branch | Request] = [*first, *intake.branches, *later]
    for item in items:
        if left <= 0:
            break
        cost = _cost(item)
        most_cut = _cut(item)
        if cost <= left or (not most_cut and not (found.branches or found.opened or found.chunks)):
            found.add(item)
        elif isinstance(item, Request) and most_cut:
            found.chunks.append((item, min(left, most_cut)))
            cost = left
        else:
            break
        left -= cost
    return found


def _cost(item: Branch | Request) -> int:
    """Rows of a prompt."""
    if isinstance(item, Request):
        return item.unread
    return len(item.rows) + len(item.request.hoist)


def _cut(item: Branch | Request) -> int:
    """Tokens of a prompt that can be read before its first branch begins; 0: all or nothing."""
    if isinstance(item, Branch) or item.body.chunks or item.tail.chunks:
        return 0
    if item.first is not None:
        return item.body_size - item.prefix_length
    if item.given is not None:
        return len(item.prefix) - item.prefix_length
    return max(item.prompt_size - 1 - item.prefix_length, 0)


def half_read(requests: Sequence[Request]) -> list[Request]:
    """Open requests whose prompts are read in chunks."""
    return [one for one in requests if one.stage is Stage.PREFILL]


LOOK = 16  # requests that a policy which overtakes looks at in a step
SHOWN = 4  # names in a reason


class Shares(Protocol):
    """Lets requests that begin alike go on behind the same rows."""

    def meet_(self, opened: Sequence[Request]) -> list[Request]: ...
    def held_for(self, request: Request) -> int: ...


class MakesWay(Protocol):
    """Carries out who has to make way, and what."""

    def preempt_(self, whom: Branch | Request) -> None: ...
    def reclaim_(self, rows: int) -> None: ...
    def recall_(self) -> bool: ...
    @property
    def needed(self) -> int: ...


# Rank, then two numbers that are never equal, then who.
Item = tuple[Rank, int, int, Request, Branch | None]


class Scheduler:
    """Decides each step from host integers. No step looks at everybody who waits.

    Args:
        sharing: finds what is kept of those that are about to begin, and says who of them does;
            None: all do.
        making_way: takes rows from whoever is preempted; None: nobody ever is.

    Raises:
        PolicyError: the policy of the block cannot be found.

    Attributes:
        steps: how many have been planned.
    """

    def __init__(
        self,
        table: RequestTable,
        admission: Admission,
        block: SchedulerBlock,
        sharing: Shares | None = None,
        making_way: MakesWay | None = None,
    ) -> None:
        self.table = table
        self.admission = admission
        self.block = block
        self.sharing = sharing
        self.making_way = making_way
        self.policy = find_policy(block.policy)
        self.steps = 0
        self._told = 0  # requests that had ended when answers were last handed over
        self._parsed = False  # whether the last step read outlines
        self._queue: list[Item] = []  # a heap of requests that have not begun
        self._queued: set[int] = set()  # those in it, by prefix owner
        self._preempted: list[str] = []  # in this step
        self._turned = 0  # the step in which somebody last had a turn in spite of its rank

    def plan_(self, *, serves: bool) -> StepPlan:
        """The next step; serves: answers are wanted one by one, not all of them at the end.

        Raises:
            PolicyError: the policy failed.
        """
        self.steps += 1
        self._preempted = []
        for request in self.table.take_arrived():
            request.step = request.step or self.steps
            if request.prefix_owner not in self._queued:
                self._queued.add(request.prefix_owner)
                heappush(self._queue, self._item(request, None, -1))
        after_parse = self._parsed
        self._parsed = False
        if written := [r.key for r in self.table.open.values() if r.outline_ended]:
            self._parsed = True
            return self._plan(Does.PARSE, f"outlines are written: {_names(written)}")
        if self.table.ended > self._told and (serves or not self.table.any_unfinished):
            count = self.table.ended - self._told
            self._told = self.table.ended
            return self._plan(Does.ANSWER, f"{count} ended")
        return self._next(after_parse)

    def _next(self, after_parse: bool) -> StepPlan:
        """Whoever starts, and a round of those who run."""
        self._make_way_()
        intake = self._choose()
        running = len(self.table.active)
        folds = [b for b in intake.branches if b.combines]
        if folds:
            return self._plan(Does.FOLD, f"parts are done: {_of(folds)}", intake, Portion(folds))
        room = self.admission.room
        reading = half_read([*self.table.open.values()])
        new = portion(intake, reading, room.round_rows(running), self.block.max_num_batched_tokens)
        outlined = any(branch.request.outline_budget for branch in new.branches)
        if outlined and (after_parse or not running):
            why = "outlines were read" if after_parse else "nobody runs"
            starts = Portion(new.branches)
            return self._plan(Does.FORK, f"{why}: {_of(new.branches)}", intake, starts)
        if running:
            joining = [*(b.name for b in new.branches), *(r.key for r in new.opened)]
            why = f"{running} run" + (f", {_names(joining)} join" if joining else "")
            return self._plan(Does.ROUND, why + _read(new), intake, new)
        if new.opened or new.chunks or new.branches:
            starting = [*(b.name for b in new.branches), *(r.key for r in new.opened)]
            why = f"nobody runs: {_names(starting)}"
            return self._plan(Does.OPEN, why + _read(new), intake, new)
        if self.admission.optimistic and self._give_way_():
            return self._next(after_parse)
        return self._plan(Does.REST, "nobody can start", intake)

    # -- who makes way ----------------------------------------------------------------------------

    def _make_way_(self) -> None:
        """Room for the next round of those who run: what nobody needs goes first, then the youngest
        make way, one branch after another, and a request with its last one. The first of all
        requests always goes on."""
        if self.making_way is None or not self.admission.optimistic:
            return
        while self.admission.missing(self.making_way.needed, len(self.table.active)) > 0:
            if not self._give_way_():
                return
        self.making_way.reclaim_(self.admission.room.tree_slots(len(self.table.active)))

    def _give_way_(self) -> bool:
        """The youngest makes way; else those who wait give back what is kept for them.

        Returns:
            Whether anything has changed.
        """
        assert self.making_way is not None
        whom = self._youngest()
        if whom is None:
            return self.making_way.recall_()
        self._preempted.append(whom.name)
        self.making_way.preempt_(whom)
        return True

    def _youngest(self) -> Branch | Request | None:
        """Who makes way; None if only the first request is left, and one branch of it at most."""
        request = max(self.table.open.values(), key=lambda one: one.arrival, default=None)
        if request is None:
            return None
        running = [one for one in self.table.active if one.request is request]
        if len(running) > 1:
            return running[-1]
        return request if len(self.table.open) > 1 else None

    def _plan(
        self,
        does: Does,
        why: str,
        intake: Intake | None = None,
        new: Portion | None = None,
    ) -> StepPlan:
        new = new or Portion()
        if self._preempted:
            why += f"; rows ran out: {_names(self._preempted)} made way"
        return StepPlan(
            self.steps,
            does,
            why,
            tuple(branch.owner for branch in new.branches),
            tuple(request.prefix_owner for request in new.opened),
            tuple((request.prefix_owner, count) for request, count in new.chunks),
            len(self.table.active),
            len(self.table.waiting),
            "" if intake is None else intake.held,
            tuple(self._preempted),
        )

    # -- who starts -------------------------------------------------------------------------------

    def _choose(self) -> Intake:
        """Those that can start beside the running branches, first ranks first.

        Where one does not fit, nobody behind it starts either, unless the policy lets others
        overtake it, which ends when it has waited for `max_wait` steps; but for branches that start
        in the row that their own idle prefix holds, of no use to others. While nothing runs, others
        may start in its place, for only their rows can be in its way.
        """
        held_for = None if self.sharing is None else self.sharing.held_for
        opened = self.table.open.values()
        active = len(self.table.active)
        intake = self.admission.intake(opened, active, held_for)
        popped: list[Item] = []
        turn = self._whose_turn()
        first = [] if turn is None or not turn.waits else [_at_once(turn)]
        branches = sorted([*first, *self._branches(turn)])
        for item in merge(branches, self._requests(intake, popped, turn)):
            request, branch = item[3:]
            if branch is None and not intake.may_begin(request):
                intake.full = True
            if intake.full and not intake.has_row(request):
                continue
            if intake.take(request, branch or request):
                self._turned = self.steps if request is turn else self._turned
                continue
            if not intake.count:
                continue
            waited = self.steps - request.step
            crowded = intake.count >= intake.room.max_active
            alone = not self.policy.overtakes or request is turn
            intake.full |= crowded or alone or waited > self.block.max_wait
        for item in popped:  # whoever does start is left out when it comes up again
            heappush(self._queue, item)
        if self.sharing is not None and intake.opened:
            intake.opened = self.sharing.meet_(intake.opened)
        return intake

    def _whose_turn(self) -> Request | None:
        """Who has waited longest, if it has a turn in spite of its rank."""
        if self.policy.fair or self.steps - self._turned <= self.block.max_wait:
            return None
        waiting = [next(iter(self.table.waiting.values()), None), *self.table.open.values()]
        found = [
            one for one in waiting if one and (one.waits or any(b.waits for b in one.branches))
        ]
        return min(found, key=lambda one: one.arrival, default=None)

    def _requests(self, intake: Intake, popped: list[Item], turn: Request | None) -> Iterator[Item]:
        """Requests that have not begun, until nobody else can start; but for whose turn it is."""
        while self._queue and not intake.full:
            if self.policy.overtakes and intake.count and len(popped) >= LOOK:
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
            if request.stage is Stage.PREFILL:  # what has been begun is read to its end first
                yield _at_once(request)
                continue
            for place, branch in enumerate(ready(request, self.admission.order)):
                item = self._item(request, branch, place)
                yield ((), *item[1:]) if request is turn else item

    def _item(self, request: Request, branch: Branch | None, place: int) -> Item:
        prompt = request.prompt_size if branch is None else len(branch.prompt)
        is_open = branch is not None or request.stage is Stage.PREEMPTED
        left = request.left
        own = left if branch is None else branch.budget - len(branch.tokens)
        sizes = (max(place, 0), prompt, left, own)
        one = Candidate(request.arrival, request.step, is_open, *sizes)
        try:
            rank = self.policy.rank(one)
        except Exception as error:
            name = self.block.policy
            raise PolicyError(f"scheduler.policy {name!r}: {reason_of(error)}") from error
        return rank, request.prefix_owner, place, request, branch


def _at_once(request: Request) -> Item:
    """Before everybody with a rank."""
    return (), request.prefix_owner, -1, request, None


def _read(new: Portion) -> str:
    """Which prompts go on, in words."""
    parts = [
        f"{r.key} is read from {r.prefix_length} to {r.prefix_length + count} of {r.prompt_size}"
        for r, count in new.chunks
    ]
    return "".join(f", {part}" for part in parts)


def _of(branches: Iterable[Branch]) -> str:
    return _names([branch.name for branch in branches])


def _names(names: list[str]) -> str:
    """Some of them, for a reason that can be read."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
