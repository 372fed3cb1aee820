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
    """

    def __init__(self, device: torch.device, segments: SegmentTree, rows: int) -> None:
        super().__init__(device, segments)
        self.rows = rows
        self._copies: dict[int, list[int]] = {}  # owner of a prefix -> rows that hold it

    def rows_of(self, owner: int) -> Sequence[int]:
        return self._copies[owner] if owner in self._copies else (self._row[owner],)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        """A request's prefix gets its first row."""
        self._copies[prefix] = [self._vacate_(pools)]

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> None:
        """A branch gets a row: one that holds its prefix already, or a copy is made."""
        busy = set(self._row.values())
        ready = [row for row in self._copies[prefix] if row not in busy]
        if not ready:
            ready = [self._vacate_(pools)]
            for pool in pools:
                source = pool.slots_of(prefix, self._copies[prefix][0])
                if source.size:
                    pool.copy_(source, pool.lowest_free(source.size, ready[0]), "fork")
            self._copies[prefix].append(ready[0])
        self._row[owner] = ready[0]

    def _vacate_(self, pools: Sequence[KVCache]) -> int:
        """A row that nobody needs; if there is none, a spare copy of some prefix is dropped."""
        busy = set(self._row.values())
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

    def _drop_(self, prefix: int, row: int, pools: Sequence[KVCache]) -> None:
        self._copies[prefix].remove(row)
        for pool in pools:
            pool.retire_([prefix], row)

    def members(self, packed: PackedQueries, trees: int) -> tuple[Member, ...]:
        """Each row of the pool by itself, with all its padding."""
        count, size, first = packed.height, packed.queries, packed.first_row
        rows = np.arange(count * size).reshape(count, size)
        return tuple(Member(rows[b], first + b, ()) for b in range(count)) if size else ()

    def leave_(self, owners: Iterable[int]) -> None:
        """Branches and requests that ended have no rows any more."""
        for owner in owners:
            self._row.pop(owner, None)
            self._copies.pop(owner, None)

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """Give back copies that no running branch uses and no waiting one will."""
        busy = set(self._row.values())
        for row in [r for r in self._copies.get(prefix, ()) if r not in busy]:
            self._drop_(prefix, row, pools)
