"""Between two forwards: who ends gives rows back, whose turn it is gets a prompt, never a hang."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..ops.kv.pool import KVCache
from ..ops.kv.slots import NOBODY
from .admission import Admission
from .beam import BeamState
from .blend import BlendState
from .drafter import Drafter
from .fold import FoldState
from .kv_cache import Keeper
from .layout import Layout
from .request import Branch, Finish, Request, Stage, failing, move
from .request_table import RequestTable
from .sampling import Samplers
from .text.tokens import PromptTokens

BuildPrompt = Callable[[Branch], PromptTokens]


@dataclass(eq=False, slots=True)
class Lifecycle:
    """Requests and branches from submission to the end.

    build_prompt: a branch's own prompt, once all that it depends on is finished. keeper: keeps rows
    of what has ended; None gives them back.
    """

    table: RequestTable
    layout: Layout
    pools: Sequence[KVCache]
    admission: Admission
    samplers: Samplers
    blend: BlendState | None
    beams: BeamState | None
    drafter: Drafter
    fold: FoldState | None
    build_prompt: BuildPrompt
    keeper: Keeper | None = None

    def submit(self, request: Request) -> None:
        """Queue a request; it starts at the next admission that has room for it."""
        self.table.add(request)
        if why := self.admission.why_never(request):
            self._refuse(request, why)
        elif request.root is not None or request.branches:
            self._take_over_(request)

    def _take_over_(self, request: Request) -> None:
        """A request that was begun elsewhere goes on with all that its branches have written."""
        for branch in request.branches:
            self.check_fit_(branch)
        request.first = next((one for one in request.all_branches() if one.waits), None)
        if request.first is None:
            self._refuse(request, request.branches[0].note)

    def _refuse(self, request: Request, why: str) -> None:
        request.finish = Finish.REFUSED
        request.why = why
        self._cancel_(request)

    def retire_and_prepare_(self, ran: Iterable[Branch] = ()) -> None:
        """Retire what ended, prepare prompts that became known, refuse what can never run."""
        ran = list(ran)
        for branch in ran:
            self.admission.expected.learn(branch)
            if branch.finish is Finish.FAILED:
                self.table.end(branch.request, Finish.FAILED, branch.note)
        for request in self.table.take_cancelled():
            self._cancel_(request)
        self._retire_(ran)

    def retire_cancelled_(self) -> None:
        """The same where nothing else can have changed since the last time."""
        if cancelled := self.table.take_cancelled():
            for request in cancelled:
                self._cancel_(request)
            self._retire_()

    def _retire_(self, ran: Iterable[Branch] = ()) -> None:
        everyone = dict.fromkeys((*self.table.active, *ran))
        self.table.active = [b for b in everyone if b.stage is Stage.RUNNING]
        for request in [*self.table.open.values()]:
            if not self._only_runs(request):
                self._go_on_(request)

    def _only_runs(self, request: Request) -> bool:
        """Whether nothing is to be done for it: all its branches run, and no row stays for them."""
        if self.admission.room.rows or request.combine is not None:
            return False
        return all(branch.stage is Stage.RUNNING for branch in request.branches)

    def _cancel_(self, request: Request) -> None:
        for branch in request.all_branches():
            if not branch.ended:
                branch.end(request.finish, request.why)
        if not request.branches:
            self.table.end_unstarted(request, request.finish, request.why)
        self._close_(request)

    def _close_(self, request: Request) -> None:
        """All of a request's branches have ended: nothing of it stays in the pools."""
        self.table.close(request)
        self._give_back_(request, wipe=request.finish is Finish.FAILED)

    def forget_(self, request: Request) -> None:
        """A request that has begun goes as if it had never come."""
        self._give_back_(request, wipe=True)
        self.table.drop(request)

    def abandon_(self) -> None:
        """A step was not finished: nothing stays of its rows, and whoever is to end does."""
        for pool in self.pools:
            pool.release_(np.flatnonzero(~pool.committed))
        self.retire_and_prepare_()

    def _give_back_(self, request: Request, *, wipe: bool) -> None:
        self.drafter.close(request)
        if self.fold is not None:
            self.fold.forget_(request)
        branches = list(request.all_branches())
        if wipe:
            self._return_(branches)
            for pool in self.pools:
                pool.wipe_([request.prefix_owner, *(b.owner for b in branches if not b.settled)])
            self.retire_([b.owner for b in branches if not b.settled])
        self._end_(branches)
        if self.keeper is not None:
            self.keeper.close_(request, failed=wipe)
        self.retire_([request.prefix_owner])

    def _return_(self, branches: Iterable[Branch]) -> None:
        """Branches do not go on any more behind what they had written before."""
        for branch in branches:
            if self.keeper is not None:
                self.keeper.return_(branch)

    def _go_on_(self, request: Request) -> None:
        for branch in request.branches:
            if branch.stage is Stage.WAITING and not len(branch.prompt):
                self._prepare_(branch)
        self._hold_(request)
        self._end_(b for b in request.branches if b.ended and not b.held)
        if _all_done(request):
            self._fold_(request)
        if _all_done(request):
            self._close_(request)
        elif request.branches and not any(b.waits for b in request.branches):
            self.layout.prune_(request.prefix_owner, self.pools)

    def _fold_(self, request: Request) -> None:
        """The last branch of a request whose parts are all done, if they are to be combined."""
        if request.branches[-1].combines:
            return
        prompt = request.combine
        parts = request.parts
        if self.fold is not None:
            prompt = self.fold.prompt(request)
        if prompt is None or len(parts) < 2:
            return
        branch = self.table.new_branch(request, len(request.branches), request.budget)
        branch.combines = True
        branch.prompt = prompt
        request.branches.append(branch)
        if request.apart:
            branch.end(Finish.REFUSED, request.apart)
            return
        move("request", request, "merge")
        if request.combine is not None:
            branch.reads = parts
            self.table.segments.read(branch.owner, [part.owner for part in parts])
        self.check_fit_(branch)

    def _hold_(self, request: Request) -> None:
        """Parts that have ended stay where they are until they are combined, if all will fit."""
        if request.combine is None or len(request.branches) < 2:
            return
        request.apart = request.apart or self.admission.why_apart(request)
        request.alone = request.alone or self.admission.is_tight(request)
        for branch in request.branches:
            if branch.stays and not (branch.held or branch.settled):
                self.layout.hold_(branch.owner, request.prefix_owner, self.pools)
                branch.held = True
            branch.held = branch.held and not request.apart

    def _prepare_(self, branch: Branch) -> None:
        """Build the prompt once everything the branch depends on is finished."""
        needs = branch.point.deps if branch.point else ()
        others = [b for b in branch.request.branches if b.point and b.point.id in needs]
        if all(b.ended for b in others):
            with failing(branch):
                branch.prompt = self.build_prompt(branch)
                self.check_fit_(branch)
            if branch.finish is Finish.FAILED:
                self.table.end(branch.request, Finish.FAILED, branch.note)

    def check_fit_(self, branch: Branch) -> None:
        """Refuse a branch, by name and with the numbers, whose prompt can never be run."""
        if why := self.admission.why_never_branch(branch):
            branch.end(Finish.REFUSED, why)

    def refuse_stuck_(self) -> bool:
        """Nothing runs and nobody fits: the first who waits is refused, so that others can go on.

        Returns:
            Whether there was somebody.
        """
        why = "no room beside the other requests"
        begun = self.table.open.values()
        stuck = next((b for r in begun for b in r.branches if b.waits), None)
        late = next(iter(self.table.waiting.values()), None)
        if stuck is not None:
            stuck.end(Finish.REFUSED, why)
            self._go_on_(stuck.request)
        elif late is not None:
            self._refuse(late, why)
        return stuck is not None or late is not None

    def retire_(self, owners: Sequence[int]) -> None:
        """Give back all rows of these owners, in both pools and in the drafter's inbox."""
        if not owners:
            return
        if self.beams is not None:
            owners = [*owners, *self.beams.forget(owners)]
        for pool in self.pools:
            pool.retire_(owners)
        self.table.segments.remove(owners)
        self.leave_(owners)

    def _end_(self, branches: Iterable[Branch]) -> None:
        """What branches have in the pools that ended is kept, or given back."""
        kept = list[int]()
        gone = list[int]()
        for branch in branches:
            if branch.owner in self.table.segments and not branch.settled:
                branch.settled = self.keeper is not None and self.keeper.keep_(branch)
                (kept if branch.settled else gone).append(branch.owner)
        self.leave_(kept)
        self.retire_(gone)

    def leave_(self, owners: Sequence[int]) -> None:
        """Owners that are no part of the run any more, whether their rows are kept or not."""
        self.layout.leave_(owners)
        self.samplers.forget(owners)
        self.drafter.forget(owners)
        if self.blend is not None:
            self.blend.forget_(owners)

    def leave_root_(self, request: Request) -> None:
        """An outline that parts do not stand behind has ended: its rows go, and so does from the
        prefix what it alone was asked with. The last token that parts share is read again, for
        drafters that pair it with the next one."""
        root = request.root
        end = len(request.prefix) - request.lent
        assert root is not None
        if self.keeper is not None:
            self.keeper.keep_prompt_(request)
        if max(request.shared, request.prefix_length) > end:
            length = max(end - 1, 0)
            if self.keeper is not None:
                self.keeper.shorten_(request, length)
            for pool in self.pools:
                pool.truncate_(request.prefix_owner, length)
            self.drafter.truncate(request.prefix_owner, length)
            request.narrow(length)
        self._return_([root])
        self.retire_([root.owner])

    def finish_(self, request: Request) -> None:
        """Nothing follows on an outline that has ended and was closed."""
        move("request", request, "run")
        self._close_(request)

    def promote_root_(self, request: Request) -> None:
        """The outline's rows stay and become the prefix: relabelled, 0 bytes moved."""
        root = request.root
        assert root is not None
        if root.shared and self.keeper is not None:
            self.keeper.take_over_(root)
        home = self.table.segments.home(request.prefix_owner)
        for pool in self.pools:
            pool.relabel_(root.owner, request.prefix_owner, home)
        self.layout.leave_([root.owner])
        self.drafter.promote(root)
        self.table.segments.absorb(root.owner, request.prefix_owner)
        request.grown.append(root.rows)
        request.read(root.rows.ids)


