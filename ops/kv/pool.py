"""The KV pool of one model: preallocated once, addressed through slots, never reallocated.

A pool is one sequence (``bim``, ``paged``) or several rows of equal capacity (``batching``); a slot
is a flat index over all rows. A segment's slots may be anywhere in a row; committed rows are never
moved. Each segment has a table of the blocks with slots of it, whose free slots it takes first; a
block whose rows became another segment's is sealed. A home's blocks are near each other."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]
Slots = npt.NDArray[np.integer[Any]]
Row = int | Ints
Keys = tuple[int, int] | Ints
"""A run of slots (the first one, their number), or a list of slots."""

FREE = -1  # owner of a free slot
NO_SEGMENT = -2  # no segment
UNKNOWN = -4  # owner of a fresh slot whose segment only the device knows
LABEL_OFFSET = 16  # labels that are not segments are above its negative
SPREAD = 64  # other homes' slots that a run may hold, besides as many as its own


def is_among(label_N: Ints, values: Sequence[int]) -> npt.NDArray[np.bool_]:
    """`np.isin` for a few values, without its fixed cost."""
    among_N = np.zeros(label_N.shape, np.bool_)
    for value in values:
        among_N |= label_N == value
    return among_N


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


@dataclass(slots=True)
class Region:
    """A home's slots: `size` from `first` on are reserved; it uses some from `low` to `high`."""

    first: int = 0
    size: int = 0
    low: int = 1 << 31
    high: int = 0

    @classmethod
    def between(cls, others: Iterable["Region"], size: int, limit: int) -> "Region":
        """The first gap of `size` slots below `limit`; reserves nothing if there is none."""
        first = 0
        for other in sorted(others, key=lambda region: region.first):
            if other.size and other.first - first >= size:
                break
            first = max(first, other.first + other.size)
        return cls(first, size) if first + size <= limit else cls()

    def include_(self, first: int, last: int) -> None:
        self.low = min(self.low, first)
        self.high = max(self.high, last + 1)


