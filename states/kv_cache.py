"""The KV rows of requests and branches: when they are freed, and which rows stay cached.

`KVCacheManager` frees, promotes and preempts rows in all pools of a run. `PrefixCacheManager`
moves rows between requests and the prefix cache: the prompt while a request runs, everything that
was decoded when it ends. Under ``batching`` the cache has pools of its own, and rows are copied.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ops.kv.pool import NO_SEGMENT, Ints, KVCache
from .beam import BeamState
from .blend import BlendState
from .drafter import Drafter
from .fold import FoldState
from .layout import BatchingLayout, Layout
from .prefix_cache import PrefixCache, shared_length
from .request import Branch, Request, Stage
from .request_table import RequestTable
from .sampling import Samplers


@dataclass(eq=False, slots=True, kw_only=True)
class PrefixCacheManager:
    """Gives rows of requests to the prefix cache, and cached rows to requests.

    Attributes:
        borrowers: requests that continue after cached rows, by prefix owner.
    """

    table: RequestTable
    cache: PrefixCache
    drafter: Drafter
    borrowers: dict[int, Request] = field(default_factory=dict)
    _prompts: dict[int, Ints] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)

    # -- requests that start ----------------------------------------------------------------------

    def select_(self, requests: Sequence[Request]) -> list[Request]:
        """Defer requests whose prefix another request computes in this step.

        A deferred request starts in the next step, when the rows are cached. The others continue
        after the cached rows of their prompt, if there are enough.
        """
        selected: list[Request] = []
        unread = []
        if self.table.active:  # so the drafter has a forward in this step
            unread = [r for r in self.table.open.values() if not self._drafter_has_read(r)]
        for request in requests:
            if request.waits and not request.shared:
                if self._gains_by_waiting(request, [*selected, *unread]):
                    continue
                self._attach_(request)
            selected.append(request)
        return selected

    def rows_held_by_others(self, request: Request) -> int:
        """Cached rows that a waiting request would continue after and that others pin anyway, so
        that it needs no slots for them."""
        ids = self._prompt(request)
        salt = request.cache_salt
        length = self.cache.reusable(ids, self._max_shared(request), salt)
        end = 0
        for segment in self.cache.match(ids, salt)[0] if length else ():
            node = self.cache.nodes[segment]
            end = node.end if node.pins else end
        return min(end, length)

    def _gains_by_waiting(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether more rows are reusable once the others have started."""
        ids = self._prompt(request)
        limit = self._max_shared(request)
        salt = request.cache_salt
        prompts = [self._prompt(other) for other in others if other.cache_salt == salt]
        common = max((shared_length(prompt, ids) for prompt in prompts), default=0)
        reusable = self.cache.reusable(ids, limit, salt)
        return min(common - self.cache.lookback, limit) >= reusable + self.cache.min_match

    def _attach_(self, request: Request) -> None:
        ids = self._prompt(request)
        salt = request.cache_salt
        if request.prefix_owner not in self._counted:
            self._counted.add(request.prefix_owner)
            self.cache.figures.asked += len(ids)
        self._publish_prefix_of_(ids, salt)
        length = self.cache.attach_(request.prefix_owner, ids, self._max_shared(request), salt)
        if request.stage is Stage.WAITING:
            request.reused = length
        if length:
            self.borrowers[request.prefix_owner] = request
            request.shared = length
            request.extend_prefix(ids[:length].tolist())
        if (more := length - request.body_size) > 0:
            request.borrow_tail(more)

    def make_room_(self, claimed: int, starting: Sequence[Request]) -> None:
        """Evict idle rows: those in the regions of the requests that start, and those in excess of
        the free slots.

        Args:
            claimed: slots of the target's pool that are held or reserved.
        """
        target = self.cache.pools[0]
        for request in starting:
            region = target.regions[request.prefix_owner]
            self.cache.evict_slots_(region.first, region.first + region.size)
        self.cache.evict_to_(target.slots - claimed)

    def _prompt(self, request: Request) -> Ints:
        """The first ids of a request's first branch, as far as others may share them."""
        owner = request.prefix_owner
        if owner not in self._prompts:
            ids = [*request.body]
            if request.first_branch is not None:
                ids += [*request.common_prompt, *request.first_branch.rows]
            elif self._reads_whole_prompt(request):
                ids += request.tail
            self._prompts[owner] = np.array(ids, np.int32)
        return self._prompts[owner]

    def _reads_whole_prompt(self, request: Request) -> bool:
        """Whether the first forward reads the whole prompt; parts of a given outline need not."""
        return request.given_outline is None or self.table.limits.share_outline

    def _max_shared(self, request: Request) -> int:
        """Upper bound of the shared rows.

        A drafter may pair the last shared row with the token after it, so a row before a token of
        the request's own stays its own.
        """
        if request.first_branch is not None:
            return request.body_size - 1
        return len(self._prompt(request)) - (not self._reads_whole_prompt(request))

    def _publish_prefix_of_(self, ids: Ints, salt: str) -> None:
        """Publish the rows that running requests have of this prompt."""
        _, cached = self.cache.match(ids, salt)
        for request in self.table.open.values():
            common = shared_length(self._prompt(request), ids) if request.cache_salt == salt else 0
            if common < cached + self.cache.min_match or common <= request.shared:
                continue
            first = self._prompt_branch(request)
            rows = request.prefix_length if first is None else first.length
            end = min(common, rows)
            enough = end >= cached + self.cache.min_match and end > request.shared
            if enough and self._drafter_has_read(request):
                self._publish_(request, end, [] if first is None else [first.owner])
                cached = end

    def _drafter_has_read(self, request: Request) -> bool:
        """Whether the drafter has read the request's prompt as far as the target has."""
        owners = {request.prefix_owner, *(b.owner for b in request.all_branches())}
        end = len(self._prompt(request))
        return all(position >= end for position in self.drafter.unread(owners))

    def _publish_(self, request: Request, end: int, more: Sequence[int] = ()) -> None:
        """Give the rows of a request before position `end` to the cache."""
        tokens = np.array(self._row_ids(request)[request.shared : end], np.int32)
        if len(tokens):
            salt = request.cache_salt
            self.cache.publish_(request.prefix_owner, more, tokens, request.shared, salt=salt)
            request.shared = end

    def _row_ids(self, request: Request) -> list[int]:
        """The ids of its first rows: of the prefix, and of the prompt after it."""
        first = self._prompt_branch(request)
        return [*request.context, *(first.prompt if first is not None else ())]

    def _prompt_branch(self, request: Request) -> Branch | None:
        """The branch whose rows hold the end of the prompt, if the prefix does not."""
        first = request.root if request.stage is Stage.OUTLINE else None
        if request.branches and request.samples == 1 and not request.outline_budget:
            first = request.branches[0]
        runs = first is not None and first.stage is not Stage.PREEMPTED and not first.preempted
        return first if runs else None

    # -- preemption -------------------------------------------------------------------------------

    def preempt_(self, branch: Branch) -> None:
        """Cache the rows of a preempted branch, or free them."""
        segments = self.cache.segments
        segment = segments.add(branch.request.prefix_owner)
        for pool in self.cache.pools:
            pool.relabel_(branch.owner, segment, segments.home[segment])
        if not self._insert_as_(branch, segment):
            for pool in self.cache.pools:
                pool.retire_([segment])
            segments.remove([segment])

    def resume_(self, branch: Branch) -> None:
        """Let a preempted branch continue after its cached rows, if they reach past its prefix."""
        request = branch.request
        salt = branch.request.cache_salt
        if len(request.common_prompt):
            return
        ids = np.array([*request.body, *branch.rows], np.int32)
        if self.cache.reusable(ids, len(ids), salt) > request.body_size:
            branch.first_own_row = self.cache.attach_(branch.owner, ids, len(ids), salt)

    def detach_branch_(self, branch: Branch) -> None:
        """Unpin the cached rows of its own that a branch continues after."""
        if branch.first_own_row:
            self.cache.detach_(branch.owner)
            branch.first_own_row = 0

    def move_to_prefix_(self, root: Branch) -> None:
        """Let a request's prefix continue after the cached rows of its resumed outline, which
        joins the prefix."""
        request = root.request
        segments = self.cache.segments
        owner = request.prefix_owner
        self.drafter.forget([owner])
        for pool in self.cache.pools:
            pool.truncate_(owner, 0)
        self.cache.detach_(owner)
        segments.set_parent(owner, segments.parent[root.owner])
        self.borrowers[owner] = request
        request.shared = root.first_own_row
        root.first_own_row = 0

    def return_borrowed_(self) -> bool:
        """Detach waiting requests from the cached rows that they would continue after; returns
        whether there were any."""
        waiting = [request for request in self.borrowers.values() if request.waits]
        for request in waiting:
            self.close_(request)
            request.shared = 0
            request.prefix_length = 0
            self.cache.segments.set_parent(request.prefix_owner, NO_SEGMENT)
        return bool(waiting)

    # -- requests that end ------------------------------------------------------------------------

    def publish_prompt_(self, request: Request) -> None:
        """Cache the prompt of an outline that ended, if other requests gain by it."""
        root = request.root
        ids = self._prompt(request)
        if root is None or root.preempted or root.length < len(ids):
            return  # the rows of a preempted outline are cached already
        if self._drafter_has_read(request) and len(ids) >= request.shared + self.cache.min_match:
            self._publish_(request, len(ids), [root.owner])

    def shorten_(self, request: Request, length: int) -> None:
        """Cut a prefix to `length` positions."""
        if request.shared > length:
            self.cache.shorten_(request.prefix_owner, length)
            request.shared = length
        self._prompts[request.prefix_owner] = self._prompt(request)[:length]

    def insert_(self, branch: Branch) -> bool:
        """Cache what a branch has decoded; False if nothing is cached."""
        if branch.is_root:
            self.detach_branch_(branch)
            return False
        return self._insert_as_(branch, branch.owner)

    def _insert_as_(self, branch: Branch, segment: int) -> bool:
        """Cache the branch's rows, which are labelled `segment`. Rows that attend to several
        branches are not the rows of a plain prompt and are not cached."""
        request = branch.request
        rows = branch.length - branch.start
        if branch.reads or rows <= 0 or len(request.common_prompt):
            self.detach_branch_(branch)
            return False
        segments = self.cache.segments
        start = branch.first_own_row
        if not start:
            self._publish_(request, request.prefix_length)
            start = max(branch.start, request.shared)
        above = branch.owner if branch.first_own_row else request.prefix_owner
        segments.set_parent(segment, segments.parent[above])
        ids = [*branch.prompt, *branch.tokens][start - branch.start : rows]
        inserted = self.cache.insert_(segment, np.array(ids, np.int32), start, request.cache_salt)
        self.detach_branch_(branch)
        return inserted

    def close_(self, request: Request, *, failed: bool = False) -> None:
        """Cache the prefix of an ended request and unpin what it continued after.

        The idle cached rows of a failed request are evicted, because they may be the cause.
        """
        if request.prefix_length and not failed:
            self._publish_(request, request.prefix_length)
        self.cache.detach_(request.prefix_owner, drop=failed)
        self.borrowers.pop(request.prefix_owner, None)
        self._prompts.pop(request.prefix_owner, None)
        self._counted.discard(request.prefix_owner)


