"""What of requests stays for others: prompts while they run, all that was decoded when they end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ops.kv.pool import KVCache
from ..ops.kv.slots import NOBODY, Ints
from .drafter import Drafter
from .layout import BatchingLayout
from .prefix_cache import PrefixCache, shared_length
from .request import Branch, Request, Stage
from .request_table import RequestTable


@dataclass(eq=False, slots=True)
class Keeper:
    """Hands rows of requests to the prefix cache, and kept rows to requests.

    Attributes:
        borrowers: requests that go on behind kept rows, by prefix owner.
    """

    table: RequestTable
    cache: PrefixCache
    drafter: Drafter
    borrowers: dict[int, Request] = field(default_factory=dict)
    _prompts: dict[int, Ints] = field(default_factory=dict)
    _asked: set[int] = field(default_factory=set)

    # -- who begins -------------------------------------------------------------------------------

    def meet_(self, opened: Sequence[Request]) -> list[Request]:
        """Of requests that could begin together those that should: who would compute what another
        one does in the same step, or what a drafter reads in the next one, begins right after it,
        and finds it there. Each of them goes on behind what is kept of its prompt, if that is
        enough."""
        chosen: list[Request] = []
        unread = []
        if self.table.active:  # so there will be a forward of the drafter
            unread = [one for one in self.table.open.values() if not self._read(one)]
        for request in opened:
            if request.waits and not request.shared:
                if self._follows(request, [*chosen, *unread]):
                    continue
                self._share_(request)
            chosen.append(request)
        return chosen

    def held_for(self, request: Request) -> int:
        """Rows that a request which has not begun would go on behind, and that others hold anyway:
        it takes no room for them."""
        ids = self._prompt(request)
        limit = self._limit(request)
        salt = request.cache_salt
        length = self.cache.reusable(ids, limit, salt)
        held = 0
        for segment in self.cache.match(ids, salt)[0] if length else ():
            kept = self.cache.kept[segment]
            held = kept.end if kept.pins else held
        return min(held, length)

    def _follows(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether it finds more once these have begun."""
        ids = self._prompt(request)
        limit = self._limit(request)
        salt = request.cache_salt
        same = (self._prompt(one) for one in others if one.cache_salt == salt)
        both = max((shared_length(one, ids) for one in same), default=0)
        return (
            min(both - self.cache.back, limit)
            >= self.cache.reusable(ids, limit, salt) + self.cache.shortest
        )

    def _share_(self, request: Request) -> None:
        ids = self._prompt(request)
        salt = request.cache_salt
        if request.prefix_owner not in self._asked:
            self._asked.add(request.prefix_owner)
            self.cache.figures.asked += len(ids)
        self._publish_for_(ids, salt)
        length = self.cache.lend_(request.prefix_owner, ids, self._limit(request), salt)
        if request.stage is Stage.WAITING:
            request.reused = length
        if length:
            self.borrowers[request.prefix_owner] = request
            request.shared = length
            request.read(ids[:length].tolist())
        if (more := length - request.body_size) > 0:
            request.widen(more)

    def make_room_(self, claimed: int, opened: Sequence[Request]) -> None:
        """Evict idle rows: those where requests shall lie that start, and those in excess of what
        the others leave.

        Args:
            claimed: slots of the target's pool that are held or reserved.
        """
        target = self.cache.pools[0]
        for request in opened:
            region = target.regions[request.prefix_owner]
            self.cache.clear_(region.first, region.first + region.size)
        self.cache.make_room_(target.slots - claimed)

    def _prompt(self, request: Request) -> Ints:
        """The ids that a request's first branch begins with, as far as others may share them."""
        owner = request.prefix_owner
        if owner not in self._prompts:
            ids = [*request.body]
            if request.first is not None:
                ids += [*request.hoist, *request.first.rows]
            elif self._goes_on(request):
                ids += request.tail
            self._prompts[owner] = np.array(ids, np.int32)
        return self._prompts[owner]

    def _goes_on(self, request: Request) -> bool:
        """Whether what begins first reads the whole prompt: parts of a given outline need not."""
        return request.given is None or self.table.limits.share_outline

    def _limit(self, request: Request) -> int:
        """Most rows that can be shared: where something else than the prompt's second half follows
        on the first, a row of that is the request's own, for drafters that pair it; and so one of a
        request that begins again."""
        if request.first is not None:
            return request.body_size - 1
        return len(self._prompt(request)) - (not self._goes_on(request))

    def _publish_for_(self, ids: Ints, salt: str) -> None:
        """What a running request has of this prompt can be shared from now on."""
        _, kept = self.cache.match(ids, salt)
        for request in self.table.open.values():
            most = shared_length(self._prompt(request), ids) if request.cache_salt == salt else 0
            if most < kept + self.cache.shortest or most <= request.shared:
                continue
            first = self._first(request)
            rows = request.prefix_length if first is None else first.length
            both = min(most, rows)
            enough = both >= kept + self.cache.shortest and both > request.shared
            if enough and self._read(request):
                self._publish_(request, both, [] if first is None else [first.owner])
                kept = both

    def _read(self, request: Request) -> bool:
        """Whether the drafters have read its prompt, as far as the target has."""
        owners = {request.prefix_owner, *(b.owner for b in request.all_branches())}
        end = len(self._prompt(request))
        return all(position >= end for position in self.drafter.unread(owners))

    def _publish_(self, request: Request, end: int, more: Sequence[int] = ()) -> None:
        """The rows of a request before position `end` become kept ones."""
        tokens = np.array(self._ids(request)[request.shared : end], np.int32)
        if len(tokens):
            salt = request.cache_salt
            self.cache.publish_(request.prefix_owner, more, tokens, request.shared, salt)
            request.shared = end

    def _ids(self, request: Request) -> list[int]:
        """The ids of its first rows: of the prefix, and of the prompt behind it."""
        first = self._first(request)
        return [*request.context, *(first.prompt if first is not None else ())]

    def _first(self, request: Request) -> Branch | None:
        """The branch that reads the end of its prompt, where that is no part of the prefix."""
        first = request.root if request.stage is Stage.OUTLINE else None
        if request.branches and request.samples == 1 and not request.outline_budget:
            first = request.branches[0]
        runs = first is not None and first.stage is not Stage.PREEMPTED and not first.preempted
        return first if runs else None

    # -- who makes way, and goes on ---------------------------------------------------------------

    def set_aside_(self, branch: Branch) -> None:
        """The rows of a branch that makes way are kept ones from now on, or given back."""
        segments = self.cache.segments
        owner = branch.owner
        aside = segments.add(branch.request.prefix_owner)
        for pool in self.cache.pools:
            pool.relabel_(owner, aside, segments.home(aside))
        if not self._keep_as_(branch, aside):
            for pool in self.cache.pools:
                pool.retire_([aside])
            segments.remove([aside])

    def go_on_behind_(self, branch: Branch) -> None:
        """A branch that was preempted goes on behind what is kept of all that it had read and
        written, if that is more than its prefix."""
        request = branch.request
        salt = branch.request.cache_salt
        if len(request.hoist):
            return
        ids = np.array([*request.body, *branch.rows], np.int32)
        if self.cache.reusable(ids, len(ids), salt) > request.body_size:
            branch.shared = self.cache.lend_(branch.owner, ids, len(ids), salt)

    def return_(self, branch: Branch) -> None:
        """A branch does not go on any more behind kept rows of its own."""
        if branch.shared:
            self.cache.release_(branch.owner)
            branch.shared = 0

    def take_over_(self, root: Branch) -> None:
        """An outline becomes a part of its request's prefix, which goes on behind the kept rows
        that the outline went on behind, and has no others."""
        request = root.request
        segments = self.cache.segments
        owner = request.prefix_owner
        self.drafter.forget([owner])
        for pool in self.cache.pools:
            pool.truncate_(owner, 0)
        self.cache.release_(owner)
        segments.hang(owner, segments.parent(root.owner))
        self.borrowers[owner] = request
        request.shared = root.shared
        root.shared = 0

    def recall_(self) -> bool:
        """Requests that wait give back what they were to go on behind; whether there were any."""
        waiting = [one for one in self.borrowers.values() if one.waits]
        for request in waiting:
            self.close_(request)
            request.shared = request.prefix_length = 0
            self.cache.segments.hang(request.prefix_owner, NOBODY)
        return bool(waiting)

    # -- who ends ---------------------------------------------------------------------------------

    def keep_prompt_(self, request: Request) -> None:
        """A prompt that an outline stood behind stays for others, if they gain by it; that of an
        outline which had to make way stays since then."""
        root = request.root
        ids = self._prompt(request)
        if root is None or root.preempted or root.length < len(ids) or not self._read(request):
            return
        if len(ids) >= request.shared + self.cache.shortest:
            self._publish_(request, len(ids), [root.owner])

    def shorten_(self, request: Request, length: int) -> None:
        """A prefix ends at position `length` from now on."""
        if request.shared > length:
            self.cache.shorten_(request.prefix_owner, length)
            request.shared = length
        self._prompts[request.prefix_owner] = self._prompt(request)[:length]

    def keep_(self, branch: Branch) -> bool:
        """Keep what a branch has decoded; False if there is nothing to keep."""
        if branch.is_root:
            self.return_(branch)
            return False
        return self._keep_as_(branch, branch.owner)

    def _keep_as_(self, branch: Branch, segment: int) -> bool:
        """The same of its rows as those of `segment`, which they are labelled with. Rows that have
        seen several branches are no prompt's own."""
        request = branch.request
        rows = branch.length - branch.start
        if branch.reads or rows <= 0 or len(request.hoist):
            self.return_(branch)
            return False
        segments = self.cache.segments
        start = branch.shared
        if not start:
            self._publish_(request, request.prefix_length)
            start = max(branch.start, request.shared)
        above = branch.owner if branch.shared else request.prefix_owner
        segments.hang(segment, segments.parent(above))
        ids = [*branch.prompt, *branch.tokens][start - branch.start : rows]
        kept = self.cache.keep_(segment, np.array(ids, np.int32), start, request.cache_salt)
        self.return_(branch)
        return kept

    def close_(self, request: Request, *, failed: bool = False) -> None:
        """A request has ended: its prefix stays, and it needs nothing any more. Nothing of one that
        failed stays that nobody else goes on from: its rows may be why."""
        if request.prefix_length and not failed:
            self._publish_(request, request.prefix_length)
        self.cache.release_(request.prefix_owner, drop=failed)
        self.borrowers.pop(request.prefix_owner, None)
        self._prompts.pop(request.prefix_owner, None)
        self._asked.discard(request.prefix_owner)


