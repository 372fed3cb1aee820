"""The KV pool of one model: preallocated once, addressed through slots, never reallocated.

A slot table on the host says whose each slot is. It is the only copy of that truth: forwards get
it as small tensors, ops never write it. Slot order never matters, so a branch's rows may lie
anywhere in the pool; new rows take the lowest free slots and committed rows stay where they are.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]

FREE = -1  # owner of a slot that nobody uses
NOBODY = -2  # prefix of an owner that has none


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
class SlotTable:
    """The table's first K slots as tensors: owner_K int32, position_K int64, committed_K bool."""

    owner_K: Tensor
    position_K: Tensor
    committed_K: Tensor


class KVCache:
    """One pool `data` [layers, 2, kv_heads, capacity + 1, head_dim]; the last slot is scratch.

    Attributes:
        owner: int32 [capacity], FREE or the owner's id.
        position: int32 [capacity], RoPE position of the row.
        committed: bool [capacity]; False for fresh rows (a tree under verification, draft levels),
            which only their own tree can see.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.data = torch.zeros(
            layers, 2, kv_heads, capacity + 1, head_dim, dtype=dtype, device=device
        )
        self.owner: Ints = np.full(capacity, FREE, np.int32)
        self.position: Ints = np.zeros(capacity, np.int32)
        self.committed = np.zeros(capacity, np.bool_)
        self.ledger = CopyLedger()
        self.peak_length = 0

    @property
    def scratch(self) -> int:
        """The slot that padding rows write to; no row ever sees it."""
        return self.capacity

    @property
    def current_length(self) -> int:
        """Slots in use."""
        return int(np.count_nonzero(self.owner != FREE))

    @property
    def extent(self) -> int:
        """One past the highest slot in use; a forward reads slots 0 .. extent - 1."""
        used = np.flatnonzero(self.owner != FREE)
        return int(used[-1]) + 1 if used.size else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, K and V."""
        layers, two, heads, _, dim = self.data.shape
        return layers * two * heads * dim * self.data.element_size()

    def append_(self, owner: npt.ArrayLike, position: npt.ArrayLike) -> Ints:
        """Label the lowest free slots as fresh rows and return them, in the rows' order."""
        owner_Q = np.asarray(owner, np.int32)
        free = np.flatnonzero(self.owner == FREE)[: owner_Q.size]
        if free.size < owner_Q.size:
            raise PoolFullError(f"{owner_Q.size} rows asked, {free.size} slots free")
        self.owner[free] = owner_Q
        self.position[free] = np.asarray(position, np.int32)
        self.committed[free] = False
        self.peak_length = max(self.peak_length, self.current_length)
        return free.astype(np.int32)

    def commit_(self, slots: npt.ArrayLike, position: npt.ArrayLike) -> None:
        """Fresh rows become part of their owner's history, where they are: nothing moves.

        Args:
            position: their positions; only now known on the host if they are nodes of a tree.
        """
        index = np.asarray(slots, np.int64)
        self.position[index] = np.asarray(position, np.int32)
        self.committed[index] = True

    def release_(self, slots: npt.ArrayLike) -> None:
        """Give slots back."""
        index = np.asarray(slots, np.int64)
        self.owner[index] = FREE
        self.committed[index] = False

    def retire_(self, owners: Iterable[int]) -> None:
        """Give back every row of these owners."""
        self.release_(np.flatnonzero(np.isin(self.owner, list(owners))))

    def relabel_(self, old: int, new: int) -> None:
        """The rows of one owner become another's: 0 bytes moved."""
        self.owner[self.owner == old] = new

    def truncate_(self, owner: int, length: int) -> None:
        """Drop the owner's rows at positions >= length."""
        self.release_(np.flatnonzero((self.owner == owner) & (self.position >= length)))

    def rows_of(self, owner: int) -> Ints:
        """The owner's committed slots in the order of their positions."""
        slots = np.flatnonzero((self.owner == owner) & self.committed)
        return slots[np.argsort(self.position[slots], kind="stable")].astype(np.int32)

    def copy_(self, source: npt.ArrayLike, target: npt.ArrayLike, cause: str) -> None:
        """Move rows, with their labels, into other slots of the pool; counted by the ledger."""
        source_R, target_R = np.asarray(source, np.int64), np.asarray(target, np.int64)
        device = self.data.device
        rows = self.data.index_select(3, torch.from_numpy(source_R).to(device))
        self.data.index_copy_(3, torch.from_numpy(target_R).to(device), rows)
        labels = self.owner[source_R], self.position[source_R], self.committed[source_R]
        self.release_(source_R)
        self.owner[target_R], self.position[target_R], self.committed[target_R] = labels
        self.ledger.add(cause, source_R.size * self.slot_bytes)

    def compact_(self) -> int:
        """Close the holes that retired branches left: the highest rows move down into them.

        Returns:
            The number of rows moved.
        """
        length = self.current_length
        holes = np.flatnonzero(self.owner[:length] == FREE)
        high = np.flatnonzero(self.owner[length:] != FREE) + length
        if holes.size:
            self.copy_(high, holes, "compact")
        return int(holes.size)

    def table(self, extent: int) -> SlotTable:
        """The first `extent` entries as tensors on the pool's device (copies of a few KB)."""
        device = self.data.device
        return SlotTable(
            torch.tensor(self.owner[:extent], device=device),
            torch.tensor(self.position[:extent], dtype=torch.int64, device=device),
            torch.tensor(self.committed[:extent], device=device),
        )

    def write_(self, layer: int, slots_Q: Tensor, keys_hQd: Tensor, values_hQd: Tensor) -> None:
        """Store K and V [kv_heads, Q, head_dim] of one layer at flat slots [Q]."""
        self.data[layer, 0].index_copy_(1, slots_Q, keys_hQd)
        self.data[layer, 1].index_copy_(1, slots_Q, values_hQd)

    def get_valid(self, layer: int, extent: int) -> tuple[Tensor, Tensor]:
        """Views (K, V), each [1, kv_heads, extent, head_dim], of one layer's first slots."""
        return self.data[layer, 0, None, :, :extent], self.data[layer, 1, None, :, :extent]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the table is consistent."""
        used = self.owner != FREE
        assert not self.committed[~used].any(), "a free slot is committed"
        rows = np.stack([self.owner, self.position])[:, used & self.committed]
        assert np.unique(rows, axis=1).shape[1] == rows.shape[1], "a position is held twice"
        for owner in np.unique(self.owner[used & self.committed]):
            held = np.sort(self.position[(self.owner == owner) & self.committed])
            assert held[-1] - held[0] + 1 == held.size, f"owner {owner} has a gap in its positions"