@dataclass(eq=False, slots=True, kw_only=True)
class CopyingPrefixCacheManager(PrefixCacheManager):
    """The prefix cache of the layout ``batching``, in pools of its own.

    A branch sees its own pool row only, so cached rows are copied into the row of a request that
    starts, and out of it when they are cached.

    layout: the pool row of each owner. rows: the pools of the run, in the order of the cache's.
    """

    layout: BatchingLayout
    rows: Sequence[KVCache]

    def make_room_(self, claimed: int, starting: Sequence[Request]) -> None:
        """Copy the cached rows of each request that starts into its pool row."""
        for request in starting:
            if not request.shared:
                continue
            owner = request.prefix_owner
            path = self.cache.segments.path(owner)[:0:-1]
            for cached, pool in zip(self.cached_pools, self.rows, strict=True):
                slots = np.concatenate([cached.slots_of(segment) for segment in path])
                slots = slots[cached.position[slots] < request.shared]
                pool.copy_from_(cached, slots, owner, self.layout.rows_of(owner)[0])
                pool.ledger.add("prefix", slots.size * pool.slot_bytes)
            self._detach_(request)

    def _detach_(self, request: Request) -> None:
        self.cache.detach_(request.prefix_owner)
        self.cache.segments.set_parent(request.prefix_owner, NO_SEGMENT)
        self.borrowers.pop(request.prefix_owner, None)
        request.shared = 0

    @property
    def cached_pools(self) -> Sequence[KVCache]:
        """The pools of the cache, in the order of `rows`."""
        return [pool for pool in self.cache.pools if isinstance(pool, KVCache)]

    def _publish_(self, request: Request, end: int, more: Sequence[int] = ()) -> None:
        if request.shared:
            return  # its pool row is not allocated yet, and its rows are cached
        owners = (request.prefix_owner, *more)
        row = self.layout.rows_of(owners[-1])[0]
        self._copy_out_(self._row_ids(request)[:end], owners, row, request.cache_salt)

    def preempt_(self, branch: Branch) -> None:
        """Cache a copy of the rows of a preempted branch and free them."""
        self._insert_as_(branch, branch.owner)
        for pool in self.rows:
            pool.retire_([branch.owner])

    def resume_(self, branch: Branch) -> None:
        """Nothing to do: a resumed branch prefills its rows in its own pool row."""

    def return_borrowed_(self) -> bool:
        """Detach waiting requests from the rows to be copied; returns whether there were any."""
        waiting = [request for request in self.borrowers.values() if request.waits]
        for request in waiting:
            self._detach_(request)
            request.prefix_length = 0
        return bool(waiting)

    def _insert_as_(self, branch: Branch, segment: int) -> bool:
        """Cache a copy of the rows; they are freed by the caller."""
        request = branch.request
        if not branch.reads and branch.length > branch.start and not len(request.common_prompt):
            ids = [*request.context, *branch.prompt, *branch.tokens][: branch.length]
            owners = (request.prefix_owner, segment)
            row = self.layout.rows_of(branch.owner)[0]
            self._copy_out_(ids, owners, row, request.cache_salt)
        return False

    def _copy_out_(self, ids: Sequence[int], owners: Sequence[int], row: int, salt: str) -> None:
        """Cache copies of the rows of these ids that are not cached yet, from a pool row."""
        ids_T: Ints = np.array(ids, np.int32)
        if self.cache.match(ids_T, salt)[1] == len(ids_T):
            return
        segment = self.cache.segments.add()
        start = self.cache.attach_(segment, ids_T, len(ids_T), salt, counted=False)
        free = self.cache.pools[0].slots - self.cache.pinned - len(ids_T) + start
        if free < 0:
            self.cache.detach_(segment)
            self.cache.segments.remove([segment])
            return
        self.cache.evict_to_(free)
        for cached, pool in zip(self.cached_pools, self.rows, strict=True):
            slots = np.concatenate([pool.slots_of(owner, row) for owner in owners])
            positions = pool.position[slots]
            new = slots[(positions >= start) & (positions < len(ids_T))]
            cached.copy_from_(pool, new, segment)
            pool.ledger.add("keep", new.size * pool.slot_bytes)
        self.cache.detach_(segment)
        self.cache.insert_(segment, ids_T[start:], start, salt)

    def close_(self, request: Request, *, failed: bool = False) -> None:
        """Evict the cached copies of a failed request that no other request pins."""
        if failed and request.prefix_length:
            segment = self.cache.segments.add()
            ids = self._prompt(request)
            self.cache.attach_(segment, ids, len(ids), request.cache_salt, counted=False)
            self.cache.detach_(segment, drop=True)
            self.cache.segments.remove([segment])
        PrefixCacheManager.close_(self, request, failed=failed)


