"""Between forwards: release ended requests, prepare branches, preempt, and refuse."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .admission import Admission
from .fold import FoldState
from .kv_cache import KVCacheManager
from .request import Branch, Finish, Request, Stage, failing, move
from .request_table import RequestTable
from .text.tokens import PromptTokens

BuildPrompt = Callable[[Branch], PromptTokens]


@dataclass(eq=False, slots=True, kw_only=True)
class Lifecycle:
    """Moves requests and branches from submission to their end.

    Attributes:
        build_prompt: the prompt of a branch whose dependencies have ended.
        preemptions: number of preempted branches and requests.
    """

    table: RequestTable
    kv_cache: KVCacheManager
    admission: Admission
    fold: FoldState | None
    build_prompt: BuildPrompt
    preemptions: int = 0

    # -- submission -------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request; it starts at the first admission at which it fits."""
        self.table.add(request)
        if why := self.admission.why_never(request):
            self._refuse(request, why)
        elif request.root is not None or request.branches:
            self._continue(request)

    def _continue(self, request: Request) -> None:
        """Let a request that was started elsewhere continue with the tokens of its branches."""
        for branch in request.branches:
            self.check_fit(branch)
        waiting = (branch for branch in request.all_branches() if branch.waits)
        request.first_branch = next(waiting, None)
        if request.first_branch is None:
            self._refuse(request, request.branches[0].note)

    def _refuse(self, request: Request, why: str) -> None:
        request.finish = Finish.REFUSED
        request.why = why
        self._cancel_(request)

    # -- after a forward --------------------------------------------------------------------------

    def release_and_prepare_(self, ran: Iterable[Branch] = ()) -> None:
        """Release what ended, prepare prompts that became known, refuse what can never run.

        Args:
            ran: the branches that got tokens in the last forward.
        """
        ran = list(ran)
        for branch in ran:
            if branch.finish is None:
                continue
            self.admission.lengths.learn(branch)
            if branch.finish is Finish.FAILED:
                self.table.end(branch.request, Finish.FAILED, branch.note)
        if self.table.cancelled:
            for request in self.table.drain_cancelled():
                self._cancel_(request)
        self._release_(ran)

    def _release_(self, ran: Iterable[Branch] = ()) -> None:
        branches = dict.fromkeys((*self.table.active, *ran))
        running = [branch for branch in branches if branch.stage is Stage.RUNNING]
        self.table.active = running
        rows = self.admission.capacity.rows
        for request in [*self.table.open.values()]:
            # A request whose branches all run needs nothing, unless its parts or copies are kept.
            changes = rows or request.combine is not None
            if changes or any(b.stage is not Stage.RUNNING for b in request.branches):
                self._advance_(request)

    def _cancel_(self, request: Request) -> None:
        for branch in request.all_branches():
            if not branch.ended:
                branch.end(request.finish, request.why)
        if not request.branches:
            self.table.end_unstarted(request, request.finish, request.why)
        self._close_(request)

    def _close_(self, request: Request) -> None:
        """End a request whose branches have all ended."""
        self.table.close(request)
        self.kv_cache.end_request_(request, wipe=request.finish is Finish.FAILED)

    def forget_(self, request: Request) -> None:
        """Remove a started request and all its rows, without an answer."""
        self.kv_cache.end_request_(request, wipe=True)
        self.table.drop(request)

    def abandon_(self) -> None:
        """Discard a step that was not finished, and end the requests that are to end."""
        self.kv_cache.discard_uncommitted_()
        self.release_and_prepare_()

    def finish_(self, request: Request) -> None:
        """End a request after its outline."""
        move(request, "run")
        self._close_(request)

    # -- branches ---------------------------------------------------------------------------------

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
            self._close_(request)
        elif request.branches and not any(b.waits for b in request.branches):
            self.kv_cache.prune_(request)

    def _prepare_(self, branch: Branch) -> None:
        """Build the prompt of a branch once its dependencies have ended."""
        needs = branch.point.deps if branch.point else ()
        others = [b for b in branch.request.branches if b.point and b.point.id in needs]
        if all(b.ended for b in others):
            with failing(branch):
                branch.prompt = self.build_prompt(branch)
                self.check_fit(branch)
            if branch.finish is Finish.FAILED:
                self.table.end(branch.request, Finish.FAILED, branch.note)

    def check_fit(self, branch: Branch) -> None:
        """Refuse a branch whose prompt can never run, with the numbers."""
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
                self.kv_cache.retain_(branch)
            branch.retained = branch.retained and not request.isolated

    def _fold_(self, request: Request) -> None:
        """Add the branch that combines the parts of a request, if its graph combines them."""
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
        if request.isolated:
            branch.end(Finish.REFUSED, request.isolated)
            return
        move(request, "merge")
        if request.combine is not None:
            branch.reads = parts
            self.table.segments.set_reads(branch.owner, [part.owner for part in parts])
        self.check_fit(branch)

    # -- capacity ---------------------------------------------------------------------------------

    def refuse_stuck_(self) -> bool:
        """Refuse the first waiting item when nothing runs and nothing fits, so that others can.

        Returns:
            Whether an item was refused.
        """
        why = "no room beside the other requests"
        waiting = (b for r in self.table.open.values() for b in r.branches if b.waits)
        branch = next(waiting, None)
        request = next(iter(self.table.waiting.values()), None)
        if branch is not None:
            branch.end(Finish.REFUSED, why)
            self._advance_(branch.request)
        elif request is not None:
            self._refuse(request, why)
        return branch is not None or request is not None

    def preempt_(self, item: Branch | Request) -> None:
        """Free the rows of a running branch, or of a request with its prefix and branches.

        A preempted branch keeps its tokens and the state of its grammar. When it resumes, its rows
        are prefilled again in one forward; its next token is known already. Coins are keyed by
        position, so the text does not change.
        """
        self.preemptions += 1
        if isinstance(item, Branch):
            self._preempt_branch_(item)
            return
        running = [b for b in item.all_branches() if b.stage is Stage.RUNNING]
        waiting = [b for b in item.branches if b.waits and b.prompt]
        for branch in running:
            self._preempt_branch_(branch)
        self.kv_cache.preempt_prefix_(item)
        item.first_branch = next(iter((*running, *waiting)), None)
        move(item, "preempt")
        self.table.requeue(item)

    def _preempt_branch_(self, branch: Branch) -> None:
        self.table.active.remove(branch)
        self.kv_cache.preempt_branch_(branch)
        move(branch, "preempt")
        branch.length = branch.start
        branch.preempted += 1


def _all_ended(request: Request) -> bool:
    return bool(request.branches) and all(branch.ended for branch in request.branches)
