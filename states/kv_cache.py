"""The KV rows of requests and branches: when they are freed, and which rows stay cached."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ops.kv.pool import NO_SEGMENT, Ints, KVCache
from .beam import BeamState
from .blend import BlendState, FoldState
from .drafter import Drafter
from .layout import Layout
from .prefix_cache import PrefixCache, shared_length
from .request import Branch, Request, Stage
from .request_table import RequestTable
from .sampling import Samplers


@dataclass(eq=False, slots=True)
class PrefixCacheManager:
    """Gives rows of requests to the prefix cache: the prompt while a request runs, the rest when it
    ends; and cached rows to requests."""

    table: RequestTable
    cache: PrefixCache
    drafter: Drafter
    layout: Layout
    _prompts: dict[int, Ints] = field(default_factory=dict)
    _counted: set[int] = field(default_factory=set)

    def select_(self, requests: Sequence[Request]) -> list[Request]:
        """Defer requests whose prefix another one computes; attach the others to cached rows."""
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
        """Cached rows that a waiting request would continue after and that others pin anyway."""
        ids = self._prompt(request)
        path, _ = self.cache.match(ids, request.cache_salt, drafts=_drafts(request))
        nodes = map(self.cache.nodes.__getitem__, path)
        pinned = max((node.end for node in nodes if node.pins), default=0)
        return min(pinned, self._reusable(request))

    def _gains_by_waiting(self, request: Request, others: Sequence[Request]) -> bool:
        ids = self._prompt(request)
        alike = [other for other in others if other.cache_salt == request.cache_salt]
        common = max((shared_length(self._prompt(other), ids) for other in alike), default=0)
        gained = min(common - self.cache.lookback, self._max_shared(request))
        return gained >= self._reusable(request) + self.cache.min_match

    def _reusable(self, request: Request) -> int:
        ids = self._prompt(request)
        limit = self._max_shared(request)
        return self.cache.reusable(ids, limit, request.cache_salt, drafts=_drafts(request))

    def _attach_(self, request: Request) -> None:
        ids = self._prompt(request)
        owner = request.prefix_owner
        if owner not in self._counted:
            self._counted.add(owner)
            self.cache.figures.asked += len(ids)
        self._publish_prefix_of_(ids, request.cache_salt)
        limit = self._max_shared(request)
        length = self.cache.attach_(owner, ids, limit, request.cache_salt, drafts=_drafts(request))
        self.cache.figures.reused += length
        if request.stage is Stage.WAITING:
            request.reused = length
        request.shared = length
        request.extend_prefix(ids[:length].tolist())
        request.borrow_tail(length)

    def make_room_(self, claimed: int, starting: Sequence[Request]) -> None:
        """Evict idle rows: those in the regions of the requests that start, and those in excess of
        the free slots, of which `claimed` of the target's pool are held or reserved."""
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
        """Most shared rows; a drafter may pair the last row with a token of the request's own."""
        if request.first_branch is not None:
            return request.body_size - 1
        return len(self._prompt(request)) - (not self._reads_whole_prompt(request))

    def _publish_prefix_of_(self, ids: Ints, salt: str) -> None:
        _, cached = self.cache.match(ids, salt)
        for request in self.table.open.values():
            if request.cache_salt != salt:
                continue
            first = self._prompt_branch(request)
            rows = request.prefix_length if first is None else first.length
            end = min(shared_length(self._prompt(request), ids), rows)
            enough = end >= cached + self.cache.min_match and end > request.shared
            if enough and self._drafter_has_read(request):
                self._publish_(request, end, [] if first is None else [first.owner])
                cached = end

    def _drafter_has_read(self, request: Request) -> bool:
        owners = {request.prefix_owner, *(b.owner for b in request.all_branches())}
        end = len(self._prompt(request))
        inbox = (rows for drafter in self.drafter.parts for rows in drafter.inbox)
        return all(rows.position >= end for rows in inbox if rows.owner in owners)

    def _publish_(self, request: Request, end: int, more: Sequence[int] = ()) -> None:
        start = request.shared
        tokens = np.array(self._row_ids(request)[start:end], np.int32)
        if len(tokens):
            self.cache.publish_(request.prefix_owner, more, tokens, start, salt=request.cache_salt)
            request.shared = end

    def _row_ids(self, request: Request) -> list[int]:
        first = self._prompt_branch(request)
        return request.context if first is None else [*request.context, *first.prompt]

    def _prompt_branch(self, request: Request) -> Branch | None:
        """The branch whose rows hold the end of the prompt, if the prefix does not."""
        first = request.root if request.stage is Stage.OUTLINE else None
        if request.branches and request.samples == 1 and not request.outline_budget:
            first = request.branches[0]
        return None if first is None or first.preempted else first

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
        ids = np.array([*request.body, *branch.rows], np.int32)
        place = ids, len(ids), request.cache_salt
        drafts = request.drafted
        rows = self.cache.reusable(*place, drafts=drafts)
        if not len(request.common_prompt) and rows > request.body_size:
            branch.first_own_row = self.cache.attach_(branch.owner, *place, drafts=drafts)
            self.cache.figures.reused += branch.first_own_row

    def detach_branch_(self, branch: Branch) -> None:
        if branch.first_own_row:
            self.cache.detach_(branch.owner)
            branch.first_own_row = 0

    def move_to_prefix_(self, root: Branch) -> None:
        """Let a prefix continue after the cached rows of its resumed outline, which joins it."""
        request = root.request
        owner = request.prefix_owner
        for drafter in self.drafter.parts:
            drafter.forget([owner])
        for pool in self.cache.pools:
            pool.truncate_(owner, 0)
        self.cache.detach_(owner)
        self.cache.segments.set_parent(owner, self.cache.segments.parent[root.owner])
        request.shared = root.first_own_row
        root.first_own_row = 0

    def return_borrowed_(self) -> bool:
        """Detach waiting requests from cached rows; returns whether there were any."""
        waiting = [request for request in self.table.waiting.values() if request.shared]
        for request in waiting:
            self._detach_(request)
            self._counted.discard(request.prefix_owner)
            request.prefix_length = 0
        return bool(waiting)

    def _detach_(self, request: Request) -> None:
        self.cache.detach_(request.prefix_owner)
        self.cache.segments.set_parent(request.prefix_owner, NO_SEGMENT)
        request.shared = 0

    def publish_prompt_(self, root: Branch) -> None:
        """Cache the prompt of an outline that ended, if other requests gain by it."""
        request = root.request
        ids = self._prompt(request)
        if root.preempted or root.length < len(ids):
            return  # the rows of a preempted outline are cached already
        if self._drafter_has_read(request) and len(ids) >= request.shared + self.cache.min_match:
            self._publish_(request, len(ids), [root.owner])

    def shorten_(self, request: Request, length: int) -> None:
        if request.shared > length:
            self.cache.shorten_(request.prefix_owner, length)
            request.shared = length
        self._prompts[request.prefix_owner] = self._prompt(request)[:length]

    def insert_(self, branch: Branch) -> bool:
        """Cache what a branch has decoded; False if nothing is cached."""
        if not branch.is_root:
            return self._insert_as_(branch, branch.owner)
        self.detach_branch_(branch)
        return False

    def _insert_as_(self, branch: Branch, segment: int) -> bool:
        """Cache a branch's rows as `segment`, unless they attend to several branches."""
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
        """Cache the prefix of an ended request; evict the idle rows of a failed one."""
        if request.prefix_length and not failed:
            self._publish_(request, request.prefix_length)
        self.cache.detach_(request.prefix_owner, drop=failed)
        self._prompts.pop(request.prefix_owner, None)
        self._counted.discard(request.prefix_owner)


