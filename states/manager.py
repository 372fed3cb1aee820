"""The one door to everything that is true of a run between two forwards.

All decisions are functions of host integers read once per round. Slots belong to the pools, rows
are laid out by the layout, and the drafter's rows derive from the target's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..ops.blend import BlendReport
from ..ops.host import HostReader
from ..ops.kv.pool import KVCache
from ..ops.verify.verify import Accepted, FirstTokens
from .admission import Admission, Room
from .batch import Placer
from .beam import BeamState
from .blend import BlendState, Reused
from .commit import Committer
from .drafter import DraftContext, Drafter, TwoDrafters
from .fold import FoldState
from .graph.drafter_settings import nodes_for
from .graph.drafters import drafter_class
from .graph.graph import BeamBlock
from .kv_cache import CopyingKeeper, Keeper
from .layout import Batch, BatchingLayout, Layout, PagedLayout
from .lifecycle import BuildPrompt, Lifecycle, Preemption
from .prefix_cache import PrefixCache
from .request import Branch, Request
from .request_table import RequestTable, RunLimits
from .round import RoundSummary
from .sampling import Samplers
from .scheduler import Does, Inbox, Scheduler, StepPlan


class BranchStateManager:
    """Requests, owners, positions, tips and outputs of a run, for target and drafter.

    Args:
        build_prompt: a branch's own prompt, once all that it depends on is finished.
        blend: how cached chunks are used; None computes every row.
        fold: how finished parts are combined; None leaves them as they are.
        beam: every branch is a beam search.
        kv_outline: the pool of the outlines' own drafter. draft_models: the networks of the
            drafter and of the outlines' own drafter; None for a kind without one.
        kept: pools of one row for what stays of prompts and answers, in the order of the others;
            without them it stays in these, if branches share them.

    Attributes:
        table: who there is. placer: lays out the next forward. committer: reads what came of it.
        preemption: takes rows from those who make way.
        drafter: proposes the trees of a round; two drafters behind one if outlines have their own.
        prefixes: what is kept of prompts and answers for whoever begins alike; None without it.
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
        kept: Sequence[KVCache] = (),
        draft_models: Sequence[Any] = (None, None),
    ) -> None:
        self.kv = kv
        self.kv_draft = kv_draft
        self.limits = limits
        self.blend = blend
        self.fold = fold
        self.pools = [pool for pool in (kv, kv_draft, kv_outline) if pool is not None]
        self.table = RequestTable(limits)
        device = kv.data.device
        segments = self.table.segments
        self.samplers = Samplers(limits.vocabulary, device)
        kind = limits.layout.kind
        rows = 0
        self.layout = PagedLayout(device, segments) if kind == "paged" else Layout(device, segments)
        if kind == "batching":  # every branch in a row of its own
            self.layout = BatchingLayout(device, segments, kv.rows)
            rows = kv.rows
        width = 1 if beam is None else beam.num_beams
        most = limits.layout.max_num_branches
        nodes = limits.nodes
        shared = limits.drafter.shared
        if kind == "paged" and shared is not None:  # each tree is laid out as large as it may be
            counts = range(1, most + 1)
            nodes = {n: min(nodes_for(nodes, n), shared) for n in counts}
            shared = None
        self.room = Room(kv.capacity, most, nodes, rows, shared, width)
        self.drafter = self._drafter(kv_outline, draft_models)
        self.beams = None if beam is None else BeamState(beam.num_beams, self.table, kv)
        self.prefixes = self._prefixes(kept or (() if rows else self.pools))
        beside = None if rows else self.prefixes
        self.admission = Admission(self.room, limits.layout.order, limits, beside)
        keeper = self._keeper()
        parts = (self.table, self.layout, self.pools, self.admission, self.samplers, blend)
        self.placer = Placer(*parts, self.beams, keeper)
        self.committer = Committer(self.pools, segments, self.drafter, fold, blend)
        self.lifecycle = Lifecycle(*parts, self.beams, self.drafter, fold, build_prompt, keeper)
        self.preemption = Preemption(self.table, self.pools, self.lifecycle, fold, keeper)
        deciding = self.table, self.admission, limits.scheduler
        self.scheduler = Scheduler(*deciding, keeper, self.preemption)

    def _drafter(self, kv_outline: KVCache | None, models: Sequence[Any]) -> Drafter:
        limits = self.limits
        first = limits.drafter
        second = limits.outline_drafter
        context = DraftContext(
            table=self.table,
            layout=self.layout,
            samplers=self.samplers,
            model=models[0],
            kv=self.kv_draft,
            accept=limits.accept,
            costs=limits.costs,
            outlines=None if second is None else False,
        )
        main: Drafter = drafter_class(first.kind)(first, context)
        if second is None:
            return main
        context = replace(
            context, model=models[1], kv=kv_outline, costs=limits.outline_costs, outlines=True
        )
        return TwoDrafters(main, drafter_class(second.kind)(second, context))

    def _prefixes(self, pools: Sequence[KVCache]) -> PrefixCache | None:
        """What is kept of prompts and answers; None where nothing can be: blended rows are no
        prompt's own, and beams are no text."""
        exact = self.blend is None and self.beams is None
        if not (pools and exact and self.limits.scheduler.prefix_cache):
            return None
        return PrefixCache(pools, self.table.segments, self.drafter.lookback)

    def _keeper(self) -> Keeper | None:
        if self.prefixes is None:
            return None
        whole = self.table, self.prefixes, self.drafter
        if isinstance(self.layout, BatchingLayout):
            return CopyingKeeper(*whole, layout=self.layout, rows=self.pools)
        return Keeper(*whole)

    @property
    def kept_rows(self) -> int:
        """Rows of the target's pool that stay for whoever begins like what has ended."""
        cache = self.prefixes
        return cache.idle + cache.pinned if cache and cache.pools[0] is self.kv else 0

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

    # -- the next step ----------------------------------------------------------------------------

    def plan_(self, inbox: Inbox) -> StepPlan:
        """Who came is queued and who is to end is retired; then what the next step does."""
        arrived, ended = inbox.take()
        for request in arrived:
            self.submit(request)
        for request, finish in ended:
            self.table.end(request, finish)
        self.table.expire()
        self.lifecycle.retire_cancelled_()
        while True:
            plan = self.scheduler.plan_(serves=inbox.serves)
            if plan.does is not Does.REST or not self.lifecycle.refuse_stuck_():
                return plan

    def starting(self, step: StepPlan) -> list[Branch]:
        """The branches that start in this step."""
        return [self.table.branch_of(owner) for owner in step.branches]

    def beginning(self, step: StepPlan) -> list[Request]:
        """The requests that begin in this step."""
        return [self.table.request_of(owner) for owner in step.requests]

    def reading(self, step: StepPlan) -> list[tuple[Request, int]]:
        """The requests whose prompts go on in this step, and by how many tokens."""
        return [(self.table.request_of(owner), count) for owner, count in step.chunks]

    # -- the next forward, and what it brought ----------------------------------------------------

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
            if self.fold is not None and branch.ended:
                slots = self.kv.slots_of(branch.owner, self.layout.rows_of(branch.owner)[0])
                self.fold.keep_(branch, self.kv, slots)
        self.lifecycle.retire_and_prepare_(batch.everyone)
        return summary
