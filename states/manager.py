"""`BranchStateManager`: the owner of all state of a run that lives between two forwards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..ops.kv.pool import KVCache
from .admission import Admission, CapacityModel
from .batch import BatchBuilder
from .beam import BeamState
from .blend import BlendState, FoldState, Reused
from .commit import Committer
from .drafter import DraftContext, Drafter, MixedDrafter, TwoDrafters
from .graph.drafter_settings import DrafterSettings, most_offered, nodes_for
from .graph.graph import Graph
from .graph.plugins import drafter_class
from .kv_cache import CopyingPrefixCacheManager, KVCacheManager, PrefixCacheManager
from .layout import BatchingLayout, Layout, PagedLayout
from .lifecycle import BuildPrompt, Lifecycle
from .prefix_cache import PrefixCache
from .request import Branch, Request
from .request_table import RequestTable, RunLimits
from .sampling import Samplers
from .scheduler import Scheduler

LAYOUTS = {"bim": Layout, "batching": BatchingLayout, "paged": PagedLayout}


class BranchStateManager:
    """Requests, branches, KV rows and outputs of a run, for the target and its drafters.

    build_prompt: the prompt of a branch whose dependencies have ended. draft_models: the networks
    of the drafter and of the outlines' own, whose pool is `kv_outline`. cache_pools: pools of the
    prefix cache in the order of the others; without them the cache uses those pools themselves, if
    branches share their rows. prefixes: the radix tree of cached rows, or None."""

    def __init__(
        self,
        kv: KVCache,
        kv_draft: KVCache | None,
        limits: RunLimits,
        build_prompt: BuildPrompt,
        *,
        blend: BlendState | None = None,
        fold: FoldState | None = None,
        kv_outline: KVCache | None = None,
        cache_pools: Sequence[KVCache] = (),
        draft_models: Sequence[Any] = (None, None),
    ) -> None:
        self.kv = kv
        self.kv_draft = kv_draft
        self.limits = limits
        self.blend = blend
        self.fold = fold
        # By owner, which of its rows came from cached documents.
        self.reused: dict[int, Reused] = {} if blend is None else blend.reused
        self.pools = [pool for pool in (kv, kv_draft, kv_outline) if pool is not None]
        self.table = RequestTable(limits)
        self.samplers = Samplers(limits.vocabulary, kv.data.device)
        kind = limits.graph.layout.kind
        self.layout = LAYOUTS[kind](self.pools, self.table.segments)
        self.capacity = _capacity(limits.graph, kv)
        self.drafter = self._drafter(kv_outline, draft_models)
        row_per_branch = kind == "batching"
        beam = limits.graph.beam
        self.prefixes: PrefixCache | None = None
        pools = cache_pools or (() if row_per_branch else self.pools)
        prefix_manager = None
        # Blended rows are not the rows of a plain prompt, and beams are not a text.
        if pools and blend is None and beam is None and limits.graph.scheduler.prefix_cache:
            self.prefixes = PrefixCache(pools, self.table.segments, self.drafter.lookback)
            manager = CopyingPrefixCacheManager if row_per_branch else PrefixCacheManager
            prefix_manager = manager(self.table, self.prefixes, self.drafter, self.layout)
        cache = None if row_per_branch else self.prefixes
        self.admission = Admission(capacity=self.capacity, limits=limits, cache=cache)
        self.kv_cache = KVCacheManager(
            table=self.table,
            layout=self.layout,
            pools=self.pools,
            drafter=self.drafter,
            samplers=self.samplers,
            blend=blend,
            beams=None if beam is None else BeamState(beam.num_beams, self.table, kv),
            fold=fold,
            prefixes=prefix_manager,
        )
        self.beams = self.kv_cache.beams
        self.lifecycle = Lifecycle(self.kv_cache, self.admission, build_prompt)
        self.scheduler = Scheduler(self.lifecycle, limits.graph.scheduler)
        self.batch_builder = BatchBuilder(self.kv_cache, self.admission)
        self.committer = Committer(self.lifecycle)

    def _drafter(self, kv_outline: KVCache | None, models: Sequence[Any]) -> Drafter:
        limits = self.limits
        first = limits.graph.drafter
        second = limits.graph.outline_drafter
        context = DraftContext(
            table=self.table,
            layout=self.layout,
            samplers=self.samplers,
            model=models[0],
            kv=self.kv_draft,
            accept=limits.graph.sampling.accept,
            costs=limits.costs,
            outlines=None if second is None else False,
        )
        main = new_drafter(first, context)
        if second is None:
            return main
        costs = limits.outline_costs
        context = replace(context, model=models[1], kv=kv_outline, costs=costs, outlines=True)
        return TwoDrafters(main, new_drafter(second, context))

    @property
    def ended(self) -> int:
        """Requests that have ended."""
        return self.table.ended

    @property
    def requests(self) -> list[Request]:
        return self.table.requests

    @property
    def active(self) -> list[Branch]:
        """The running branches, in the order of every [S, ...] tensor."""
        return self.table.active

    @property
    def claimed_slots(self) -> int:
        """Slots of the cached rows' pool that running requests claim, besides the pinned rows."""
        if self.admission.cache is None:
            return 0  # it has pools of its own
        running = self.table.open.values()
        return self.admission.claimed(running, len(self.active), ()) - self.admission.pinned


def new_drafter(settings: DrafterSettings, context: DraftContext) -> Drafter:
    """The drafter of a block, with those that its keys `with` and `or` name."""
    main: Drafter = drafter_class(settings.kind)(settings, context)
    width = getattr(settings, "filler_top_k", 1)
    costs = context.costs and replace(context.costs, drafter=type(context.costs.drafter)((), ()))
    without_model = replace(context, model=None, kv=None, costs=costs)

    def other(block: DrafterSettings) -> Drafter:
        if "filler_top_k" in type(block).model_fields:  # all read what one forward gave
            block = block.model_copy(update={"filler_top_k": width})
        drafter: Drafter = drafter_class(block.kind)(block, without_model)
        return drafter

    if kinds := getattr(settings, "with_", ()):
        blocks = [drafter_class(kind).Settings.model_validate({"kind": kind}) for kind in kinds]
        main = MixedDrafter(main, [other(block) for block in blocks])
    if settings.takes_turns:
        from .auto import AutoDrafter

        return AutoDrafter(main, [other(block) for block in settings.alternatives[1:]], context)
    return main


def _capacity(graph: Graph, kv: KVCache) -> CapacityModel:
    max_branches = graph.layout.max_num_branches
    counts = range(1, max_branches + 1)
    outlines = () if graph.outline_drafter is None else graph.outline_drafter.alternatives
    nodes = most_offered((*graph.drafter.alternatives, *outlines), max_branches)
    shared = graph.drafter.shared
    if graph.layout.kind == "paged" and shared is not None:
        # Each tree has as many rows as the shared budget may give to one tree.
        nodes = {count: min(nodes_for(nodes, count), shared) for count in counts}
        shared = None
    return CapacityModel(
        capacity=kv.capacity,
        max_active=max_branches,
        nodes=nodes,
        rows=kv.rows if graph.layout.kind == "batching" else 0,
        shared=shared,
        beams=1 if graph.beam is None else graph.beam.num_beams,
    )
