"""The one door to everything that is true of a run between two forwards.

All decisions are functions of host integers read once per round. Slots belong to the pools, rows
are laid out by the layout, and the drafter's rows derive from the target's.
"""

from dataclasses import replace

from torch import Tensor

from ...ops.beam import Chosen
from ...ops.blend.blend import BlendReport
from ...ops.host import HostReader
from ...ops.kv.pool import KVCache
from ...ops.types import Proposal
from ...ops.verify.first_tokens import FirstTokens
from ...ops.verify.verify import Accepted
from ..graph.blocks import BeamBlock
from ..layout.batching import BatchingLayout
from ..layout.layout import Layout
from ..requests.admission import Admission, Room
from ..requests.blending import BlendState, Reused
from ..requests.branch import Branch, Request, RoundSummary, Stage
from ..requests.draft_state import DraftState, FeatureState, PairState, TextState
from ..requests.drafting import Drafting
from ..requests.folding import FoldState
from ..requests.ngram_state import NgramState
from ..requests.request_table import RequestTable, RunLimits
from ..requests.samplers import Samplers
from .batch import Batch
from .beam import BeamCommitter, BeamPlacer, BeamState
from .committer import Committer
from .lifecycle import BuildPrompt, Lifecycle
from .placer import Placer

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
        self.blend, self.fold = blend, fold
        self.pools = [pool for pool in (kv, kv_draft, kv_outline) if pool is not None]
        self.table = RequestTable(limits)
        alone = limits.layout.kind == "batching"  # every branch in a row of its own
        device, segments = kv.data.device, self.table.segments
        self.layout = Layout(device, segments)
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
        lives = (*parts[:5], self.draftings, build_prompt, blend, fold, self.beams)
        self.lifecycle = Lifecycle(*lives)

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
        self.lifecycle.submit(request)

    def cancel(self, key: str) -> None:
        """End a request at the next step boundary; what it has written so far is kept."""
        self.table.cancel(key)

    # -- who may start ----------------------------------------------------------------------------

    def waiting(self) -> tuple[list[Branch], list[Request]]:
        """Branches and requests that could start now, those that combine parts left out."""
        branches, opened = self.lifecycle.waiting()
        return [b for b in branches if not b.combines], opened

    def folds(self) -> list[Branch]:
        """Branches that could start to combine finished parts now."""
        return [b for b in self.lifecycle.waiting()[0] if b.combines]

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
        self.lifecycle.retire_and_prepare_(batch.everyone)
        return summary

    def commit_beams_(self, batch: Batch, host: HostReader, chosen: Chosen) -> RoundSummary:
        """The same for a step of beam searches."""
        summary = self.beam_committer.commit_(batch, host, chosen)
        self.lifecycle.retire_and_prepare_(batch.everyone)
        return replace(summary, target_length=self.kv.current_length)
