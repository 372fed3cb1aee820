"""Layouts with a tensor row per branch: ``batching`` and ``paged``.

Under ``batching`` a branch has a row of the pools with its own copy of the prefix. Under ``paged``
the pools have one row, and all branches attend to the same rows of the prefix: a fork copies 0
bytes.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..ops.attention.metadata import QuerySequence
from ..ops.kv.pool import KVCache
from ..ops.row_layout import AlignmentManager, AlignmentState, ContinuousDecodingState
from .layout import Layout, PackedQueries
from .round import Span, Trees
from .segments import SegmentTree


class RowPerBranch(Layout):
    """A tensor row per branch: queries [B, Q], shorter rows padded on the left."""

    packed = False

    def __init__(self, device: torch.device, segments: SegmentTree) -> None:
        super().__init__(device, segments)
        self._row: dict[int, int] = {}  # owner of a branch -> its tensor row

    def alignment(
        self, packed: PackedQueries, trees: Trees, spans: Sequence[Span], positions_BQ: Tensor
    ) -> AlignmentState | ContinuousDecodingState | None:
        """The padding of running branches, with or without rows of prompts."""
        if not spans:
            return packed.aligned
        length = [0] * packed.height
        prefill = [False] * packed.height
        for owner, position in zip(trees.owners, trees.positions, strict=True):
            length[self._row[owner] - packed.first_row] = position
        for span in reversed(spans):  # the first span of a row has its first position
            for row in self.tensor_rows_of(span.owner):
                length[row - packed.first_row] = span.position
                prefill[row - packed.first_row] = True
        return AlignmentManager.align_continuous_decode(
            packed.aligned, length, prefill, positions_BQ
        )


class BatchingLayout(RowPerBranch):
    """A pool row per branch, with its own copy of the prefix.

    The row of an ended branch is free, but its copy of the prefix stays while the request has
    waiting branches, which start there without a copy. Retained parts are moved into one row of
    their request, that of the first part that ended.
    """

    def __init__(self, device: torch.device, segments: SegmentTree, rows: int) -> None:
        super().__init__(device, segments)
        self.rows = rows
        self._copies: dict[int, list[int]] = {}  # owner of a prefix -> rows that hold it
        self._retained: dict[int, tuple[int, int]] = {}  # owner of a part -> its prefix, its row

    def rows_of(self, owner: int) -> Sequence[int]:
        if owner in self._copies:
            return self._copies[owner]
        return (self._retained[owner][1] if owner in self._retained else self._row[owner],)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        """Allocate the first row of a request's prefix."""
        self._copies[prefix] = [self._vacate_(pools)]

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """Allocate the row of retained parts, a row with the prefix, or a new copy of it."""
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
        """Retain a part: the first one stays in its row, the others are copied there."""
        row = self._row.pop(owner)
        target = self._row_of_parts(prefix, row)
        self._retained[owner] = prefix, target
        if target == row:
            return
        for pool in pools:
            source = pool.slots_of(owner, row)
            if source.size:
                pool.copy_(source, pool.lowest_free(source.size, target), "attend")
            pool.retire_([owner], row)

    def _vacate_(self, pools: Sequence[KVCache]) -> int:
        """A free row; if there is none, a spare copy of a prefix is freed."""
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
        raise AssertionError("admission admits at most as many branches as rows")

    @property
    def _busy(self) -> set[int]:
        """Rows with running branches or retained parts."""
        return {*self._row.values(), *(row for _, row in self._retained.values())}

    def _row_of_parts(self, prefix: int, new: int = -1) -> int:
        """The row of a request's retained parts, or `new`."""
        return next(
            (row for parts_prefix, row in self._retained.values() if parts_prefix == prefix), new
        )

    def _drop_(self, prefix: int, row: int, pools: Sequence[KVCache]) -> None:
        self._copies[prefix].remove(row)
        for pool in pools:
            pool.retire_([prefix], row)

    def sequences(self, packed: PackedQueries, num_trees: int) -> tuple[QuerySequence, ...]:
        """A sequence per pool row, its padding included."""
        count = packed.height
        size = packed.queries
        first = packed.first_row
        rows = np.arange(count * size).reshape(count, size)
        return tuple(QuerySequence(rows[b], first + b, ()) for b in range(count)) if size else ()

    def leave_(self, owners: Iterable[int]) -> None:
        """Forget the rows of ended branches and requests."""
        for owner in owners:
            self._row.pop(owner, None)
            self._copies.pop(owner, None)
            self._retained.pop(owner, None)

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """Free the copies of a prefix that no branch uses or will use."""
        busy = self._busy
        for row in [r for r in self._copies.get(prefix, ()) if r not in busy]:
            self._drop_(prefix, row, pools)


class PagedLayout(RowPerBranch):
    """A tensor row per branch over pools with one row, whose slots all branches share.

    A prefix is prefilled in the row of a branch that starts after it. While its prompt is read in
    chunks and no branch has started, it has a row of its own.
    """

    def tensor_rows_of(self, owner: int) -> Sequence[int]:
        return (self._row[owner],)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        super().open_(prefix, size, pools, least)
        self._row[prefix] = self._free_row()

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """Allocate a tensor row, and slots near those of the prefix."""
        shared = self._row[prefix] in (self._row[other] for other in self._row if other != prefix)
        self._row[owner] = self._free_row() if shared else self._row[prefix]
        self._row[prefix] = self._row[owner]
        for pool in pools:
            pool.near_(owner, prefix)
        return False

    def _free_row(self) -> int:
        used = {*self._row.values()}
        return next(row for row in range(len(used) + 1) if row not in used)

    def leave_(self, owners: Iterable[int]) -> None:
        """Forget the rows of ended branches and requests."""
        for owner in owners:
            self._row.pop(owner, None)
