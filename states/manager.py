"""`BranchStateManager`: the owner of all state of a run that lives between two forwards.

It builds the scheduler, the KV cache manager, the batch builder and the committer of a run. All
decisions are functions of host integers that are read once per round.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ops.kv.pool import KVCache
from .admission import Admission, CapacityModel
from .batch import BatchBuilder
from .beam import BeamState
from .blend import BlendState, Reused
from .commit import Committer
from .drafter import DraftContext, Drafter, TwoDrafters
from .fold import FoldState
from .graph.drafter_settings import nodes_for
from .graph.graph import BeamBlock
from .graph.plugins import drafter_class
from .kv_cache import CopyingPrefixCacheManager, KVCacheManager, PrefixCacheManager
from .layout import BatchingLayout, Layout, PagedLayout
from .lifecycle import BuildPrompt, Lifecycle
from .prefix_cache import PrefixCache
from .request import Branch, Request
from .request_table import RequestTable, RunLimits
from .sampling import Samplers
from .scheduler import Scheduler


class BranchStateManager:
    """Requests, branches, KV rows and outputs of a run, for the target and its drafters.

    Args:
        build_prompt: the prompt of a branch whose dependencies have ended.
        blend: how cached document chunks are reused; None computes every row.
        fold: how finished parts are combined; None leaves them as they are.
        beam: settings of beam search; None decodes branches.
        kv_outline: pool of the outlines' own drafter. draft_models: the networks of the drafter
            and of the outlines' own drafter; None for a kind without one.
        cache_pools: pools of the prefix cache, one row each, in the order of the others (target,
            drafter, outlines' drafter); without them the cache uses those pools themselves, if
            branches share their rows.

    Attributes:
        table: requests and branches. admission: what fits. scheduler: plans each step.
        kv_cache: rows in the pools. prefixes: the radix tree of cached rows, or None.
        lifecycle: requests and branches between forwards.
        batch_builder: builds the next forward. committer: commits its results.
        drafter: proposes the trees of a round; two drafters as one if outlines have their own.
    """

    def __init__(
        self,
        kv: KVCache,
        kv_draft: KVCache | None,
        limits: RunLimits,
        build_prompt: BuildPrompt,
        *,
        blend: BlendState | None = None,
        fold: FoldState | None = None,
        beam: BeamBlock | None = None,
        kv_outline: KVCache | None = None,
        cache_pools: Sequence[KVCache] = (),
        draft_models: Sequence[Any] = (None, None),
    ) -> None:
        self.kv = kv
        self.kv_draft = kv_draft
        self.limits = limits
        self.blend = blend
        self.fold = fold
        self.pools = [pool for pool in (kv, kv_draft, kv_outline) if pool is not None]
        self.table = RequestTable(limits)
        self.samplers = Samplers(limits.vocabulary, kv.data.device)
        self.layout = _layout(limits, kv, self.table)
        self.capacity = _capacity(limits, kv, beam)
        self.drafter = self._drafter(kv_outline, draft_models)
        self.beams = None if beam is None else BeamState(beam.num_beams, self.table, kv)
        row_per_branch = isinstance(self.layout, BatchingLayout)
        self.prefixes: PrefixCache | None = None
        pools = cache_pools or (() if row_per_branch else self.pools)
        # Blended rows are not the rows of a plain prompt, and beams are not a text.
        if pools and blend is None and beam is None and limits.scheduler.prefix_cache:
            self.prefixes = PrefixCache(pools, self.table.segments, self.drafter.lookback)
        self.admission = Admission(
            capacity=self.capacity,
            order=limits.layout.order,
            limits=limits,
            cache=None if row_per_branch else self.prefixes,
        )
        prefix_manager = self._prefix_manager()
        self.kv_cache = KVCacheManager(
            table=self.table,
            layout=self.layout,
            pools=self.pools,
            drafter=self.drafter,
            samplers=self.samplers,
            blend=blend,
            beams=self.beams,
            fold=fold,
            prefixes=prefix_manager,
        )
        self.lifecycle = Lifecycle(
            table=self.table,
            kv_cache=self.kv_cache,
            admission=self.admission,
            fold=fold,
            build_prompt=build_prompt,
        )
        self.scheduler = Scheduler(
            table=self.table,
            admission=self.admission,
            block=limits.scheduler,
            kv_cache=self.kv_cache,
            lifecycle=self.lifecycle,
        )
        self.batch_builder = BatchBuilder(
            table=self.table,
            layout=self.layout,
            pools=self.pools,
            admission=self.admission,
            samplers=self.samplers,
            blend=blend,
            beams=self.beams,
            prefixes=prefix_manager,
        )
        self.committer = Committer(
            pools=self.pools,
            segments=self.table.segments,
            drafter=self.drafter,
            layout=self.layout,
            lifecycle=self.lifecycle,
            fold=fold,
            blend=blend,
        )

    def _drafter(self, kv_outline: KVCache | None, models: Sequence[Any]) -> Drafter:
        limits = self.limits
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
        main: Drafter = drafter_class(limits.drafter.kind)(limits.drafter, context)
        if second is None:
            return main
        context = replace(
            context, model=models[1], kv=kv_outline, costs=limits.outline_costs, outlines=True
        )
        return TwoDrafters(main, drafter_class(second.kind)(second, context))

    def _prefix_manager(self) -> PrefixCacheManager | None:
        if self.prefixes is None:
            return None
        if isinstance(self.layout, BatchingLayout):
            return CopyingPrefixCacheManager(
                table=self.table,
                cache=self.prefixes,
                drafter=self.drafter,
                layout=self.layout,
                rows=self.pools,
            )
        return PrefixCacheManager(table=self.table, cache=self.prefixes, drafter=self.drafter)

    # -- what users of a run read -----------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """All requests in the order of their submission; see `RequestTable.requests`."""
        return self.table.requests

    @property
    def unfinished(self) -> list[Request]:
        return self.table.unfinished

    @property
    def active(self) -> list[Branch]:
        """The running branches, in the order of every [S, ...] tensor."""
        return self.table.active

    @property
    def reused(self) -> dict[int, Reused]:
        """By owner, which of its rows came from cached documents."""
        return {} if self.blend is None else self.blend.reused


def _layout(limits: RunLimits, kv: KVCache, table: RequestTable) -> Layout:
    device = kv.data.device
    if limits.layout.kind == "batching":
        return BatchingLayout(device, table.segments, kv.rows)
    if limits.layout.kind == "paged":
        return PagedLayout(device, table.segments)
    return Layout(device, table.segments)


def _capacity(limits: RunLimits, kv: KVCache, beam: BeamBlock | None) -> CapacityModel:
    max_branches = limits.layout.max_num_branches
    nodes = limits.nodes
    shared = limits.drafter.shared
    if limits.layout.kind == "paged" and shared is not None:
        # Each tree has as many rows as the shared budget may give to one tree.
        counts = range(1, max_branches + 1)
        nodes = {count: min(nodes_for(nodes, count), shared) for count in counts}
        shared = None
    return CapacityModel(
        capacity=kv.capacity,
        max_active=max_branches,
        nodes=nodes,
        rows=kv.rows if limits.layout.kind == "batching" else 0,
        shared=shared,
        beams=1 if beam is None else beam.num_beams,
    )