def _all_done(request: Request) -> bool:
    return bool(request.branches) and all(b.ended for b in request.branches)


@dataclass(eq=False, slots=True)
class Preemption:
    """Takes rows from branches and requests that run, and what they wait for from those that wait.

    Attributes:
        count: how many branches were preempted, and requests with all they had.
    """

    table: RequestTable
    pools: Sequence[KVCache]
    lifecycle: Lifecycle
    fold: FoldState | None
    keeper: Keeper | None
    count: int = 0

    def preempt_(self, whom: Branch | Request) -> None:
        """A branch makes way, or a request with its prefix and all branches that run."""
        self.count += 1
        if isinstance(whom, Branch):
            self._branch_(whom)
        else:
            self._request_(whom)

    def reclaim_(self, rows: int) -> None:
        """Idle rows make way until so many slots of the target's pool are free, or none is idle."""
        if self.keeper is not None:
            cache = self.keeper.cache
            cache.make_room_(cache.idle - max(rows - self._free, 0))

    @property
    def needed(self) -> int:
        """Slots of the target's pool that are in use, but for idle ones."""
        return self.pools[0].needed_length

    def recall_(self) -> bool:
        """Those who wait give back the kept rows that they were to go on behind; whether they had
        any."""
        return self.keeper is not None and self.keeper.recall_()

    @property
    def _free(self) -> int:
        return self.pools[0].slots - self.pools[0].current_length

    def _branch_(self, branch: Branch) -> None:
        self.table.active.remove(branch)
        if self.keeper is not None:
            self.keeper.set_aside_(branch)
        else:
            for pool in self.pools:
                pool.retire_([branch.owner])
        self.table.segments.hang(branch.owner, branch.request.prefix_owner)
        self.lifecycle.leave_([branch.owner])
        if self.fold is not None:
            self.fold.set_aside_(branch)
        move("branch", branch, "preempt")
        branch.length = branch.start
        branch.preempted += 1

    def _request_(self, request: Request) -> None:
        running = [one for one in request.all_branches() if one.stage is Stage.RUNNING]
        waiting = [one for one in request.branches if one.waits and one.prompt]
        for branch in running:
            self._branch_(branch)
        if self.keeper is not None:
            self.keeper.close_(request)
        owner = request.prefix_owner
        for pool in self.pools:
            pool.retire_([owner])
        self.table.segments.hang(owner, NOBODY)
        self.lifecycle.leave_([owner])
        request.first = next(iter((*running, *waiting)), None)
        request.shared = request.prefix_length = 0
        move("request", request, "preempt")
        self.table.requeue(request)