@dataclass(eq=False, slots=True, kw_only=True)
class KVCacheManager:
    """Frees, promotes and preempts the rows of branches and requests in all pools of a run.

    pools: the target's and then the drafters'. prefixes: the prefix cache; None frees all rows of
    an ended branch.
    """

    table: RequestTable
    layout: Layout
    pools: Sequence[KVCache]
    drafter: Drafter
    samplers: Samplers
    blend: BlendState | None
    beams: BeamState | None
    fold: FoldState | None
    prefixes: PrefixCacheManager | None

    @property
    def needed_slots(self) -> int:
        """Slots of the target's pool that are in use and not idle."""
        return self.pools[0].needed_length

    @property
    def num_cached_rows(self) -> int:
        """Rows of the target's pool that belong to the prefix cache."""
        cache = None if self.prefixes is None else self.prefixes.cache
        return cache.idle + cache.pinned if cache and cache.pools[0] is self.pools[0] else 0

    def free_(self, owners: Sequence[int]) -> None:
        """Free all rows of these owners in all pools."""
        if not owners:
            return
        if self.beams is not None:
            owners = [*owners, *self.beams.forget(owners)]
        for pool in self.pools:
            pool.retire_(owners)
        self.table.segments.remove(owners)
        self.forget_(owners)

    def forget_(self, owners: Sequence[int]) -> None:
        """Forget owners that no longer run; their rows are freed or cached elsewhere."""
        self.layout.leave_(owners)
        self.samplers.forget(owners)
        self.drafter.forget(owners)
        if self.blend is not None:
            self.blend.forget_(owners)

    def end_branches_(self, branches: Iterable[Branch]) -> None:
        """Cache or free the rows of branches that ended."""
        cached = list[int]()
        freed = list[int]()
        for branch in branches:
            if branch.owner in self.table.segments and not branch.rows_released:
                inserted = self.prefixes is not None and self.prefixes.insert_(branch)
                branch.rows_released = inserted
                (cached if inserted else freed).append(branch.owner)
        if cached:
            self.forget_(cached)
        self.free_(freed)

    def end_request_(self, request: Request, *, wipe: bool) -> None:
        """Cache or free all rows of a request; wipe: overwrite its rows with zeros and free them,
        because an error may have left NaN in them."""
        self.drafter.close(request)
        if self.fold is not None:
            self.fold.forget_(request)
        branches = list(request.all_branches())
        if wipe:
            self._detach_(branches)
            unreleased = [branch.owner for branch in branches if not branch.rows_released]
            for pool in self.pools:
                pool.wipe_([request.prefix_owner, *unreleased])
            self.free_(unreleased)
        self.end_branches_(branches)
        if self.prefixes is not None:
            self.prefixes.close_(request, failed=wipe)
        self.free_([request.prefix_owner])

    def _detach_(self, branches: Iterable[Branch]) -> None:
        if self.prefixes is not None:
            for branch in branches:
                self.prefixes.detach_branch_(branch)

    def drop_root_(self, request: Request) -> None:
        """Free an outline that the parts do not follow (`share: prompt`), and the end of the prefix
        that only the outline used. The last shared token is prefilled again, for drafters that pair
        it with the next one."""
        root = request.root
        assert root is not None
        end = len(request.prefix) - request.borrowed_rows
        if self.prefixes is not None:
            self.prefixes.publish_prompt_(request)
        if max(request.shared, request.prefix_length) > end:
            length = max(end - 1, 0)
            if self.prefixes is not None:
                self.prefixes.shorten_(request, length)
            for pool in self.pools:
                pool.truncate_(request.prefix_owner, length)
            self.drafter.truncate(request.prefix_owner, length)
            request.shrink_prefix(length)
        self._detach_([root])
        self.free_([root.owner])

    def promote_root_(self, request: Request) -> None:
        """Relabel the outline's rows as rows of the prefix (`share: outline`): 0 bytes moved."""
        root = request.root
        assert root is not None
        if root.first_own_row and self.prefixes is not None:
            self.prefixes.move_to_prefix_(root)
        home = self.table.segments.home[request.prefix_owner]
        for pool in self.pools:
            pool.relabel_(root.owner, request.prefix_owner, home)
        self.layout.leave_([root.owner])
        self.drafter.promote(root)
        self.table.segments.merge_into_parent(root.owner, request.prefix_owner)
        request.prefix_parts.append(root.rows)
        request.extend_prefix(root.rows.ids)

    def retain_(self, branch: Branch) -> None:
        """Let the rows of an ended part stay in place until the parts are combined."""
        self.layout.hold_(branch.owner, branch.request.prefix_owner, self.pools)
        branch.retained = True

    def prune_(self, request: Request) -> None:
        """Free the copies of a prefix that no waiting branch needs."""
        self.layout.prune_(request.prefix_owner, self.pools)

    def discard_uncommitted_(self) -> None:
        """Free the rows of a step that was not finished."""
        for pool in self.pools:
            pool.release_(np.flatnonzero(~pool.committed))

    # -- preemption -------------------------------------------------------------------------------

    def preempt_branch_(self, branch: Branch) -> None:
        """Cache or free the rows of a branch that is preempted."""
        if self.prefixes is not None:
            self.prefixes.preempt_(branch)
        else:
            for pool in self.pools:
                pool.retire_([branch.owner])
        self.table.segments.set_parent(branch.owner, branch.request.prefix_owner)
        self.forget_([branch.owner])
        if self.fold is not None:
            self.fold.discard_features_(branch)

    def preempt_prefix_(self, request: Request) -> None:
        """Cache or free the prefix of a request that is preempted."""
        if self.prefixes is not None:
            self.prefixes.close_(request)
        owner = request.prefix_owner
        for pool in self.pools:
            pool.retire_([owner])
        self.table.segments.set_parent(owner, NO_SEGMENT)
        self.forget_([owner])
        request.shared = 0
        request.prefix_length = 0

    def evict_idle_(self, slots: int) -> None:
        """Evict idle cached rows until `slots` slots of the target's pool are free, or none is
        idle."""
        if self.prefixes is not None:
            cache = self.prefixes.cache
            free = self.pools[0].slots - self.pools[0].current_length
            cache.evict_to_(cache.idle - max(slots - free, 0))

    def return_borrowed_(self) -> bool:
        """Detach waiting requests from cached rows; returns whether there were any."""
        return self.prefixes is not None and self.prefixes.return_borrowed_()
