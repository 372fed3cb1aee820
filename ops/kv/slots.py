"""Slots of a KV pool: labels, runs, regions, and the block tables of segments.

A pool is cut into blocks of equally many slots. A segment has a table of the blocks in which it has
slots; a block is free if no table names it. A writer takes free slots of its blocks before it takes
another block, so that a segment is a few runs. Shared rows are never written: a block whose rows
became another segment's is sealed, and its writer takes a new one.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

FREE = -1  # owner of a free slot
NOBODY = -2  # no segment
UNKNOWN = -4  # owner of a fresh slot whose segment only the device knows


class PoolFullError(RuntimeError):
    """A forward needs more slots than are free: admission failed, never the input."""


@dataclass(slots=True)
class CopyLedger:
    """Every KV byte moved inside the pool, by cause."""

    bytes: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)

    def add(self, cause: str, count: int) -> None:
        self.bytes[cause] += count
        self.moves[cause] += 1


@dataclass(frozen=True, slots=True)
class SlotRun:
    """`runs` runs of `length` adjacent slots each; run g begins at slot `first + g * stride`."""

    first: int
    length: int
    stride: int = 0
    runs: int = 1

    @property
    def slots_GK(self) -> Ints:
        """int32 [runs, length]."""
        starts_G: Ints = self.first + self.stride * np.arange(self.runs, dtype=np.int32)
        steps_K: Ints = np.arange(self.length, dtype=np.int32)
        return starts_G[:, None] + steps_K


@dataclass(slots=True)
class Region:
    """The slots of a home: `size` slots from `first` on are reserved for it; the slots that it
    uses are from `low` to before `high`."""

    first: int = 0
    size: int = 0
    low: int = 1 << 31
    high: int = 0

    @classmethod
    def between(cls, others: Iterable["Region"], size: int, limit: int) -> "Region":
        """The first gap of `size` slots between other regions and below `limit`; without one, a
        region that reserves nothing."""
        first = 0
        for other in sorted(others, key=lambda region: region.first):
            if other.size and other.first - first >= size:
                break
            first = max(first, other.first + other.size)
        return cls(first, size) if first + size <= limit else cls()

    def include_(self, first: int, last: int) -> None:
        """Extend it to the slots from `first` to `last`."""
        self.low = min(self.low, first)
        self.high = max(self.high, last + 1)


def each(value: npt.ArrayLike, count: int) -> Ints:
    """int32 [count]: a value for each, or one value for all."""
    value_Q = np.asarray(value, np.int32)
    return value_Q if value_Q.ndim else np.full(count, value_Q)


def check_regions(regions: Mapping[int, Region], home: Ints, used: npt.NDArray[np.bool_]) -> None:
    """Raise AssertionError unless every home's slots are inside its region."""
    slots = np.flatnonzero(used)
    by_home = slots[np.argsort(home[slots], kind="stable")]
    homes, first, count = np.unique(home[by_home], return_index=True, return_counts=True)
    lowest = by_home[first]
    highest = by_home[first + count - 1]
    for number, low, high in zip(homes.tolist(), lowest.tolist(), highest.tolist(), strict=True):
        region = regions[number]
        assert region.low <= low and high < region.high, f"slots outside region {number}"


def check_positions(row_K: Ints, owner_K: Ints, position_K: Ints) -> None:
    """Raise AssertionError unless every owner's committed positions in a row are consecutive and
    unique."""
    order = np.lexsort((position_K, owner_K, row_K))
    row = row_K[order]
    owner = owner_K[order]
    position = position_K[order]
    same = (row[1:] == row[:-1]) & (owner[1:] == owner[:-1])
    steps = np.diff(position)[same]
    assert (steps != 0).all(), "a position is held twice"
    gaps = owner[1:][same][steps != 1]
    assert not gaps.size, f"owner {gaps[0]} has a gap in its positions"


Bools = npt.NDArray[np.bool_]
LABEL_OFFSET = 16  # labels that are not segments are above its negative


