"""The KV pool of one model: preallocated once, addressed through slots, never reallocated.

It holds one sequence (the layout ``bim``) or several rows of equal capacity (``batching``); a slot
is a flat index over all rows. A table on the host says which segment owns each slot. It is the only
copy of that truth: forwards get it as small tensors, ops never write it. Slot order inside a row
never matters, so a segment's slots may lie anywhere in it; what is committed stays where it is.
Segments of one home (a request) take slots near each other, so that its forwards read one run.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .pool_memory import check_row, zeros
from .slots import FREE, NOBODY, CopyLedger, Ints, PoolFullError, Region, SlotRun

Row = int | Ints
SPREAD = 64  # slots of others that a run may hold besides as many as there are own ones


class KVCache:
    """One pool `data` [layers, 2, kv_heads, slots + 1, head_dim]; the last slot is scratch.

    Attributes:
        capacity: slots of each row; `slots` = rows x capacity.
        owner: int32 [slots], FREE or the id of the segment that owns it; home: int32 [slots], the
            home of that segment.
        position: int32 [slots], RoPE position of what lies there.
        committed: bool [slots]; False for fresh slots (a tree under verification, draft levels),
            which only their own tree can see.
        current_length: slots in use; idle_length: those of them that no request needs;
        peak_length: most that requests ever needed.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        rows: int = 1,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity, self.rows, self.slots = capacity, rows, rows * capacity
        size = (layers, 2, kv_heads, self.slots + 1, head_dim)
        self.data = zeros(size, dtype, torch.device(device))
        self._heads = kv_heads
        parts = [layer.unbind() for layer in self.data.unbind()]
        self._offsets = [(keys.storage_offset(), values.storage_offset()) for keys, values in parts]
        self.owner: Ints = np.full(self.slots, FREE, np.int32)
        self.home: Ints = np.full(self.slots, NOBODY, np.int32)
        self.position: Ints = np.zeros(self.slots, np.int32)
        self.committed = np.zeros(self.slots, np.bool_)
        self.regions: dict[int, Region] = {}
        self.ledger = CopyLedger()
        self.current_length = self.idle_length = self.peak_length = 0
        self._idle: set[int] = set()

    @property
    def scratch(self) -> int:
        """The slot that padding writes to; nobody ever sees it."""
        return self.slots

    @property
    def needed_length(self) -> int:
        """Slots that some request needs."""
        return self.current_length - self.idle_length

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, K and V."""
        layers, two, heads, _, dim = self.data.shape
        return layers * two * heads * dim * self.data.element_size()

    # -- regions ----------------------------------------------------------------------------------

    def open_(self, home: int, size: int, least: int | None = None) -> None:
        """Choose where the slots of a home shall lie: `size` side by side, or `least` before idle
        ones have to make way. In a pool of several rows, and where no gap has that many, it
        takes them wherever they are free."""
        limit = self.capacity if self.rows == 1 else 0
        region = Region.between(self.regions.values(), size, limit)
        if self._idle and not region.size:
            needed = [one for at, one in self.regions.items() if at not in self._idle]
            for others in (self.regions.values(), needed):
                if not region.size:
                    region = Region.between(others, least or size, limit)
        self.regions[home] = region

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

    def extents(self) -> list[int]:
        """For every row of the pool one past its highest slot in use."""
        used = self.owner.reshape(self.rows, self.capacity) != FREE
        ends = self.capacity - used[:, ::-1].argmax(1)
        return list(np.where(used.any(1), ends, 0).tolist())

    # -- slots ------------------------------------------------------------------------------------

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
        home_Q = np.broadcast_to(np.asarray(home, np.int32), owner_Q.shape)
        slots = self._take(home_Q) if self.rows == 1 else self.lowest_free(owner_Q.size, row)
        self.owner[slots], self.home[slots] = owner_Q, home_Q
        self.position[slots] = np.asarray(position, np.int32)
        self.committed[slots] = False
        self.current_length += len(slots)
        self._note_peak()
        return slots

    def _take(self, home_Q: Ints) -> Ints:
        """Free slots of the only row, of each home the lowest ones in its region."""
        slots = np.empty(home_Q.size, np.int32)
        free = self.owner == FREE
        for home in dict.fromkeys(home_Q.tolist()):
            mine = np.flatnonzero(home_Q == home)
            region = self.regions.setdefault(home, Region())
            slots[mine] = lowest = region.lowest(free, mine.size)
            free[lowest] = False
            region.include_(int(lowest[0]), int(lowest[-1]))
        return slots

    def lowest_free(self, count: int, row: Row) -> Ints:
        """Slots that nobody uses, of one row, or of a row for each slot.

        Raises:
            PoolFullError: a row has fewer.
        """
        row_Q = np.broadcast_to(np.asarray(row, np.int32), count)
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
        if owner is not None:
            self.owner[index] = np.asarray(owner, np.int32)
        if home is not None and index.size and (self.home[index] != home).any():
            self.home[index] = home
            self.regions.setdefault(home, Region()).include_(int(index.min()), int(index.max()))
        self.position[index] = np.asarray(position, np.int32)
        self.committed[index] = True

    def release_(self, slots: npt.ArrayLike) -> None:
        """Give slots back."""
        index = np.asarray(slots, np.int64)
        self.current_length -= int(np.count_nonzero(self.owner[index] != FREE))
        self.owner[index], self.home[index] = FREE, NOBODY
        self.committed[index] = False

    def retire_(self, owners: Iterable[int], row: int | None = None) -> None:
        """Give back everything of these owners, in all rows or in one, and the regions of homes."""
        gone = list(owners)
        first, last = (0, self.slots) if row is None else (row * self.capacity, self.capacity)
        part = self.owner[first : last if row is None else first + last]
        self.release_(first + np.flatnonzero(np.isin(part, gone)))
        if row is None:
            for home in gone:
                self.regions.pop(home, None)

    def wipe_(self, owners: Iterable[int]) -> None:
        """Write zeros where these owners' rows lie: rows that are no numbers would reach everybody
        whose forward reads them, masked or not."""
        slots = np.flatnonzero(np.isin(self.owner, [*owners]))
        index = torch.from_numpy(slots).to(self.data.device)
        self.data.index_fill_(3, index, 0)

    def relabel_(self, old: int, new: int) -> None:
        """The rows of one owner become another's: 0 bytes moved."""
        self.owner[self.owner == old] = new

    def split_(self, owner: int, first: int, position: int) -> None:
        """The owner's committed rows before a position become those of `first`, which is its own
        home, and which takes no further slots: 0 bytes moved."""
        mine = (self.owner == owner) & self.committed & (self.position < position)
        slots = np.flatnonzero(mine)
        self.owner[slots], self.home[slots] = first, first
        if slots.size:
            region = self.regions.setdefault(first, Region())
            region.include_(int(slots[0]), int(slots[-1]))
            region.first, region.size = region.low, region.high - region.low

    def rest_(self, owner: int, *, idle: bool) -> None:
        """No request needs what an owner has, or one needs it again."""
        count = int(np.count_nonzero(self.owner == owner))
        self.idle_length += count if idle else -count
        (self._idle.add if idle else self._idle.discard)(owner)
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_length = max(self.peak_length, self.needed_length)

    def span_of(self, owner: int) -> tuple[int, int]:
        """The positions of an owner's committed rows: the first, and one past the last."""
        positions = self.position[(self.owner == owner) & self.committed]
        return (int(positions.min()), int(positions.max()) + 1) if positions.size else (0, 0)

    def truncate_(self, owner: int, length: int) -> None:
        """Drop the owner's rows at positions >= length."""
        self.release_(np.flatnonzero((self.owner == owner) & (self.position >= length)))

    def slots_of(self, owner: int, row: int = 0) -> Ints:
        """The owner's committed slots in one row, in the order of their positions."""
        first = row * self.capacity
        mine = self.owner[first : first + self.capacity] == owner
        slots = first + np.flatnonzero(mine & self.committed[first : first + self.capacity])
        return slots[np.argsort(self.position[slots], kind="stable")].astype(np.int32)

    def copy_(self, source: npt.ArrayLike, target: npt.ArrayLike, cause: str) -> None:
        """Copy slots, with their labels, into free slots of the pool; counted by the ledger."""
        source_R, target_R = np.asarray(source, np.int64), np.asarray(target, np.int64)
        copy = self.take_out(source_R, cause)
        self.data.index_copy_(3, torch.from_numpy(target_R).to(copy.device), copy)
        self.current_length += int(np.count_nonzero(self.owner[target_R] == FREE))
        for table in (self.owner, self.home, self.position, self.committed):
            table[target_R] = table[source_R]
        self._note_peak()

    def take_out(self, slots: npt.ArrayLike, cause: str) -> Tensor:
        """A copy of slots for somewhere else, [layers, 2, kv_heads, R, head_dim]; counted."""
        source_R = np.asarray(slots, np.int64)
        self.ledger.add(cause, source_R.size * self.slot_bytes)
        return self.data.index_select(3, torch.from_numpy(source_R).to(self.data.device))

    def write_(self, layer: int, slots_Q: Tensor, keys_hQd: Tensor, values_hQd: Tensor) -> None:
        """Store K and V [kv_heads, Q, head_dim] of one layer at flat slots [Q]."""
        self.data[layer, 0].index_copy_(1, slots_Q, keys_hQd)
        self.data[layer, 1].index_copy_(1, slots_Q, values_hQd)

    def get_valid(self, layer: int, keys: SlotRun | Tensor) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, each [G, kv_heads, K, head_dim]: views of runs of slots, or a copy
        of the slots in an int64 tensor [K] (G is 1)."""
        if isinstance(keys, Tensor):
            copy = self.data[layer].index_select(2, keys)
            return copy[0][None], copy[1][None]
        dim = self.data.shape[-1]
        size = (keys.runs, self._heads, keys.length, dim)
        stride = (keys.stride * dim, (self.slots + 1) * dim, dim, 1)
        k, v = self._offsets[layer]
        start = keys.first * dim
        return (
            self.data.as_strided(size, stride, k + start),
            self.data.as_strided(size, stride, v + start),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table is consistent."""
        used = self.owner != FREE
        assert not self.committed[~used].any(), "a free slot is committed"
        assert self.current_length == used.sum(), "slots in use are counted wrongly"
        for home in np.unique(self.home[used]) if self.rows == 1 else ():
            region, mine = self.regions[int(home)], np.flatnonzero(used & (self.home == home))
            assert region.low <= mine[0] and mine[-1] < region.high, f"slots outside region {home}"
        for row in range(self.rows):
            part = slice(row * self.capacity, (row + 1) * self.capacity)
            kept = self.committed[part]
            check_row(self.owner[part][kept], self.position[part][kept])
