"""The layout ``batching``: one row of the pools per branch, its own copy of the prefix in front."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ...ops.attention.stacks import Member
from ...ops.kv.pool import KVCache
from ..cache.segments import SegmentTree
from .queries import PackedQueries
from .row_per_branch import RowPerBranch


class BatchingLayout(RowPerBranch):
    """Which branch has which row, and which rows hold a copy of which prefix.

    A row is given back when its branch ends, but its copy of the prefix stays as long as the
    request has branches that wait: they start there without copying anything.

    Parts that are to be combined where they lie are held in one row of their request, that of the
    first one to end; the others are copied into it.
    """

    def __init__(self, device: torch.device, segments: SegmentTree, rows: int) -> None:
        super().__init__(device, segments)
        self.rows = rows
        self._copies: dict[int, list[int]] = {}  # owner of a prefix -> rows that hold it
        self._held: dict[int, tuple[int, int]] = {}  # owner of a held part -> its prefix, its row

    def rows_of(self, owner: int) -> Sequence[int]:
        if owner in self._copies:
            return self._copies[owner]
        return (self._held[owner][1] if owner in self._held else self._row[owner],)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        """A request's prefix gets its first row."""
        self._copies[prefix] = [self._vacate_(pools)]

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """A branch gets a row: that of held parts, one that holds its prefix, or a copy is made."""
        busy = set(self._row.values())
        parts = self._row_of_parts(prefix)
        ready = [row for row in self._copies[prefix] if row not in busy]
        ready.sort(key=lambda row: row != parts)
        if not ready:
            ready = [self._vacate_(pools)]
            for pool in pools:
                source = pool.slots_of(prefix, self._copies[prefix][0])
                if source.size:
                    pool.copy_(source, pool.lowest_free(source.size, ready[0]), "fork")
            self._copies[prefix].append(ready[0])
        self._row[owner] = ready[0]
        return ready[0] == parts

    def hold_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> None:
        """The first part stays in its row, others are copied there; their rows become free."""
        row = self._row.pop(owner)
        target = self._row_of_parts(prefix, row)
        self._held[owner] = prefix, target
        if target == row:
            return
        for pool in pools:
            source = pool.slots_of(owner, row)
            if source.size:
                pool.copy_(source, pool.lowest_free(source.size, target), "attend")
            pool.retire_([owner], row)

    def _vacate_(self, pools: Sequence[KVCache]) -> int:
        """A row that nobody needs; if there is none, a spare copy of some prefix is dropped."""
        busy = self._busy
        used = busy.union(*self._copies.values())
        for row in range(self.rows):
            if row not in used:
                return row
        for prefix, rows in self._copies.items():
            spare = [row for row in rows if row not in busy]
            if spare and len(rows) > 1:
                self._drop_(prefix, spare[0], pools)
                return spare[0]
        raise AssertionError("admission let in more branches than there are rows")

    @property
    def _busy(self) -> set[int]:
        """Rows where branches run or parts are held."""
        return {*self._row.values(), *(row for _, row in self._held.values())}

    def _row_of_parts(self, prefix: int, new: int = -1) -> int:
        """The row where parts of a request are held, or `new`."""
        return next((row for one, row in self._held.values() if one == prefix), new)

    def _drop_(self, prefix: int, row: int, pools: Sequence[KVCache]) -> None:
        self._copies[prefix].remove(row)
        for pool in pools:
            pool.retire_([prefix], row)

    def members(self, packed: PackedQueries, trees: int) -> tuple[Member, ...]:
        """Each row of the pool by itself, with all its padding."""
        count = packed.height
        size = packed.queries
        first = packed.first_row
        rows = np.arange(count * size).reshape(count, size)
        return tuple(Member(rows[b], first + b, ()) for b in range(count)) if size else ()

    def leave_(self, owners: Iterable[int]) -> None:
        """Branches and requests that ended have no rows any more."""
        for owner in owners:
            self._row.pop(owner, None)
            self._copies.pop(owner, None)
            self._held.pop(owner, None)

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """Give back copies that no running branch uses and no waiting one will."""
        busy = self._busy
        for row in [r for r in self._copies.get(prefix, ()) if r not in busy]:
            self._drop_(prefix, row, pools)