class BlockManager:
    """Tables of blocks, counted by slots.

    Attributes:
        size: slots of a block (the last one of a pool may have fewer).
        tables: for each segment its blocks, and the number of its slots in each.
        references: int32 [blocks], how many tables name a block. writer: int32 [blocks], the
            segment that may take its free slots, NOBODY for none.
        in_use: blocks that are named; high_water: the maximum of that; most_wasted: the maximum
            of `wasted`.
    """

    def __init__(self, slots: int, size: int) -> None:
        self.slots = slots
        self.size = size
        self.tables: dict[int, dict[int, int]] = {}
        self.references: Ints = np.zeros(-(-slots // size), np.int32)
        self.writer: Ints = np.full(len(self.references), NOBODY, np.int32)
        self.in_use = self.high_water = self.most_wasted = 0

    def __len__(self) -> int:
        return len(self.references)

    def table(self, segment: int) -> list[int]:
        """The blocks of a segment, in the order of the pool."""
        return sorted(self.tables.get(segment, ()))

    def slots_in(self, blocks: list[int]) -> npt.NDArray[np.int64]:
        """All slots of some blocks, in their order."""
        first_b1 = np.array(blocks, np.int64)[:, None] * self.size
        slots = (first_b1 + np.arange(self.size)).reshape(-1)
        return slots[slots < self.slots]

    def whole(self, slots: int, *, up: bool = False) -> int:
        """A number of slots rounded down to whole blocks, at least one; up with `up`. 0 stays 0."""
        return max((slots + up * (self.size - 1)) // self.size, 1) * self.size if slots else 0

    def is_open(self, segment: int, first: int, last: int) -> Bools:
        """bool [last - first]: whether a segment may take these slots, where they are free."""
        blocks = slice(first // self.size, -(-last // self.size))
        writer_b = self.writer[blocks]
        is_free_b: Bools = (writer_b == NOBODY) & (self.references[blocks] == 0)
        open_b: Bools = is_free_b | (writer_b == segment)
        start = blocks.start * self.size
        return np.repeat(open_b, self.size)[first - start : last - start]

    def begin_(self, segment: int, slots_Q: Ints) -> None:
        """A segment is about to own these slots: it becomes the writer of their free blocks."""
        blocks = slots_Q // self.size
        self.writer[blocks[self.references[blocks] == 0]] = segment

    def enter_(self, owner_Q: Ints, slots_Q: npt.NDArray[np.integer[Any]]) -> None:
        """Free slots become these segments'.

        A segment whose slots are the first ones of a block becomes its writer, if it has none.
        """
        references = self.references
        for segment, block, count in self._pairs(owner_Q, slots_Q):
            table = self.tables.setdefault(segment, {})
            if block not in table:
                table[block] = 0
                if not references[block]:
                    self.in_use += 1
                    if self.writer[block] == NOBODY:
                        self.writer[block] = segment
                references[block] += 1
            table[block] += count
        self.high_water = max(self.high_water, self.in_use)

    def leave_(self, owner_Q: Ints, slots_Q: npt.NDArray[np.int64]) -> None:
        """These slots no longer belong to these segments."""
        for segment, block, count in self._pairs(owner_Q, slots_Q):
            table = self.tables[segment]
            table[block] -= count
            if not table[block]:
                del table[block]
                self.references[block] -= 1
                if not self.references[block]:
                    self.writer[block] = NOBODY
                    self.in_use -= 1
            if not table:
                del self.tables[segment]

    def seal_(self, segment: int) -> None:
        """Blocks in which a segment has slots get no writer any more."""
        self.writer[self.table(segment)] = NOBODY

    def hand_over_(self, old: int, new: int) -> None:
        """Another segment becomes the writer of a segment's blocks."""
        self.writer[self.writer == old] = new

    def wasted(self, used: int) -> int:
        """Slots of the blocks in use that no segment owns; `used` slots are owned."""
        missing = len(self) * self.size - self.slots
        is_short = bool(missing) and self.references[-1] > 0
        return self.in_use * self.size - is_short * missing - used

    def _pairs(
        self, owner_Q: Ints, slots_Q: npt.NDArray[np.integer[Any]]
    ) -> Iterator[tuple[int, int, int]]:
        """(segment, block, number of its slots there)."""
        if self.size == 1:  # every slot is a block by itself
            ones = repeat(1, owner_Q.size)
            return zip(owner_Q.tolist(), slots_Q.tolist(), ones, strict=True)
        keys_Q = (owner_Q.astype(np.int64) + LABEL_OFFSET) * len(self) + slots_Q // self.size
        keys, counts = np.unique(keys_Q, return_counts=True)
        segments, blocks = np.divmod(keys, len(self))
        segments -= LABEL_OFFSET
        return zip(segments.tolist(), blocks.tolist(), counts.tolist(), strict=True)

    def check_integrity(self, owner: Ints) -> None:
        """Raise AssertionError unless tables agree with `owner` [slots], and every block is free or
        referenced as often as tables name it."""
        used = np.flatnonzero(owner != FREE)
        tables: dict[int, dict[int, int]] = {}
        for segment, block, count in self._pairs(owner[used], used):
            tables.setdefault(segment, {})[block] = count
        assert tables == self.tables, "block tables disagree with the owners of slots"
        named = np.zeros_like(self.references)
        for table in self.tables.values():
            named[list(table)] += 1
        assert np.array_equal(named, self.references), "block references are counted wrongly"
        assert self.in_use == np.count_nonzero(named), "blocks in use are counted wrongly"
        assert (self.writer[named == 0] == NOBODY).all(), "a free block has a writer"
