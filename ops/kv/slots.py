"""Slots of a KV pool: labels, runs, and the regions from which homes take their slots."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
