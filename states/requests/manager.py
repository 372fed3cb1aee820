"""The one door to everything that is true of a run between two forwards.

All decisions are functions of host integers read once per round. Slots belong to the pools, rows
are laid out by the layout, and the drafter's rows derive from the target's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from ...ops.beam import Chosen
from ...ops.blend.blend import BlendReport
from ...ops.host import HostReader
from ...ops.kv.pool import KVCache
from ...ops.types import Proposal
from ...ops.verify.first_tokens import FirstTokens
from ...ops.verify.verify import Accepted
from ..graph.beam_spec import BeamBlock
from ..layout.batching import BatchingLayout
from ..layout.bim import BimLayout
from ..layout.layout import Layout
from ..text.prompt_tokens import PromptTokens
from .admission import Admission, Room
from .batch import Batch
from .beam import BeamCommitter, BeamPlacer, BeamState
from .blending import BlendState, Reused
from .branch import Branch, Finish, Request, RoundSummary, Stage
from .committer import Committer
from .draft_state import DraftState, FeatureState, PairState, TextState
from .drafting import Drafting
from .folding import FoldState
from .ngram_state import NgramState
from .placer import Placer
from .request_table import RequestTable, RunLimits
from .samplers import Samplers

BuildPrompt = Callable[[Branch], PromptTokens]
DRAFT_STATES: dict[str, type[DraftState]] = {
    "nothing": DraftState,
    "pairs": PairState,
    "features": FeatureState,
    "text": TextState,
    "history": NgramState,
}


class BranchStateManager:
    """Requests, owners, positions, tips and outputs of a run, for target and drafter.

    Args:
        build_prompt: a branch's own prompt, once all that it depends on is finished.
        blend: how cached chunks are used; None computes every row.
        fold: how finished parts are combined; None leaves them as they are.
        beam: every branch is a beam search.
        kv_outline: the pool of a drafter that outlines have for themselves.

    Attributes:
        table: who there is. placer: lays out the next forward. committer: reads what came of it.
        draftings: the drafters' parts of the run; `draft` is what the first one remembers.
    """

    def __init__(
        self,
        kv: KVCache,
        kv_draft: KVCache | None,
        limits: RunLimits,
        build_prompt: BuildPrompt,
        blend: BlendState | None = None,
        fold: FoldState | None = None,
        beam: BeamBlock | None = None,
        kv_outline: KVCache | None = None,
    ) -> None:
        self.kv, self.kv_draft, self.limits = kv, kv_draft, limits
        self.build_prompt, self.blend, self.fold = build_prompt, blend, fold
        self.pools = [pool for pool in (kv, kv_draft, kv_outline) if pool is not None]
        self.table = RequestTable(limits)
        alone = limits.layout.kind == "batching"  # every branch in a row of its own
        device, segments = kv.data.device, self.table.segments
        self.layout: Layout = BimLayout(device, segments)
        if alone:
            self.layout = BatchingLayout(device, segments, kv.rows)
        rows, width = kv.rows if alone else 0, 1 if beam is None else beam.num_beams
        most, nodes = limits.layout.max_active, limits.nodes
        self.room = Room(kv.capacity, most, nodes, rows, limits.drafter.shared, width)
        self.admission = Admission(self.room, limits.layout.order, limits)
        self.samplers = Samplers(limits.vocabulary, device)
        whole = (self.table, self.layout, self.samplers)
        self.draft, second = DRAFT_STATES[limits.drafter.takes](), limits.outline_drafter
        parts_only = None if second is None else False
        self.draftings = [Drafting(*whole, self.draft, kv_draft, parts_only)]
        if second is not None:
            memory = DRAFT_STATES[second.takes]()
            self.draftings.append(Drafting(*whole, memory, kv_outline, True))
        parts = (self.table, self.layout, self.pools, self.admission, self.samplers, blend)
        self.placer = Placer(*parts)
        self.committer = Committer(self.pools, self.draftings, fold, blend)
        self.beams: BeamState | None = None
        if beam is not None:
            self.beams = BeamState(beam, device)
            self.placer = BeamPlacer(*parts, self.beams)
            self.beam_committer = BeamCommitter(self.table, kv, self.beams)

    # -- who there is -----------------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """All requests in the order of their submission; see `RequestTable.requests`."""
        return self.table.requests

    @property
    def unfinished(self) -> list[Request]:
        return self.table.unfinished

    @property
    def active(self) -> list[Branch]:
        """The branches that run, in the order of every [S, ...] tensor."""
        return self.table.active

    @property
    def reused(self) -> dict[int, Reused]:
        """Which of an owner's rows came from cached chunks."""
        return {} if self.blend is None else self.blend.reused

    def submit(self, request: Request) -> None:
        """Queue a request; it starts at the next admission that has room for it."""
        self.table.add(request)
        if why := self.admission.why_never(request):
            self._refuse(request, why)

    def cancel(self, key: str) -> None:
        """End a request at the next step boundary; what it has written so far is kept."""
        self.table.cancel(key)

    def _refuse(self, request: Request, why: str) -> None:
        self.table.end_unstarted(request, Finish.REFUSED, why)
        self.table.close(request)
        self.retire_([request.prefix_owner, *(b.owner for b in request.branches)])

    # -- who may start ----------------------------------------------------------------------------

    def waiting(self) -> tuple[list[Branch], list[Request]]:
        """Branches and requests that could start now, those that combine parts left out."""
        branches, opened = self._who_may_start()
        return [b for b in branches if not b.combines], opened

    def folds(self) -> list[Branch]:
        """Branches that could start to combine finished parts now."""
        return [b for b in self._who_may_start()[0] if b.combines]

    def _who_may_start(self) -> tuple[list[Branch], list[Request]]:
        return self.admission.choose(self.unfinished, len(self.active))

    # -- the next forward -------------------------------------------------------------------------

    def open_requests_(self) -> Batch:
        """Prompt rows of waiting requests: the shared prefix and the root branch behind it."""
        return self.placer.place_(None, [], self.waiting()[1])

    def fork_(self) -> Batch:
        """Rows of waiting branches; text common to all goes into the prefix."""
        return self.placer.place_(None, self.waiting()[0], [])

    def fold_(self) -> Batch:
        """Rows of the branches that combine finished parts: the parts, folded."""
        folds = self.folds()
        batch = self.placer.place_(None, folds, [])
        for branch in folds:  # the parts are on their way into the pool
            assert self.fold is not None
            self.fold.forget_(branch.request)
            branch.prompt = replace(branch.prompt, chunks=())
        return batch

    def tree_rows_(self, proposal: Proposal) -> Batch:
        """All trees."""
        return self.placer.place_(proposal, [], [])

    def admit_(self, proposal: Proposal) -> Batch:
        """All trees, and behind them the prompts of everybody who can start now."""
        return self.placer.place_(proposal, *self.waiting())

    def commit_(
        self,
        batch: Batch,
        host: HostReader,
        features: Tensor | None,
        accepted: Accepted | None,
        roots: FirstTokens,
        report: BlendReport | None = None,
    ) -> RoundSummary:
        """Take in what a forward brought (one read of the device), and settle who goes on."""
        summary = self.committer.commit_(batch, host, features, accepted, roots, report)
        for branch in batch.everyone:
            if self.fold is not None and branch.stage is Stage.DONE:
                slots = self.kv.slots_of(branch.owner, self.layout.rows_of(branch.owner)[0])
                self.fold.keep_(branch, self.kv, slots)
        self.retire_and_prepare_(batch.everyone)
        return summary

    def commit_beams_(self, batch: Batch, host: HostReader, chosen: Chosen) -> RoundSummary:
        """The same for a step of beam searches."""
        summary = self.beam_committer.commit_(batch, host, chosen)
        self.retire_and_prepare_(batch.everyone)
        return replace(summary, target_length=self.kv.current_length)

    # -- between two forwards ---------------------------------------------------------------------

    def retire_and_prepare_(self, ran: Iterable[Branch] = ()) -> None:
        """Retire what ended, prepare prompts that became known, refuse what can never run."""
        for request in [r for r in self.unfinished if r.cancelled]:
            self._cancel_(request)
        everyone = dict.fromkeys((*self.active, *ran))
        self.table.active = [b for b in everyone if b.stage is Stage.RUNNING]
        for request in [*self.unfinished]:
            self._go_on_(request)
        self._break_deadlock_()

    def _cancel_(self, request: Request) -> None:
        for branch in request.all_branches():
            if branch.stage is not Stage.DONE:
                branch.end(Finish.CANCELLED)
        if not request.branches:
            self.table.end_unstarted(request, Finish.CANCELLED)
        self._close_(request)
        self.retire_([b.owner for b in request.all_branches()])

    def _close_(self, request: Request) -> None:
        """All of a request's branches have ended: nothing of it stays in the pools."""
        self.table.close(request)
        for drafting in self.draftings:
            drafting.memory.close(request)
        if self.fold is not None:
            self.fold.forget_(request)
        self.retire_([request.prefix_owner])

    def _go_on_(self, request: Request) -> None:
        ended = [b.owner for b in request.branches if b.stage is Stage.DONE]
        self.retire_([owner for owner in ended if owner in self.table.segments])
        for branch in request.branches:
            if branch.stage is Stage.WAITING and not len(branch.prompt):
                self._prepare_(branch)
        if _all_done(request):
            self._fold_(request)
        if _all_done(request):
            self._close_(request)
        elif request.branches and not any(b.stage is Stage.WAITING for b in request.branches):
            self.layout.prune_(request.prefix_owner, self.pools)

    def _fold_(self, request: Request) -> None:
        """The last branch of a request whose parts are all done, if they are to be combined."""
        if self.fold is None or request.branches[-1].combines:
            return
        prompt = self.fold.prompt(request)
        if prompt is not None:
            branch = self.table.new_branch(request, len(request.branches), request.budget)
            branch.combines, branch.prompt = True, prompt
            request.branches.append(branch)
            self.check_fit_(branch)

    def _prepare_(self, branch: Branch) -> None:
        """Build the prompt once everything the branch depends on is finished."""
        request, point = branch.request, branch.point
        needs = set(point.deps) if point else set()
        others = [b for b in request.branches if b.point and b.point.id in needs]
        if all(b.stage is Stage.DONE for b in others):
            branch.prompt = self.build_prompt(branch)
            self.check_fit_(branch)

    def check_fit_(self, branch: Branch) -> None:
        """Refuse a branch, by name and with the numbers, whose prompt can never be run."""
        if why := self.admission.why_never_branch(branch):
            branch.end(Finish.REFUSED, why)

    def _break_deadlock_(self) -> None:
        """If nothing runs and nobody fits, the first who waits is refused: never a hang."""
        while not self.active and not any(self._who_may_start()):
            stuck = [b for r in self.unfinished for b in r.branches if b.stage is Stage.WAITING]
            late = [r for r in self.unfinished if r.stage is Stage.WAITING]
            if any(r.stage is Stage.OUTLINE for r in self.unfinished) or not (stuck or late):
                return
            if stuck:
                stuck[0].end(Finish.REFUSED, "no room beside the other requests")
                self._go_on_(stuck[0].request)
            else:
                self._refuse(late[0], "no room beside the other requests")

    def retire_(self, owners: Sequence[int]) -> None:
        """Give back all rows of these owners, in both pools and in the drafter's inbox."""
        if not owners:
            return
        if self.beams is not None:
            owners = [*owners, *self.beams.forget(owners)]
        for pool in self.pools:
            pool.retire_(owners)
        self.layout.leave_(owners)
        self.table.segments.remove(owners)
        self.samplers.forget(owners)
        for drafting in self.draftings:
            drafting.memory.forget(owners)
        if self.blend is not None:
            self.blend.forget_(owners)

    def promote_root_(self, request: Request) -> None:
        """The outline's rows stay and become the prefix: relabelled, 0 bytes moved."""
        root = request.root
        assert root is not None
        for pool in self.pools:
            pool.relabel_(root.owner, request.prefix_owner)
        self.layout.leave_([root.owner])
        for drafting in self.draftings:
            drafting.memory.promote(root)
        self.table.segments.absorb(root.owner, request.prefix_owner)
        request.prefix_length = root.length
        request.context += [*root.prompt, *root.tokens[: root.kept]]


def _all_done(request: Request) -> bool:
    return bool(request.branches) and all(b.stage is Stage.DONE for b in request.branches)
