"""A KV pool without rows: whose each slot is, counted by owner, for simulations."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from ...ops.kv.pool import KVCache
from ...ops.kv.slots import CopyLedger, PoolFullError, Region


class CountedPool(KVCache):
    """What the scheduler, the radix tree and the request table ask of a pool, in constant time
    each: of every owner the positions that it holds. Slots have no numbers.

    Attributes:
        spans: by owner, the first position and one past the last.
    """

    def __init__(self, capacity: int) -> None:  # the tables of slots are not made
        self.capacity = capacity
        self.rows = 1
        self.slots = capacity
        self.data = torch.zeros(0)
        self.owner = np.zeros(0, np.int32)
        self.committed = np.zeros(0, np.bool_)
        self.regions: dict[int, Region] = {}
        self.ledger = CopyLedger()
        self.current_length = self.idle_length = self.peak_length = 0
        self._idle: set[int] = set()
        self.spans: dict[int, tuple[int, int]] = {}

    def grow_(self, owner: int, position: int, count: int) -> None:
        """An owner gets rows behind those that it has.

        Raises:
            PoolFullError: there are not so many slots.
        """
        first, last = self.spans.get(owner, (position, position))
        assert last == position, f"owner {owner} goes on at {last}, not at {position}"
        self.spans[owner] = first, last + count
        self.current_length += count
        if self.current_length > self.slots:
            raise PoolFullError(f"{self.current_length} slots of {self.slots}")
        self._note_peak()

    def open_(self, home: int, size: int, least: int | None = None) -> None:
        self.regions[home] = Region()

    def release_(self, slots: npt.ArrayLike) -> None:
        """Nothing: no slot has a number."""

    def retire_(self, owners: Iterable[int], row: int | None = None) -> None:
        for owner in owners:
            first, last = self.spans.pop(owner, (0, 0))
            self.current_length -= last - first
            self.regions.pop(owner, None)

    def wipe_(self, owners: Iterable[int]) -> None:
        """Nothing: there are no rows."""

    def relabel_(self, old: int, new: int, home: int) -> None:
        if old in self.spans:
            self._join_(new, self.spans.pop(old))

    def split_(self, owner: int, first: int, position: int) -> None:
        self.regions.setdefault(first, Region())
        if owner == first or owner not in self.spans:
            return
        start, last = self.spans.pop(owner)
        cut = min(max(position, start), last)
        if cut > start:
            self._join_(first, (start, cut))
        if last > cut:
            self.spans[owner] = cut, last

    def _join_(self, owner: int, span: tuple[int, int]) -> None:
        mine = self.spans.get(owner, span)
        assert mine == span or mine[1] == span[0] or span[1] == mine[0], "rows with a gap"
        self.spans[owner] = min(mine[0], span[0]), max(mine[1], span[1])

    def truncate_(self, owner: int, length: int) -> None:
        first, last = self.spans.get(owner, (0, 0))
        if last > length:
            self.current_length -= last - max(length, first)
            if length > first:
                self.spans[owner] = first, length
            else:
                self.spans.pop(owner)

    def rest_(self, owner: int, *, idle: bool) -> None:
        first, last = self.spans.get(owner, (0, 0))
        self.idle_length += (last - first) if idle else first - last
        (self._idle.add if idle else self._idle.discard)(owner)
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_length = max(self.peak_length, self.needed_length)

    def span_of(self, owner: int) -> tuple[int, int]:
        return self.spans.get(owner, (0, 0))

    def check_integrity(self) -> None:
        held = sum(last - first for first, last in self.spans.values())
        assert held == self.current_length <= self.slots, "slots in use are counted wrongly"
