"""Between forwards: release ended requests, prepare branches, preempt, and refuse."""

from collections.abc import Callable, Iterable

import numpy as np

from .admission import Admission, running_branches
from .kv_cache import KVCacheManager
from .request import Branch, Finish, Request, Stage, failing, move
from .text.tokens import PromptTokens

BuildPrompt = Callable[[Branch], PromptTokens]


class Lifecycle:
    """Moves requests and branches from submission to their end."""

    def __init__(
        self, kv_cache: KVCacheManager, admission: Admission, build_prompt: BuildPrompt
    ) -> None:
        self.kv_cache = kv_cache
        self.table = kv_cache.table
        self.admission = admission
        self.build_prompt = build_prompt
        self.preemptions = 0

    def submit(self, request: Request) -> None:
        """Queue a request; it starts at the first admission at which it fits."""
        self.table.add(request)
        if why := self.admission.why_never(request):
            self._refuse(request, why)
        elif branches := [*request.all_branches()]:  # it was started elsewhere
            for branch in request.branches:
                self.check_fit(branch)
            request.first_branch = next((branch for branch in branches if branch.waits), None)
            if request.first_branch is None:
                self._refuse(request, request.branches[0].note)

    def _refuse(self, request: Request, why: str) -> None:
        request.finish = Finish.REFUSED
        request.why = why
        self._cancel_(request)

    def release_and_prepare_(self, ran: Iterable[Branch] = ()) -> None:
        """Release what ended, prepare prompts that became known, refuse what can never run."""
        ran = list(ran)
        for branch in ran:
            if branch.finish is not None:
                self.admission.lengths.learn(branch)
            if branch.finish is Finish.FAILED:
                self.table.end(branch.request, Finish.FAILED, branch.note)
        cancelled = self.table.cancelled
        self.table.cancelled = []
        for request in cancelled:
            if not request.finished:
                self._cancel_(request)
        branches = dict.fromkeys((*self.table.active, *ran))
        self.table.active = [branch for branch in branches if branch.stage is Stage.RUNNING]
        for request in [*self.table.open.values()]:
            # A request whose branches all run needs nothing, unless its parts or copies are kept.
            changes = self.admission.capacity.rows or request.combine is not None
            if changes or any(b.stage is not Stage.RUNNING for b in request.branches):
                self._advance_(request)

    def _cancel_(self, request: Request) -> None:
        for branch in request.all_branches():
            if not branch.ended:
                branch.end(request.finish, request.why)
        if not request.branches:
            self.table.end_unstarted(request, request.finish, request.why)
        self.close_(request)

    def close_(self, request: Request) -> None:
        self.table.close(request)
        self.kv_cache.end_request_(request, wipe=request.finish is Finish.FAILED)

    def forget_(self, request: Request) -> None:
        """Remove a started request and all its rows, without an answer."""
        self.kv_cache.end_request_(request, wipe=True)
        self.table.drop(request)

    def abandon_(self) -> None:
        """Discard a step that was not finished, and end the requests that are to end."""
        for pool in self.kv_cache.pools:
            pool.release_(np.flatnonzero(~pool.committed))
        self.release_and_prepare_()

    def _advance_(self, request: Request) -> None:
        """Prepare waiting branches, release ended ones, and end the request after its last."""
        for branch in request.branches:
            if branch.stage is Stage.WAITING and not len(branch.prompt):
                self._prepare_(branch)
        self._retain_(request)
        self.kv_cache.end_branches_(b for b in request.branches if b.ended and not b.retained)
        if _all_ended(request):
            self._fold_(request)
        if _all_ended(request):
            self.close_(request)
        elif request.branches and not any(b.waits for b in request.branches):
            self.kv_cache.layout.prune_(request.prefix_owner)

    def _prepare_(self, branch: Branch) -> None:
        needs = branch.point.deps if branch.point else ()
        others = [b for b in branch.request.branches if b.point and b.point.id in needs]
        if all(b.ended for b in others):
            with failing(branch):
                branch.prompt = self.build_prompt(branch)
                self.check_fit(branch)
            if branch.finish is Finish.FAILED:
                self.table.end(branch.request, Finish.FAILED, branch.note)

    def check_fit(self, branch: Branch) -> None:
        if why := self.admission.why_never_branch(branch):
            branch.end(Finish.REFUSED, why)

    def _retain_(self, request: Request) -> None:
        """Retain the rows of ended parts until the parts are combined, if all of them fit."""
        if request.combine is None or len(request.branches) < 2:
            return
        request.isolated = request.isolated or self.admission.why_isolated(request)
        request.exclusive = request.exclusive or self.admission.is_tight(request)
        for branch in request.branches:
            if branch.stays and not (branch.retained or branch.rows_released):
                self.kv_cache.layout.hold_(branch.owner, request.prefix_owner)
                branch.retained = True
            branch.retained = branch.retained and not request.isolated

    def _fold_(self, request: Request) -> None:
        """Add the branch that combines the parts of a request, if its graph combines them."""
        if request.branches[-1].combines:
            return
        parts = request.parts
        fold = self.kv_cache.fold
        prompt = request.combine if fold is None else fold.prompt(request)
        if prompt is None or len(parts) < 2:
            return
        budget = min(request.budget, request.spare_tokens)
        branch = self.table.new_branch(request, len(request.branches), budget)
        branch.combines = True
        branch.prompt = prompt
        request.branches.append(branch)
        if request.isolated:
            branch.end(Finish.REFUSED, request.isolated)
            return
        move(request, "merge")
        if request.combine is not None:
            branch.reads = parts
            self.table.segments.set_reads(branch.owner, [part.owner for part in parts])
        self.check_fit(branch)

    def refuse_stuck_(self) -> bool:
        """Refuse the first waiting item when nothing fits, so that others can run."""
        why = "no room with the other requests"
        for branch in (b for r in self.table.open.values() for b in r.branches if b.waits):
            branch.end(Finish.REFUSED, why)
            self._advance_(branch.request)
            return True
        for request in self.table.waiting.values():
            self._refuse(request, why)
            return True
        return False

    def preempt_(self, item: Branch | Request) -> None:
        """Free the rows of a running branch, or of a request with its prefix and branches. When a
        branch resumes, its rows are prefilled again. Its next token is known, and coins are keyed
        by position, so the text does not change."""
        self.preemptions += 1
        if isinstance(item, Branch):
            self._preempt_branch_(item)
            return
        running = running_branches(item)
        waiting = [b for b in item.all_branches() if b.waits and b.prompt]
        for branch in running:
            self._preempt_branch_(branch)
        self.kv_cache.preempt_prefix_(item)
        item.first_branch = next(iter((*running, *waiting)), None)
        move(item, "preempt")
        del self.table.open[item.prefix_owner]
        self.table.waiting[item.prefix_owner] = item
        self.table.arrived.append(item)

    def _preempt_branch_(self, branch: Branch) -> None:
        self.table.active.remove(branch)
        self.kv_cache.preempt_branch_(branch)
        move(branch, "preempt")
        branch.length = branch.start
        branch.preempted += 1


def _all_ended(request: Request) -> bool:
    return bool(request.branches) and all(branch.ended for branch in request.branches)