@dataclass(eq=False, slots=True, kw_only=True)
class CopyingKeeper(Keeper):
    """Keeps copies of rows. layout: in which row of the pools who lies; rows: these pools."""

    layout: BatchingLayout
    rows: Sequence[KVCache]

    def make_room_(self, claimed: int, opened: Sequence[Request]) -> None:
        """Whoever begins gets copies of what is kept of its prompt, its own from then on."""
        for request in opened:
            if not request.shared:
                continue
            owner = request.prefix_owner
            path = self.cache.segments.path(owner)[:0:-1]
            for kept, pool in zip(self.kept, self.rows, strict=True):
                slots = np.concatenate([kept.slots_of(segment) for segment in path])
                slots = slots[kept.position[slots] < request.shared]
                pool.copy_from_(kept, slots, owner, self.layout.rows_of(owner)[0])
                pool.ledger.add("prefix", slots.size * pool.slot_bytes)
            self._let_go_(request)

    def _let_go_(self, request: Request) -> None:
        self.cache.release_(request.prefix_owner)
        self.cache.segments.hang(request.prefix_owner, NOBODY)
        self.borrowers.pop(request.prefix_owner, None)
        request.shared = 0

    @property
    def kept(self) -> Sequence[KVCache]:
        """The pools of what stays, in the order of `rows`."""
        return [pool for pool in self.cache.pools if isinstance(pool, KVCache)]

    def _publish_(self, request: Request, end: int, more: Sequence[int] = ()) -> None:
        owners = (request.prefix_owner, *more)
        row = self.layout.rows_of(owners[-1])[0]
        self._copy_out_(self._ids(request)[:end], owners, row, request.cache_salt)

    def set_aside_(self, branch: Branch) -> None:
        """A copy of the rows of a branch that makes way stays; they are given back."""
        self._keep_as_(branch, branch.owner)
        for pool in self.rows:
            pool.retire_([branch.owner])

    def go_on_behind_(self, branch: Branch) -> None:
        """What a branch has written elsewhere, or before it made way, is read in its own row."""

    def recall_(self) -> bool:
        """Requests that wait give back what they were to begin with copies of; whether there were
        any."""
        waiting = [one for one in self.borrowers.values() if one.waits]
        for request in waiting:
            self._let_go_(request)
            request.prefix_length = 0
        return bool(waiting)

    def _keep_as_(self, branch: Branch, segment: int) -> bool:
        """A copy stays; its rows are given back."""
        request = branch.request
        if not branch.reads and branch.length > branch.start and not len(request.hoist):
            ids = [*request.context, *branch.prompt, *branch.tokens][: branch.length]
            owners = (request.prefix_owner, segment)
            row = self.layout.rows_of(branch.owner)[0]
            self._copy_out_(ids, owners, row, request.cache_salt)
        return False

    def _copy_out_(self, ids: Sequence[int], owners: Sequence[int], row: int, salt: str) -> None:
        """What is not kept yet of these ids, whose rows these owners have in a row of the pools."""
        ids_T: Ints = np.array(ids, np.int32)
        if self.cache.match(ids_T, salt)[1] == len(ids_T):
            return
        segment = self.cache.segments.add()
        start = self.cache.hang_(segment, ids_T, len(ids_T), salt)
        left = self.cache.pools[0].slots - self.cache.pinned - len(ids_T) + start
        if left < 0:
            self.cache.release_(segment)
            self.cache.segments.remove([segment])
            return
        self.cache.make_room_(left)
        for kept, pool in zip(self.kept, self.rows, strict=True):
            slots = np.concatenate([pool.slots_of(owner, row) for owner in owners])
            at = pool.position[slots]
            own = slots[(at >= start) & (at < len(ids_T))]
            kept.copy_from_(pool, own, segment)
            pool.ledger.add("keep", own.size * pool.slot_bytes)
        self.cache.release_(segment)
        self.cache.keep_(segment, ids_T[start:], start, salt)

    def close_(self, request: Request, *, failed: bool = False) -> None:
        """Nothing stays of one that failed, but what others begin with right now."""
        if failed and request.prefix_length:
            segment = self.cache.segments.add()
            ids = self._prompt(request)
            self.cache.hang_(segment, ids, len(ids), request.cache_salt)
            self.cache.release_(segment, drop=True)
            self.cache.segments.remove([segment])
        Keeper.close_(self, request, failed=failed)
