"""The scheduler: what the next step does, and who starts in it, ranked by the policy."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, merge
from typing import Protocol

from ..graph.graph import SchedulerBlock
from ..requests.admission import Admission, Intake, ready
from ..requests.branch import Branch, Request, Stage
from ..requests.failing import reason_of
from ..requests.request_table import RequestTable
from .budget import Portion, half_read, portion
from .plan import Does, StepPlan
from .policies import Candidate, PolicyError, Rank, find_policy

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
        new = portion(intake, reading, room.round_rows(running), self.block.max_tokens)
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