def _drafts(request: Request) -> bool:
    """Whether a drafter will read the rows of a waiting request: not for an answer of one token."""
    return request.drafted and (bool(request.branches) or request.remaining_tokens > 1)


class CopyingPrefixCacheManager(PrefixCacheManager):
    """The prefix cache of the layout ``batching``, in pools of its own: rows are copied into the
    pool row of a request that starts, and out of it."""

    __slots__ = ()

    def make_room_(self, claimed: int, starting: Sequence[Request]) -> None:
        """Copy the cached rows of each request that starts into its pool row."""
        for request in starting:
            if not request.shared:
                continue
            owner = request.prefix_owner
            path = self.cache.segments.path(owner)[:0:-1]
            for cached, pool in zip(self.cache.pools, self.layout.pools, strict=True):
                slots = np.concatenate([cached.slots_of(segment) for segment in path])
                slots = slots[cached.position[slots] < request.shared]
                pool.copy_from_(cached, slots, owner, self.layout.rows_of(owner)[0])
                pool.ledger.add("prefix", slots.size * pool.slot_bytes)
            self._detach_(request)

    def _publish_(self, request: Request, end: int, more: Sequence[int] = ()) -> None:
        if request.shared:
            return  # its pool row is not allocated yet, and its rows are cached
        owners = (request.prefix_owner, *more)
        row = self.layout.rows_of(owners[-1])[0]
        self._copy_out_(self._row_ids(request)[:end], owners, row, request.cache_salt)

    def preempt_(self, branch: Branch) -> None:
        """Cache a copy of the rows of a preempted branch and free them."""
        self._insert_as_(branch, branch.owner)
        for pool in self.layout.pools:
            pool.retire_([branch.owner])

    def resume_(self, branch: Branch) -> None:
        """A resumed branch prefills its rows in its own pool row."""

    def _insert_as_(self, branch: Branch, segment: int) -> bool:
        """Cache a copy of the rows; they are freed by the caller."""
        request = branch.request
        if not branch.reads and branch.length > branch.start and not len(request.common_prompt):
            ids = [*request.context, *branch.prompt, *branch.tokens][: branch.length]
            owners = (request.prefix_owner, segment)
            self._copy_out_(ids, owners, self.layout.rows_of(branch.owner)[0], request.cache_salt)
        return False

    def _copy_out_(self, ids: Sequence[int], owners: Sequence[int], row: int, salt: str) -> None:
        ids_T: Ints = np.array(ids, np.int32)
        if self.cache.match(ids_T, salt)[1] == len(ids_T):
            return

        def copy_(segment: int, start: int) -> None:
            for cached, pool in zip(self.cache.pools, self.layout.pools, strict=True):
                slots = np.concatenate([pool.slots_of(owner, row) for owner in owners])
                positions = pool.position[slots]
                new = slots[(positions >= start) & (positions < len(ids_T))]
                cached.copy_from_(pool, new, segment)
                pool.ledger.add("keep", new.size * pool.slot_bytes)

        self.cache.store_(ids_T, salt, copy_)

    def close_(self, request: Request, *, failed: bool = False) -> None:
        """Evict the cached copies of a failed request that no other request pins."""
        if failed and request.prefix_length:
            segment = self.cache.segments.add()
            ids = self._prompt(request)
            self.cache.attach_(segment, ids, len(ids), request.cache_salt)
            self.cache.detach_(segment, drop=True)
            self.cache.segments.remove([segment])
        PrefixCacheManager.close_(self, request, failed=failed)


