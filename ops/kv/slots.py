"""Slots of a KV pool: who owns one, runs of them, the regions that homes take them from."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

FREE = -1  # owner of a slot that nobody uses
NOBODY = -2  # no segment
UNKNOWN = -4  # owner of a fresh slot of which the device alone knows whose it is


class PoolFullError(RuntimeError):
    """Admission let in more rows than the pool holds: a fault of ours, never of the input."""


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
        starts_G1: Ints = np.array(
            [[self.first + g * self.stride] for g in range(self.runs)], np.int32
        )
        steps_K: Ints = np.arange(self.length, dtype=np.int32)
        return starts_G1 + steps_K


@dataclass(slots=True)
class Region:
    """Where a home's slots lie: `size` slots from `first` on are kept free for it, and those that
    it uses are among `low` to before `high`."""

    first: int = 0
    size: int = 0
    low: int = 1 << 31
    high: int = 0

    @classmethod
    def between(cls, others: Iterable["Region"], size: int, limit: int) -> "Region":
        """The first gap of `size` slots between other regions and below `limit`; if there is none,
        a region that keeps nothing free."""
        first = 0
        for other in sorted(others, key=lambda region: region.first):
            if other.size and other.first - first >= size:
                break
            first = max(first, other.first + other.size)
        return cls(first, size) if first + size <= limit else cls()

    def include_(self, first: int, last: int) -> None:
        """It uses these slots, and some between them, from now on."""
        self.low, self.high = min(self.low, first), max(self.high, last + 1)


def each(value: npt.ArrayLike, count: int) -> Ints:
    """int32 [count]: a value for each, or one for all."""
    value_Q = np.asarray(value, np.int32)
    return value_Q if value_Q.ndim else np.full(count, value_Q)


def check_regions(regions: Mapping[int, Region], home: Ints, used: npt.NDArray[np.bool_]) -> None:
    """The slots of every home are among those that its region says."""
    for one in np.unique(home[used]).tolist():
        region, mine = regions[one], np.flatnonzero(used & (home == one))
        assert region.low <= mine[0] and mine[-1] < region.high, f"slots outside region {one}"


def check_row(owner_K: Ints, position_K: Ints) -> None:
    """Every owner's committed positions in a row are consecutive, each held once."""
    pairs = np.stack([owner_K, position_K])
    assert np.unique(pairs, axis=1).shape[1] == pairs.shape[1], "a position is held twice"
    for owner in np.unique(owner_K):
        held = np.sort(position_K[owner_K == owner])
        assert held[-1] - held[0] + 1 == held.size, f"owner {owner} has a gap in its positions"
