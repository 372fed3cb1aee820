"""The keeper of the layout ``batching``: what stays lies in pools of its own, as copies.

A row of the pools belongs to one branch, which sees its own row only. So nobody can go on behind
rows that lie elsewhere: they are copied in front of it, and out of its row when others may want
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...ops.kv.pool import KVCache
from ...ops.kv.slots import NOBODY, Ints
from ..layout.batching import BatchingLayout
from ..requests.branch import Branch, Request
from .keeper import Keeper


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
