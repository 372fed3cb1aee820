"""The scheduler: what the next step does, and who starts in it, ranked by the policy."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, merge

from ..graph.graph import SchedulerBlock
from ..requests.admission import Admission, Intake, ready
from ..requests.branch import Branch, Request, Stage
from ..requests.reasons import reason_of
from ..requests.request_table import RequestTable
from .budget import Portion, half_read, portion
from .plan import Does, StepPlan
from .policies import POLICIES, Candidate, Rank

LOOK = 16  # requests that a policy which overtakes looks at in a step
SHOWN = 4  # names in a reason


class PolicyError(RuntimeError):
    """A policy failed: nobody can say who starts."""


Meet = Callable[[Sequence[Request]], list[Request]]
"""Finds what is kept of requests that could begin together; returns those that should."""

# Rank, then two numbers that are never equal, then who.
Item = tuple[Rank, int, int, Request, Branch | None]


class Scheduler:
    """Decides each step from host integers. No step looks at everybody who waits.

    Args:
        meet: called with those that are about to begin, says who of them does; None: all do.

    Attributes:
        steps: how many have been planned.
    """

    def __init__(
        self,
        table: RequestTable,
        admission: Admission,
        block: SchedulerBlock,
        meet: Meet | None = None,
    ) -> None:
        self.table, self.admission, self.block, self.meet = table, admission, block, meet
        self.policy = POLICIES[block.policy]
        self.steps = 0
        self._told = 0  # requests that had ended when answers were last handed over
        self._parsed = False  # whether the last step read outlines
        self._queue: list[Item] = []  # a heap of requests that have not begun

    def plan_(self, *, serves: bool) -> StepPlan:
        """The next step; serves: answers are wanted one by one, not all of them at the end.

        Raises:
            PolicyError: the policy failed.
        """
        self.steps += 1
        for request in self.table.take_arrived():
            request.step = self.steps
            heappush(self._queue, self._item(request, None, -1))
        after_parse, self._parsed = self._parsed, False
        if written := [r.key for r in self.table.open.values() if r.outline_ended]:
            self._parsed = True
            return self._plan(Does.PARSE, f"outlines are written: {_names(written)}")
        if self.table.ended > self._told and (serves or not self.table.any_unfinished):
            count, self._told = self.table.ended - self._told, self.table.ended
            return self._plan(Does.ANSWER, f"{count} ended")
        return self._next(after_parse)

    def _next(self, after_parse: bool) -> StepPlan:
        """Whoever starts, and a round of those who run."""
        intake, running = self._choose(), len(self.table.active)
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
        return self._plan(Does.REST, "nobody can start", intake)

    def _plan(
        self,
        does: Does,
        why: str,
        intake: Intake | None = None,
        new: Portion | None = None,
    ) -> StepPlan:
        new = new or Portion()
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
        )

    # -- who starts -------------------------------------------------------------------------------

    def _choose(self) -> Intake:
        """Those that can start beside the running branches, first ranks first.

        Where one does not fit, nobody behind it starts either, unless the policy lets others
        overtake it, which ends when it has waited for `max_wait` steps; but for branches that start
        in the row that their own idle prefix holds, of no use to others. While nothing runs, others
        may start in its place, for only their rows can be in its way.
        """
        intake = self.admission.intake(self.table.open.values(), len(self.table.active))
        popped: list[Item] = []
        for item in merge(sorted(self._branches()), self._requests(intake, popped)):
            request, branch = item[3:]
            if branch is None and not intake.may_begin(request):
                intake.full = True
            if intake.full and not intake.has_row(request):
                continue
            if intake.take(request, branch or request) or not intake.count:
                continue
            waited = self.steps - request.step
            crowded = intake.count >= intake.room.max_active
            intake.full |= crowded or not self.policy.overtakes or waited > self.block.max_wait
        for item in popped:  # whoever does start is left out when it comes up again
            heappush(self._queue, item)
        if self.meet is not None and intake.opened:
            intake.opened = self.meet(intake.opened)
        return intake

    def _requests(self, intake: Intake, popped: list[Item]) -> Iterator[Item]:
        """Requests that have not begun, until nobody else can start."""
        while self._queue and not intake.full:
            if self.policy.overtakes and intake.count and len(popped) >= LOOK:
                return
            item = heappop(self._queue)
            if item[3].stage is Stage.WAITING:
                popped.append(item)
                yield item

    def _branches(self) -> Iterator[Item]:
        for request in self.table.open.values():
            if request.stage is Stage.PREFILL:  # what has been begun is read to its end first
                yield (), request.prefix_owner, -1, request, None
            for place, branch in enumerate(ready(request, self.admission.order)):
                yield self._item(request, branch, place)

    def _item(self, request: Request, branch: Branch | None, place: int) -> Item:
        prompt = request.prompt_size if branch is None else len(branch.prompt)
        one = Candidate(
            request.arrival, request.step, branch is not None, max(place, 0), prompt, request.left
        )
        try:
            rank = self.policy.rank(one)
        except Exception as error:
            name = self.block.policy
            raise PolicyError(f"scheduler.policy {name!r}: {reason_of(error)}") from error
        return rank, request.prefix_owner, place, request, branch


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
