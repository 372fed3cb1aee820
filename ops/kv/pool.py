"""The KV pool of one model: preallocated once, addressed through slots, never reallocated.

It holds one sequence (the layout ``bim``) or several rows of equal capacity (``batching``); a slot
is a flat index over all rows. A table on the host says whose each slot is. It is the only copy of
that truth: forwards get it as small tensors, ops never write it. Slot order inside a row never
matters, so a branch's slots may lie anywhere in it; what is new takes the lowest free ones and what
is committed stays where it is.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]
Row = int | Ints

FREE = -1  # owner of a slot that nobody uses
NOBODY = -2  # prefix of an owner that has none
PADDING = -3  # owner of a query row that stands for nothing
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


class SlotTable(NamedTuple):
    """The first K slots of B rows: owner_BK int32, position_BK int64, committed_BK bool."""

    owner_BK: Tensor
    position_BK: Tensor
    committed_BK: Tensor


class KVCache:
    """One pool `data` [layers, 2, kv_heads, slots + 1, head_dim]; the last slot is scratch.

    Attributes:
        capacity: slots of each row; `slots` = rows x capacity.
        owner: int32 [slots], FREE or the owner's id.
        position: int32 [slots], RoPE position of what lies there.
        committed: bool [slots]; False for fresh slots (a tree under verification, draft levels),
            which only their own tree can see.
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
        self.data = _zeros(size, dtype, torch.device(device))
        shape = (layers, 2, kv_heads, rows, capacity, head_dim)
        by_row = self.data[:, :, :, : self.slots].view(shape).transpose(2, 3)
        self._views = [(layer[0], layer[1]) for layer in by_row.unbind()]
        self.owner: Ints = np.full(self.slots, FREE, np.int32)
        self.position: Ints = np.zeros(self.slots, np.int32)
        self.committed = np.zeros(self.slots, np.bool_)
        self.ledger = CopyLedger()
        self.peak_length = 0

    @property
    def scratch(self) -> int:
        """The slot that padding writes to; nobody ever sees it."""
        return self.slots

    @property
    def current_length(self) -> int:
        """Slots in use."""
        return int(np.count_nonzero(self.owner != FREE))

    @property
    def extent(self) -> int:
        """One past the highest slot in use, of any row; a forward reads slots 0 .. extent - 1."""
        used = np.flatnonzero(self._by_row(self.owner != FREE).any(0))
        return int(used[-1]) + 1 if used.size else 0

    @property
    def holes(self) -> int:
        """Free slots below the highest one in use, over all rows."""
        used = self._by_row(self.owner != FREE)
        ends = self.capacity - used[:, ::-1].argmax(1)
        return int(ends[used.any(1)].sum() - used.sum())

    def _by_row(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return table.reshape(self.rows, self.capacity)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, K and V."""
        layers, two, heads, _, dim = self.data.shape
        return layers * two * heads * dim * self.data.element_size()

    def append_(self, owner: npt.ArrayLike, position: npt.ArrayLike, row: Row = 0) -> Ints:
        """Label the lowest free slots as fresh and return them, in the order of `owner`.

        Args:
            row: the pool's row, one for all or one for each slot.
        """
        owner_Q = np.asarray(owner, np.int32)
        slots = self.lowest_free(owner_Q.size, row)
        self.owner[slots] = owner_Q
        self.position[slots] = np.asarray(position, np.int32)
        self.committed[slots] = False
        self.peak_length = max(self.peak_length, self.current_length)
        return slots

    def lowest_free(self, count: int, row: Row) -> Ints:
        """Slots that nobody uses, of one row, or of a row for each slot.

        Raises:
            PoolFullError: a row has fewer.
        """
        if isinstance(row, int):
            first = row * self.capacity
            free = np.flatnonzero(self.owner[first : first + self.capacity] == FREE)[:count]
            if free.size < count:
                raise PoolFullError(f"{count} slots asked, {free.size} free")
            return (first + free).astype(np.int32)
        row_Q = np.asarray(row, np.int32)
        slots = np.empty(count, np.int32)
        for one in np.unique(row_Q):
            slots[row_Q == one] = self.lowest_free(int((row_Q == one).sum()), int(one))
        return slots

    def commit_(
        self, slots: npt.ArrayLike, position: npt.ArrayLike, owner: npt.ArrayLike | None = None
    ) -> None:
        """Fresh slots become part of their owner's history, where they are: nothing moves.

        Args:
            position: their positions; only now known on the host if they are nodes of a tree.
            owner: who has them from now on; None for whom they were taken for.
        """
        index = np.asarray(slots, np.int64)
        if owner is not None:
            self.owner[index] = np.asarray(owner, np.int32)
        self.position[index] = np.asarray(position, np.int32)
        self.committed[index] = True

    def release_(self, slots: npt.ArrayLike) -> None:
        """Give slots back."""
        index = np.asarray(slots, np.int64)
        self.owner[index] = FREE
        self.committed[index] = False

    def retire_(self, owners: Iterable[int], row: int | None = None) -> None:
        """Give back everything of these owners, in all rows or in one."""
        gone = np.isin(self.owner, list(owners))
        if row is not None:
            gone &= np.arange(self.slots) // self.capacity == row
        self.release_(np.flatnonzero(gone))

    def relabel_(self, old: int, new: int) -> None:
        """The rows of one owner become another's: 0 bytes moved."""
        self.owner[self.owner == old] = new

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
        device = self.data.device
        kept = self.data.index_select(3, torch.from_numpy(source_R).to(device))
        self.data.index_copy_(3, torch.from_numpy(target_R).to(device), kept)
        for table in (self.owner, self.position, self.committed):
            table[target_R] = table[source_R]
        self.peak_length = max(self.peak_length, self.current_length)
        self.ledger.add(cause, source_R.size * self.slot_bytes)

    def take_out(self, slots: npt.ArrayLike, cause: str) -> Tensor:
        """A copy of slots for somewhere else, [layers, 2, kv_heads, R, head_dim]; counted."""
        source_R = np.asarray(slots, np.int64)
        self.ledger.add(cause, source_R.size * self.slot_bytes)
        return self.data.index_select(3, torch.from_numpy(source_R).to(self.data.device))

    def compact_(self) -> int:
        """Close the holes of every row: its highest slots move down into them.

        Returns:
            The number of slots moved.
        """
        return sum(self._compact_row_(row) for row in range(self.rows))

    def _compact_row_(self, row: int) -> int:
        first = row * self.capacity
        used = self.owner[first : first + self.capacity] != FREE
        length = int(np.count_nonzero(used))
        holes = first + np.flatnonzero(~used[:length])
        high = first + length + np.flatnonzero(used[length:])
        if holes.size:
            self.copy_(high, holes, "compact")
            self.release_(high)
        return int(holes.size)

    def table(self, extent: int, first_row: int = 0, rows: int = 1) -> SlotTable:
        """The first `extent` slots of some rows as tensors on the pool's device (a few KB)."""
        device, part = self.data.device, slice(first_row, first_row + rows)
        return SlotTable(
            torch.tensor(self._by_row(self.owner)[part, :extent], device=device),
            torch.tensor(
                self._by_row(self.position)[part, :extent], dtype=torch.int64, device=device
            ),
            torch.tensor(self._by_row(self.committed)[part, :extent], device=device),
        )

    def write_(self, layer: int, slots_Q: Tensor, keys_hQd: Tensor, values_hQd: Tensor) -> None:
        """Store K and V [kv_heads, Q, head_dim] of one layer at flat slots [Q]."""
        self.data[layer, 0].index_copy_(1, slots_Q, keys_hQd)
        self.data[layer, 1].index_copy_(1, slots_Q, values_hQd)

    def get_valid(
        self, layer: int, extent: int, first_row: int = 0, rows: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Views (K, V), each [rows, kv_heads, extent, head_dim], of one layer's first slots."""
        keys_RgSd, values_RgSd = self._views[layer]
        part = slice(first_row, first_row + rows)
        return keys_RgSd[part, :, :extent], values_RgSd[part, :, :extent]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table is consistent."""
        used = self.owner != FREE
        assert not self.committed[~used].any(), "a free slot is committed"
        for row in range(self.rows):
            part = slice(row * self.capacity, (row + 1) * self.capacity)
            kept = self.committed[part]
            _check_row(self.owner[part][kept], self.position[part][kept])


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool's memory. On a CPU it comes from the system: pools come and go with runs, and malloc's
    heap would be left with holes of their size, one after another."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap(-1, prod(size) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def _check_row(owner_K: Ints, position_K: Ints) -> None:
    """Every owner's committed positions in a row are consecutive, each held once."""
    pairs = np.stack([owner_K, position_K])
    assert np.unique(pairs, axis=1).shape[1] == pairs.shape[1], "a position is held twice"
    for owner in np.unique(owner_K):
        held = np.sort(position_K[owner_K == owner])
        assert held[-1] - held[0] + 1 == held.size, f"owner {owner} has a gap in its positions"