@dataclass(eq=False, slots=True, kw_only=True)
class KVCacheManager:
    """Frees, promotes and preempts the rows of branches and requests in all pools of a run, the
    target's first. prefixes: the prefix cache; None frees all rows of an ended branch."""

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
    def num_cached_rows(self) -> int:
        cache = None if self.prefixes is None else self.prefixes.cache
        return cache.idle + cache.pinned if cache and cache.pools[0] is self.pools[0] else 0

    def free_(self, owners: Sequence[int]) -> None:
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
        for drafter in self.drafter.parts:
            drafter.forget(owners)
        if self.blend is not None:
            self.blend.forget_(owners)

    def end_branches_(self, branches: Iterable[Branch]) -> None:
        freed = list[int]()
        for branch in branches:
            if branch.owner in self.table.segments and not branch.rows_released:
                branch.rows_released = self.prefixes is not None and self.prefixes.insert_(branch)
                if branch.rows_released:
                    self.forget_([branch.owner])
                else:
                    freed.append(branch.owner)
        self.free_(freed)

    def end_request_(self, request: Request, *, wipe: bool) -> None:
        """Cache or free all rows of a request; wipe: zero them, an error may have left NaN."""
        for drafter in self.drafter.parts:
            drafter.close(request)
        if self.fold is not None:
            self.fold.forget_(request)
        branches = list(request.all_branches())
        if wipe:
            if self.prefixes is not None:
                for branch in branches:
                    self.prefixes.detach_branch_(branch)
            unreleased = [branch.owner for branch in branches if not branch.rows_released]
            for pool in self.pools:
                pool.wipe_([request.prefix_owner, *unreleased])
            self.free_(unreleased)
        self.end_branches_(branches)
        if self.prefixes is not None:
            self.prefixes.close_(request, failed=wipe)
        self.free_([request.prefix_owner])

    def drop_root_(self, root: Branch) -> None:
        """Free an outline that the parts do not follow, and the rows of the prefix that only it has
        and one more, which a drafter pairs with the next token."""
        request = root.request
        end = len(request.prefix) - request.borrowed_rows
        if self.prefixes is not None:
            self.prefixes.publish_prompt_(root)
        if max(request.shared, request.prefix_length) > end:
            length = max(end - 1, 0)
            if self.prefixes is not None:
                self.prefixes.shorten_(request, length)
            for pool in self.pools:
                pool.truncate_(request.prefix_owner, length)
            for drafter in self.drafter.parts:
                drafter.truncate(request.prefix_owner, length)
            request.shrink_prefix(length)
        if self.prefixes is not None:
            self.prefixes.detach_branch_(root)
        self.free_([root.owner])

    def promote_root_(self, root: Branch) -> None:
        """Relabel the outline's rows as rows of the prefix (`share: outline`): 0 bytes moved."""
        request = root.request
        if root.first_own_row and self.prefixes is not None:
            self.prefixes.move_to_prefix_(root)
        home = self.table.segments.home[request.prefix_owner]
        for pool in self.pools:
            pool.relabel_(root.owner, request.prefix_owner, home)
        self.layout.leave_([root.owner])
        for drafter in self.drafter.parts:
            drafter.promote(root)
        self.table.segments.merge_into_parent(root.owner, request.prefix_owner)
        request.prefix_parts.append(root.rows)
        request.extend_prefix(root.rows.ids)

    def preempt_branch_(self, branch: Branch) -> None:
        if self.prefixes is not None:
            self.prefixes.preempt_(branch)
        else:
            for pool in self.pools:
                pool.retire_([branch.owner])
        self.table.segments.set_parent(branch.owner, branch.request.prefix_owner)
        self.forget_([branch.owner])
        if self.fold is not None:
            self.fold.features.pop(branch.owner, None)  # computed again with its rows

    def preempt_prefix_(self, request: Request) -> None:
        if self.prefixes is not None:
            self.prefixes.close_(request)
        owner = request.prefix_owner
        for pool in self.pools:
            pool.retire_([owner])
        self.table.segments.set_parent(owner, NO_SEGMENT)
        self.forget_([owner])
        request.shared = 0
        request.prefix_length = 0