class BlockManager:
    """For each segment its blocks of `size` slots, and the number of its slots in each (`tables`).
    references, writer: int32 [blocks], how many tables name a block, and the segment that may take
    its free slots. in_use: blocks that are named; high_water, most_wasted: maxima."""

    def __init__(self, slots: int, size: int) -> None:
        self.slots = slots
        self.size = size
        self.tables: dict[int, dict[int, int]] = {}
        self.references: Ints = np.zeros(-(-slots // size), np.int32)
        self.writer: Ints = np.full(len(self.references), NO_SEGMENT, np.int32)
        self.in_use = self.high_water = self.most_wasted = 0

    def table(self, segment: int) -> list[int]:
        return sorted(self.tables.get(segment, ()))

    def whole(self, slots: int, *, up: bool = False) -> int:
        """Slots rounded down (or `up`) to whole blocks, at least one; 0 stays 0."""
        return max((slots + up * (self.size - 1)) // self.size, 1) * self.size if slots else 0

    def is_open(self, segment: int, first: int, last: int) -> Bools:
        """bool [last - first]: the slots that a segment may take where they are free."""
        blocks = slice(first // self.size, -(-last // self.size))
        writer_b = self.writer[blocks]
        is_free_b: Bools = (writer_b == NO_SEGMENT) & (self.references[blocks] == 0)
        open_b: Bools = is_free_b | (writer_b == segment)
        start = blocks.start * self.size
        return np.repeat(open_b, self.size)[first - start : last - start]

    def enter_(self, owner_Q: Ints, slots_Q: Slots) -> None:
        """Free slots become these segments'; the first segment of a block becomes its writer."""
        for segment, block, count in self._pairs(owner_Q, slots_Q):
            table = self.tables.setdefault(segment, {})
            if block not in table:
                table[block] = 0
                if not self.references[block]:
                    self.in_use += 1
                    if self.writer[block] == NO_SEGMENT:
                        self.writer[block] = segment
                self.references[block] += 1
            table[block] += count
        self.high_water = max(self.high_water, self.in_use)

    def leave_(self, owner_Q: Ints, slots_Q: npt.NDArray[np.int64]) -> None:
        for segment, block, count in self._pairs(owner_Q, slots_Q):
            table = self.tables[segment]
            table[block] -= count
            if not table[block]:
                del table[block]
                self.references[block] -= 1
                if not self.references[block]:
                    self.writer[block] = NO_SEGMENT
                    self.in_use -= 1
            if not table:
                del self.tables[segment]

    def wasted(self, used: int) -> int:
        """Slots of blocks in use that are not among the `used` ones."""
        missing = len(self.references) * self.size - self.slots
        is_short = bool(missing) and self.references[-1] > 0
        return self.in_use * self.size - is_short * missing - used

    def _pairs(self, owner_Q: Ints, slots_Q: Slots) -> Iterator[tuple[int, int, int]]:
        """(segment, block, number of its slots there)."""
        if self.size == 1:  # every slot is a block by itself
            return zip(owner_Q.tolist(), slots_Q.tolist(), repeat(1, owner_Q.size), strict=True)
        labels_Q = owner_Q.astype(np.int64) + LABEL_OFFSET
        keys, counts = np.unique(
            labels_Q * len(self.references) + slots_Q // self.size, return_counts=True
        )
        segments, blocks = np.divmod(keys, len(self.references))
        segments -= LABEL_OFFSET
        return zip(segments.tolist(), blocks.tolist(), counts.tolist(), strict=True)

    def check_integrity(self, owner: Ints) -> None:
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
        assert (self.writer[named == 0] == NO_SEGMENT).all(), "a free block has a writer"


class SlotTable:
    """Labels of the slots of a pool: `rows` rows of `capacity` slots.

    owner, home, position: int32 [slots], FREE or the slot's segment, the home of that, RoPE
    positions. committed: bool [slots]; False for fresh slots (a tree under verification, draft
    levels), which only their own tree sees. regions: for each home, where its slots are. Numbers
    of slots: current_length in use; idle_length not needed by requests; peak_length most needed."""

    def __init__(self, capacity: int, rows: int = 1, block_size: int = 1) -> None:
        self.capacity = capacity
        self.rows = rows
        self.slots = rows * capacity
        self.blocks = BlockManager(self.slots, capacity if rows > 1 else block_size)
        self.owner: Ints = np.full(self.slots, FREE, np.int32)
        self.home: Ints = np.full(self.slots, NO_SEGMENT, np.int32)
        self.position: Ints = np.zeros(self.slots, np.int32)
        self.committed = np.zeros(self.slots, np.bool_)
        self.regions: dict[int, Region] = {}
        self.current_length = self.idle_length = self.peak_length = 0
        self._idle: set[int] = set()

    @property
    def needed_length(self) -> int:
        return self.current_length - self.idle_length

    def open_(self, home: int, size: int, least: int | None = None) -> None:
        """Reserve `size` adjacent slots for a home; `least` in place of idle regions if no gap has
        that many; else none. Pools of several rows reserve nothing."""
        limit = self.capacity if self.rows == 1 else 0
        size = self.blocks.whole(size)
        region = Region.between(self.regions.values(), size, limit)
        if self._idle and not region.size:
            needed = [region for home, region in self.regions.items() if home not in self._idle]
            for others in (self.regions.values(), needed):
                if not region.size:
                    region = Region.between(others, least or size, limit)
        self.regions[home] = region

    def keys_of(self, homes: Sequence[int]) -> Keys:
        """The slots of some homes: first slot and length of a run, or a list if it is sparse."""
        regions = [self.regions.get(home) for home in homes]
        used = [region for region in regions if region is not None and region.high]
        low = min([region.low for region in used], default=0)
        high = max([region.high for region in used], default=0)
        is_own = is_among(self.home[low:high], homes)
        if high - low <= 2 * np.count_nonzero(is_own) + SPREAD:
            return low, high - low
        return (low + np.flatnonzero(is_own)).astype(np.int32)

    def keys_of_segments(self, owners: Sequence[int]) -> Keys:
        """The slots of some segments, as `keys_of` gives them."""
        slots = np.sort(np.concatenate(list(map(self.slots_owned, owners)))).astype(np.int32)
        if not slots.size:
            return 0, 0
        length = int(slots[-1] - slots[0]) + 1
        return (int(slots[0]), length) if length <= 2 * slots.size + SPREAD else slots

    def extents(self) -> list[int]:
        """The end of the slots in use of every row, from its first slot."""
        used = self.owner.reshape(self.rows, self.capacity) != FREE
        return list(np.where(used.any(1), self.capacity - used[:, ::-1].argmax(1), 0).tolist())

    def append_(
        self,
        owner: npt.ArrayLike,
        position: npt.ArrayLike,
        row: Row = 0,
        home: npt.ArrayLike = NO_SEGMENT,
    ) -> Ints:
        """Label free slots as fresh and return them, in the order of `owner` (segments); the
        rest is one for all or one for each slot. Raises PoolFullError."""
        owner_Q = np.asarray(owner, np.int32)
        home_Q = np.full(owner_Q.size, home, np.int32)
        one_row = self.rows == 1
        slots = self._take_(owner_Q, home_Q) if one_row else self.lowest_free(owner_Q.size, row)
        self.blocks.enter_(owner_Q, slots)
        self.owner[slots] = owner_Q
        self.home[slots] = home_Q
        self.position[slots] = np.asarray(position, np.int32)
        self.committed[slots] = False
        self.current_length += slots.size
        self._note_peak()
        return slots

    def _label_(self, slots_Q: Slots, owner: npt.ArrayLike) -> None:
        if not slots_Q.size:
            return
        slots = slots_Q.astype(np.int64)
        old_Q = self.owner[slots_Q]
        new_Q = np.full(slots.size, owner, np.int32)
        is_added = new_Q != FREE
        is_removed = old_Q != FREE
        if more := int(np.count_nonzero(is_added)):
            self.blocks.enter_(new_Q[is_added], slots[is_added])
        if less := int(np.count_nonzero(is_removed)):
            self.blocks.leave_(old_Q[is_removed], slots[is_removed])
        self.owner[slots] = new_Q
        self.current_length += more - less

    def _include_(self, home: int, slots: Slots) -> Region:
        region = self.regions.setdefault(home, Region())
        if slots.size:
            region.include_(int(slots.min()), int(slots.max()))
        return region

    def _take_(self, owner_Q: Ints, home_Q: Ints) -> Ints:
        """Free slots of the only row, for each owner in its own blocks near its home."""
        if (free := int(np.count_nonzero(self.owner == FREE))) < owner_Q.size:
            raise PoolFullError(f"{owner_Q.size} slots requested, {free} free")
        slots = np.empty(owner_Q.size, np.int32)
        shares = self.blocks.size > 1
        # blocks of one slot have no second writer
        writer_Q = owner_Q if shares else home_Q
        pairs = dict.fromkeys(zip(writer_Q.tolist(), home_Q.tolist(), strict=True))
        for owner, home in pairs:
            mine = (writer_Q == owner) & (home_Q == home) if len(pairs) > 1 else slice(None)
            region = self.regions.setdefault(home, Region())
            slots[mine] = lowest = self._lowest(owner, region, slots[mine].size)
            self.owner[lowest] = owner_Q[mine]
            if shares:  # it becomes the writer of blocks that are free
                blocks = lowest // self.blocks.size
                self.blocks.writer[blocks[self.blocks.references[blocks] == 0]] = owner
            region.include_(int(lowest[0]), int(lowest[-1]))
        return slots

    def _lowest(self, owner: int, region: Region, count: int) -> Ints:
        """The lowest free slots near a region: in blocks that the owner may write to, or in any."""
        end = max(region.high, region.first) + count
        near = ((region.first, end), (region.first, self.slots), (0, self.slots))
        for only_writable in (True, False) if self.blocks.size > 1 else (False,):
            for first, last in near:
                is_free = self.owner[first:last] == FREE
                if only_writable:
                    is_free &= self.blocks.is_open(owner, first, min(last, self.slots))
                slots: Ints = first + is_free.nonzero()[0][:count].astype(np.int32)
                if slots.size == count:
                    return slots
        raise AssertionError("there are as many free slots as are counted")

    def lowest_free(self, count: int, row: Row) -> Ints:
        """Free slots of one row, or of a row for each; raises PoolFullError."""
        row_Q = np.full(count, row, np.int32)
        slots = np.empty(count, np.int32)
        for number, needed in zip(*np.unique(row_Q, return_counts=True), strict=True):
            first = int(number) * self.capacity
            free = np.flatnonzero(self.owner[first : first + self.capacity] == FREE)[:needed]
            if free.size < needed:
                raise PoolFullError(f"{needed} slots requested, {free.size} free")
            slots[row_Q == number] = first + free
        return slots

    def commit_(
        self,
        slots: npt.ArrayLike,
        position: npt.ArrayLike,
        owner: npt.ArrayLike | None = None,
        home: int | None = None,
    ) -> None:
        """Make fresh slots history in place, at positions known only now; None: labels stay."""
        index = np.asarray(slots, np.int64)
        if owner is not None and (self.owner[index] != owner).any():
            self._label_(index, owner)
        if home is not None and index.size and (self.home[index] != home).any():
            self.home[index] = home
            self._include_(home, index)
        self.position[index] = np.asarray(position, np.int32)
        self.committed[index] = True

    def release_(self, slots: npt.ArrayLike) -> None:
        index = np.asarray(slots, np.int64)
        if index.size:
            self._label_(index, FREE)
            self.home[index] = NO_SEGMENT
            self.committed[index] = False

    def retire_(self, owners: Iterable[int], row: int | None = None) -> None:
        """Free all slots of these owners, in all rows or in one, and the regions of homes."""
        for owner in owners:
            slots = self.slots_owned(owner)
            self.release_(slots if row is None else slots[slots // self.capacity == row])
            if row is None:
                self.regions.pop(owner, None)

    def slots_owned(self, owner: int) -> npt.NDArray[np.int64]:
        if self.blocks.size == 1:  # the labels say the same, in fewer steps
            return np.flatnonzero(self.owner == owner)
        blocks = np.array(self.blocks.table(owner), np.int64)[:, None]
        slots = (blocks * self.blocks.size + np.arange(self.blocks.size)).reshape(-1)
        slots = slots[slots < self.slots]
        owned: npt.NDArray[np.int64] = slots[self.owner[slots] == owner]
        return owned

    def relabel_(self, old: int, new: int, home: int) -> None:
        """Give all rows and blocks of an owner to another and its home; moves 0 bytes."""
        slots = self.slots_owned(old)
        self._label_(slots, new)
        self.blocks.writer[self.blocks.writer == old] = new
        self.home[slots] = home
        self._include_(home, slots)

    def split_(self, owner: int, first: int, position: int) -> None:
        """Give an owner's committed rows before a position to `first`; seal their blocks."""
        slots_R = self.slots_owned(owner)
        slots = slots_R[self.committed[slots_R] & (self.position[slots_R] < position)]
        if slots.size:
            self._label_(slots, first)
            self.blocks.writer[self.blocks.table(first)] = NO_SEGMENT
            region = self._include_(first, slots)
            self.home[slots] = first
            region.first = region.low // self.blocks.size * self.blocks.size
            region.size = self.blocks.whole(region.high - region.first, up=True)

    def rest_(self, owner: int, *, idle: bool) -> None:
        """Mark an owner's slots as needed by no request, or as needed again."""
        count = sum(self.blocks.tables.get(owner, {}).values())
        self.idle_length += count if idle else -count
        (self._idle.add if idle else self._idle.discard)(owner)
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_length = max(self.peak_length, self.current_length - self.idle_length)
        wasted = self.blocks.wasted(self.current_length)
        self.blocks.most_wasted = max(self.blocks.most_wasted, wasted)

    def span_of(self, owner: int) -> tuple[int, int]:
        """The first position of an owner's committed rows, and the last one plus one."""
        slots_R = self.slots_owned(owner)
        positions = self.position[slots_R[self.committed[slots_R]]]
        return (int(positions.min()), int(positions.max()) + 1) if positions.size else (0, 0)

    def truncate_(self, owner: int, length: int) -> None:
        slots_R = self.slots_owned(owner)
        self.release_(slots_R[self.position[slots_R] >= length])

    def slots_of(self, owner: int, row: int = 0) -> Ints:
        """The owner's committed slots in one row, by position."""
        slots_R = self.slots_owned(owner)
        slots = slots_R[self.committed[slots_R] & (slots_R // self.capacity == row)]
        by_position: Ints = slots[np.argsort(self.position[slots], kind="stable")].astype(np.int32)
        return by_position

    def check_integrity(self) -> None:
        used = self.owner != FREE
        assert not self.committed[~used].any(), "a free slot is committed"
        assert self.current_length == used.sum(), "slots in use are counted wrongly"
        self.blocks.check_integrity(self.owner)
        if self.rows == 1:  # every home's slots are inside its region
            slots = np.flatnonzero(used)
            for home in np.unique(self.home[slots]).tolist():
                region = self.regions[home]
                mine = slots[self.home[slots] == home]
                is_inside = region.low <= mine[0] and mine[-1] < region.high
                assert is_inside, f"slots outside region {home}"
        # every owner's committed positions in a row are consecutive and unique
        slots = np.flatnonzero(self.committed)
        slots = slots[np.lexsort((self.position[slots], self.owner[slots], slots // self.capacity))]
        row = slots // self.capacity
        owner = self.owner[slots]
        same = (row[1:] == row[:-1]) & (owner[1:] == owner[:-1])
        steps = np.diff(self.position[slots])[same]
        assert (steps != 0).all(), "a position is held twice"
        gaps = owner[1:][same][steps != 1]
        assert not gaps.size, f"owner {gaps[0]} has a gap in its positions"


class KVCache(SlotTable):
    """One pool `data` [layers, 2, kv_heads, slots + 1, head_dim]; `layers` are views of each
    layer's keys and values. Padding writes to the last slot, `scratch`, which no row sees."""

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        rows: int = 1,
        *,
        block_size: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(capacity, rows, block_size)
        self.scratch = self.slots
        size = (layers, 2, kv_heads, self.slots + 1, head_dim)
        if torch.device(device).type != "cpu" or not prod(size):
            self.data = torch.zeros(size, dtype=dtype, device=device)
        else:  # mapped: pools come and go, and the heap of malloc would keep holes of their size
            pages = mmap(-1, prod(size) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
            self.data = torch.frombuffer(pages, dtype=dtype).view(size)
        self.layers: list[tuple[Tensor, Tensor]] = [(kv[0], kv[1]) for kv in self.data.unbind()]
        self.ledger = CopyLedger()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, K and V."""
        return self.data[:, :, :, 0].nbytes

    def wipe_(self, owners: Iterable[int]) -> None:
        """Zero these owners' rows: NaNs would reach forwards that read them, masked or not."""
        for owner in owners:
            index = torch.from_numpy(self.slots_owned(owner)).to(self.data.device)
            self.data.index_fill_(3, index, 0)

    def copy_rows_(self, owner: int, source: int, target: int, cause: str) -> None:
        """Copy an owner's committed rows, with their labels, into another pool row; counted."""
        source_R = self.slots_of(owner, source)
        if not source_R.size:
            return
        target_R = self.lowest_free(source_R.size, target).astype(np.int64)
        copy = self.take_out(source_R, cause)
        self.data.index_copy_(3, torch.from_numpy(target_R).to(copy.device), copy)
        self._label_(target_R, owner)
        for table in (self.home, self.position, self.committed):
            table[target_R] = table[source_R]
        self._note_peak()

    def copy_from_(self, other: "KVCache", source: npt.ArrayLike, owner: int, row: int = 0) -> None:
        """Copy committed slots of another pool into free ones of a row; not counted."""
        source_R = np.asarray(source, np.int64)
        copy = other.data.index_select(3, torch.from_numpy(source_R).to(other.data.device))
        self._write_rows_(copy, other.position[source_R], owner, row)

    def take_out(self, slots: npt.ArrayLike, cause: str) -> Tensor:
        """A copy of slots for use outside the pool, [layers, 2, kv_heads, R, head_dim]; counted."""
        source_R = np.asarray(slots, np.int64)
        self.ledger.add(cause, source_R.size * self.slot_bytes)
        return self.data.index_select(3, torch.from_numpy(source_R).to(self.data.device))

    def put_in_(self, rows_LtgRd: Tensor, position: npt.ArrayLike, owner: int, cause: str) -> None:
        """Write rows of `take_out` as this owner's, adjacent if a gap has room; counted."""
        position_R = np.asarray(position, np.int32)
        self.open_(owner, position_R.size)
        self._write_rows_(rows_LtgRd.to(self.data), position_R, owner, 0)
        self.ledger.add(cause, position_R.size * self.slot_bytes)

    def _write_rows_(self, rows_LtgRd: Tensor, position_R: Ints, owner: int, row: int) -> None:
        slots_R = self.append_(np.full(position_R.size, owner), position_R, row, owner)
        index_R = torch.from_numpy(slots_R.astype(np.int64)).to(self.data.device)
        self.data.index_copy_(3, index_R, rows_LtgRd)
        self.commit_(slots_R, position_R)

    def write_(self, layer: int, slots_Q: Tensor, keys_hQd: Tensor, values_hQd: Tensor) -> None:
        """Store K and V [kv_heads, Q, head_dim] of one layer at flat slots [Q]."""
        keys, values = self.layers[layer]
        keys.index_copy_(1, slots_Q, keys_hQd.to(keys.dtype))
        values.index_copy_(1, slots_Q, values_hQd.to(keys.dtype))
