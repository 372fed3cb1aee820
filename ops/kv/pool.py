"""The KV pool of one model: preallocated once, addressed through slots, never reallocated.

`SlotTable` labels the slots, on the host alone. `KVCache` adds the keys and values.

A pool is one sequence (the layouts ``bim`` and ``paged``) or several rows of equal capacity
(``batching``); a slot is a flat index over all rows. Forwards get the table as small tensors, ops
never write it. Slot order inside a row never matters, so a segment's slots may lie anywhere in it;
what is committed stays where it is. Every segment takes whole blocks (`block_manager.py`), those of
one home near each other, so that its forwards read one run.
"""

from collections.abc import Iterable, Sequence
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .block_manager import BlockManager
from .slots import (
    FREE,
    NOBODY,
    CopyLedger,
    Ints,
    PoolFullError,
    Region,
    check_positions,
    check_regions,
    each,
)

Row = int | Ints
SPREAD = 64  # slots of others that a run may hold besides as many as there are own ones


class SlotTable:
    """Labels of the slots of a pool.

    Attributes:
        capacity: slots of each row; `slots` = rows x capacity.
        owner: int32 [slots], FREE or the id of the segment that owns it; home: int32 [slots], the
            home of that segment.
        position: int32 [slots], RoPE position of what lies there.
        committed: bool [slots]; False for fresh slots (a tree under verification, draft levels),
            which only their own tree can see.
        blocks: in which blocks which segment has slots; under ``batching`` a row is a block.
        current_length: slots in use; idle_length: those of them that no request needs;
        peak_length: most that requests ever needed.
    """

    def __init__(self, capacity: int, rows: int = 1, block_size: int = 1) -> None:
        self.capacity = capacity
        self.rows = rows
        self.slots = rows * capacity
        self.blocks = BlockManager(self.slots, capacity if rows > 1 else block_size)
        self.owner: Ints = np.full(self.slots, FREE, np.int32)
        self.home: Ints = np.full(self.slots, NOBODY, np.int32)
        self.position: Ints = np.zeros(self.slots, np.int32)
        self.committed = np.zeros(self.slots, np.bool_)
        self.regions: dict[int, Region] = {}
        self.current_length = self.idle_length = self.peak_length = 0
        self._idle: set[int] = set()

    @property
    def needed_length(self) -> int:
        """Slots that some request needs."""
        return self.current_length - self.idle_length

    def open_(self, home: int, size: int, least: int | None = None) -> None:
        """Choose where the slots of a home shall lie: `size` side by side, or `least` before idle
        ones have to make way; anywhere where no gap has that many, and in pools of several rows."""
        limit = self.capacity if self.rows == 1 else 0
        size = self.blocks.whole(size)
        region = Region.between(self.regions.values(), size, limit)
        if self._idle and not region.size:
            needed = [one for at, one in self.regions.items() if at not in self._idle]
            for others in (self.regions.values(), needed):
                if not region.size:
                    region = Region.between(others, least or size, limit)
        self.regions[home] = region

    def near_(self, home: int, other: int) -> None:
        """The slots of a home shall lie near those of another one."""
        self.regions[home] = Region(self.regions[other].first)

    def keys_of(self, homes: Sequence[int]) -> tuple[int, int] | Ints:
        """The slots of some homes: first slot and number of slots of the run that holds them all,
        or a list of them if they lie too far apart."""
        regions = [r for home in homes if (r := self.regions.get(home)) and r.high]
        low = min((r.low for r in regions), default=0)
        high = max((r.high for r in regions), default=0)
        part = self.home[low:high]
        own = part == homes[0] if len(homes) == 1 else np.isin(part, homes)
        if high - low <= 2 * np.count_nonzero(own) + SPREAD:
            return low, high - low
        return (low + np.flatnonzero(own)).astype(np.int32)

    def keys_of_segments(self, owners: Sequence[int]) -> tuple[int, int] | Ints:
        """The same of some segments, by their block tables."""
        slots = np.sort(np.concatenate([self.held(owner) for owner in owners])).astype(np.int32)
        if not slots.size or slots[-1] - slots[0] < 2 * slots.size + SPREAD:
            return (int(slots[0]), int(slots[-1] - slots[0]) + 1) if slots.size else (0, 0)
        return slots

    def extents(self) -> list[int]:
        """For every row of the pool one past its highest slot in use."""
        used = self.owner.reshape(self.rows, self.capacity) != FREE
        ends = self.capacity - used[:, ::-1].argmax(1)
        return list(np.where(used.any(1), ends, 0).tolist())

    def append_(
        self,
        owner: npt.ArrayLike,
        position: npt.ArrayLike,
        row: Row = 0,
        home: npt.ArrayLike = NOBODY,
    ) -> Ints:
        """Label free slots as fresh and return them, in the order of `owner`.

        Args:
            row: the pool's row, one for all or one for each slot; home: of the owners, likewise.
        """
        owner_Q = np.asarray(owner, np.int32)
        home_Q = each(home, owner_Q.size)
        one = self.rows == 1
        slots = self._take_(owner_Q, home_Q) if one else self.lowest_free(owner_Q.size, row)
        self.blocks.enter_(owner_Q, slots)
        self.owner[slots] = owner_Q
        self.home[slots] = home_Q
        self.position[slots] = np.asarray(position, np.int32)
        self.committed[slots] = False
        self.current_length += slots.size
        self._note_peak()
        return slots

    def _label_(self, slots_Q: npt.NDArray[np.integer[Any]], owner: npt.ArrayLike) -> None:
        """Slots become somebody's, or free."""
        if not slots_Q.size:
            return
        slots = slots_Q.astype(np.int64)
        old_Q = self.owner[slots_Q]
        new_Q = each(owner, slots.size)
        came = new_Q != FREE
        left = old_Q != FREE
        if more := int(np.count_nonzero(came)):
            self.blocks.enter_(new_Q[came], slots[came])
        if less := int(np.count_nonzero(left)):
            self.blocks.leave_(old_Q[left], slots[left])
        self.owner[slots] = new_Q
        self.current_length += more - less

    def _include_(self, home: int, slots: npt.NDArray[np.integer[Any]]) -> Region:
        """A home uses these slots from now on."""
        region = self.regions.setdefault(home, Region())
        if slots.size:
            region.include_(int(slots.min()), int(slots.max()))
        return region

    def _take_(self, owner_Q: Ints, home_Q: Ints) -> Ints:
        """Give out free slots of the only row, to each owner of its own blocks near its home's.

        Raises:
            PoolFullError: there are fewer.
        """
        if (left := int(np.count_nonzero(self.owner == FREE))) < owner_Q.size:
            raise PoolFullError(f"{owner_Q.size} slots asked, {left} free")
        slots = np.empty(owner_Q.size, np.int32)
        shares = self.blocks.size > 1
        # where blocks have one slot, nobody can begin one that somebody else goes on in
        writer_Q = owner_Q if shares else home_Q
        pairs = dict.fromkeys(zip(writer_Q.tolist(), home_Q.tolist(), strict=True))
        for owner, home in pairs:
            mine = (writer_Q == owner) & (home_Q == home) if len(pairs) > 1 else slice(None)
            region = self.regions.setdefault(home, Region())
            slots[mine] = lowest = self._lowest(owner, region, slots[mine].size)
            self.owner[lowest] = owner_Q[mine]
            if shares:
                self.blocks.begin_(owner, lowest)
            region.include_(int(lowest[0]), int(lowest[-1]))
        return slots

    def _lowest(self, owner: int, region: Region, count: int) -> Ints:
        """The lowest free slots from a region's first on, or of the whole pool: of blocks that the
        owner may write to, or of any if these have fewer."""
        end = max(region.high, region.first) + count
        near = ((region.first, end), (region.first, self.slots), (0, self.slots))
        for own in (True, False) if self.blocks.size > 1 else (False,):
            for first, last in near:
                is_free = self.owner[first:last] == FREE
                if own:
                    is_free &= self.blocks.is_open(owner, first, min(last, self.slots))
                slots: Ints = first + is_free.nonzero()[0][:count].astype(np.int32)
                if slots.size == count:
                    return slots
        raise AssertionError("there are as many free slots as are counted")

    def lowest_free(self, count: int, row: Row) -> Ints:
        """Slots that nobody uses, of one row, or of a row for each slot.

        Raises:
            PoolFullError: a row has fewer.
        """
        row_Q = each(row, count)
        slots = np.empty(count, np.int32)
        for one, asked in zip(*np.unique(row_Q, return_counts=True), strict=True):
            first = int(one) * self.capacity
            free = np.flatnonzero(self.owner[first : first + self.capacity] == FREE)[:asked]
            if free.size < asked:
                raise PoolFullError(f"{asked} slots asked, {free.size} free")
            slots[row_Q == one] = first + free
        return slots

    def commit_(
        self,
        slots: npt.ArrayLike,
        position: npt.ArrayLike,
        owner: npt.ArrayLike | None = None,
        home: int | None = None,
    ) -> None:
        """Fresh slots become part of their owner's history, where they are: nothing moves.

        Args:
            position: their positions; only now known on the host if they are nodes of a tree.
            owner, home: whose they are from now on; None for whom they were taken for.
        """
        index = np.asarray(slots, np.int64)
        if owner is not None and (self.owner[index] != owner).any():
            self._label_(index, owner)
        if home is not None and index.size and (self.home[index] != home).any():
            self.home[index] = home
            self._include_(home, index)
        self.position[index] = np.asarray(position, np.int32)
        self.committed[index] = True

    def release_(self, slots: npt.ArrayLike) -> None:
        """Give slots back."""
        index = np.asarray(slots, np.int64)
        if index.size:
            self._label_(index, FREE)
            self.home[index] = NOBODY
            self.committed[index] = False

    def retire_(self, owners: Iterable[int], row: int | None = None) -> None:
        """Give back everything of these owners, in all rows or in one, and the regions of homes."""
        for owner in owners:
            slots = self.held(owner)
            self.release_(slots if row is None else slots[slots // self.capacity == row])
            if row is None:
                self.regions.pop(owner, None)

    def held(self, owner: int) -> npt.NDArray[np.int64]:
        """All slots of an owner, increasing, by its block table."""
        if self.blocks.size == 1:  # the labels say the same, in fewer steps
            return np.flatnonzero(self.owner == owner)
        slots = self.blocks.slots_in(self.blocks.table(owner))
        own: npt.NDArray[np.int64] = slots[self.owner[slots] == owner]
        return own

    def relabel_(self, old: int, new: int, home: int) -> None:
        """The rows of one owner become another's, with its home and its blocks: 0 bytes moved."""
        slots = self.held(old)
        self._label_(slots, new)
        self.blocks.hand_over_(old, new)
        self.home[slots] = home
        self._include_(home, slots)

    def split_(self, owner: int, first: int, position: int) -> None:
        """The owner's committed rows before a position become those of `first`, which is its own
        home, and which takes no further slots, nor does anybody in its blocks: 0 bytes moved."""
        held = self.held(owner)
        slots = held[self.committed[held] & (self.position[held] < position)]
        if slots.size:
            self._label_(slots, first)
            self.blocks.seal_(first)
            self.home[slots], region = first, self._include_(first, slots)
            region.first = region.low // self.blocks.size * self.blocks.size
            region.size = self.blocks.whole(region.high - region.first, up=True)

    def rest_(self, owner: int, *, idle: bool) -> None:
        """No request needs what an owner has, or one needs it again."""
        count = sum(self.blocks.tables.get(owner, {}).values())
        self.idle_length += count if idle else -count
        (self._idle.add if idle else self._idle.discard)(owner)
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_length = max(self.peak_length, self.needed_length)
        self.blocks.note_waste_(self.current_length)

    def span_of(self, owner: int) -> tuple[int, int]:
        """The positions of an owner's committed rows: the first, and one past the last."""
        held = self.held(owner)
        positions = self.position[held[self.committed[held]]]
        return (int(positions.min()), int(positions.max()) + 1) if positions.size else (0, 0)

    def truncate_(self, owner: int, length: int) -> None:
        """Drop the owner's rows at positions >= length."""
        held = self.held(owner)
        self.release_(held[self.position[held] >= length])

    def slots_of(self, owner: int, row: int = 0) -> Ints:
        """The owner's committed slots in one row, in the order of their positions."""
        held = self.held(owner)
        slots = held[self.committed[held] & (held // self.capacity == row)].astype(np.int32)
        by_position: Ints = slots[np.argsort(self.position[slots], kind="stable")]
        return by_position

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table is consistent."""
        used = self.owner != FREE
        assert not self.committed[~used].any(), "a free slot is committed"
        assert self.current_length == used.sum(), "slots in use are counted wrongly"
        self.blocks.check_integrity(self.owner)
        if self.rows == 1:
            check_regions(self.regions, self.home, used)
        kept = np.flatnonzero(self.committed)
        rows = (kept // self.capacity).astype(np.int32)
        check_positions(rows, self.owner[kept], self.position[kept])


class KVCache(SlotTable):
    """One pool `data` [layers, 2, kv_heads, slots + 1, head_dim]; the last slot is scratch.

    Attributes:
        layers: the keys and the values of each layer, views [kv_heads, slots + 1, head_dim].
        ledger: every byte that was moved, by cause.
    """

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
        size = (layers, 2, kv_heads, self.slots + 1, head_dim)
        self.data = zeros(size, dtype, torch.device(device))
        self.layers: list[tuple[Tensor, Tensor]] = [(kv[0], kv[1]) for kv in self.data.unbind()]
        self.ledger = CopyLedger()

    @property
    def scratch(self) -> int:
        """The slot that padding writes to; nobody ever sees it."""
        return self.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, K and V."""
        layers, two, heads, _, dim = self.data.shape
        return layers * two * heads * dim * self.data.element_size()

    def wipe_(self, owners: Iterable[int]) -> None:
        """Write zeros where these owners' rows lie: rows that are no numbers would reach everybody
        whose forward reads them, masked or not."""
        for owner in owners:
            index = torch.from_numpy(self.held(owner)).to(self.data.device)
            self.data.index_fill_(3, index, 0)

    def copy_(self, source: npt.ArrayLike, target: npt.ArrayLike, cause: str) -> None:
        """Copy slots, with their labels, into free slots of the pool; counted by the ledger."""
        source_R = np.asarray(source, np.int64)
        target_R = np.asarray(target, np.int64)
        copy = self.take_out(source_R, cause)
        self.data.index_copy_(3, torch.from_numpy(target_R).to(copy.device), copy)
        self._label_(target_R, self.owner[source_R])
        for table in (self.home, self.position, self.committed):
            table[target_R] = table[source_R]
        self._note_peak()

    def copy_from_(self, other: "KVCache", source: npt.ArrayLike, owner: int, row: int = 0) -> None:
        """Copy committed slots of another pool into free ones of a row, where they are this
        owner's; for the caller to count."""
        source_R = np.asarray(source, np.int64)
        position_R = other.position[source_R]
        slots_R = self.append_(np.full(source_R.size, owner), position_R, row, owner)
        copy = other.data.index_select(3, torch.from_numpy(source_R).to(other.data.device))
        target_R = torch.from_numpy(slots_R.astype(np.int64))
        self.data.index_copy_(3, target_R.to(copy.device), copy)
        self.commit_(slots_R, position_R)

    def take_out(self, slots: npt.ArrayLike, cause: str) -> Tensor:
        """A copy of slots for somewhere else, [layers, 2, kv_heads, R, head_dim]; counted."""
        source_R = np.asarray(slots, np.int64)
        self.ledger.add(cause, source_R.size * self.slot_bytes)
        return self.data.index_select(3, torch.from_numpy(source_R).to(self.data.device))

    def put_in_(self, rows_LtgRd: Tensor, position: npt.ArrayLike, owner: int, cause: str) -> None:
        """Rows from somewhere else become this owner's, side by side where a gap has room; counted.

        Args:
            rows_LtgRd: as `take_out` gives them. position: of each row.
        """
        position_R = np.asarray(position, np.int32)
        self.open_(owner, position_R.size)
        slots_R = self.append_(np.full(position_R.size, owner), position_R, 0, owner)
        index_R = torch.from_numpy(slots_R.astype(np.int64)).to(self.data.device)
        self.data.index_copy_(3, index_R, rows_LtgRd.to(self.data))
        self.commit_(slots_R, position_R)
        self.ledger.add(cause, position_R.size * self.slot_bytes)

    def write_(self, layer: int, slots_Q: Tensor, keys_hQd: Tensor, values_hQd: Tensor) -> None:
        """Store K and V [kv_heads, Q, head_dim] of one layer at flat slots [Q]."""
        keys, values = self.layers[layer]
        keys.index_copy_(1, slots_Q, keys_hQd)
        values.index_copy_(1, slots_Q, values_hQd)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool's memory. On a CPU it is mapped from the system: pools come and go with runs, and the
    heap of malloc would keep holes of their size."""
    if device.type != "cpu" or not prod(size):
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap(-1, prod(size) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)
