"""The KV pool of one model: preallocated once, addressed through slots, never reallocated.

Whose a slot is, its table says (`slot_table.py`); here are the bytes.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .pool_memory import zeros
from .slot_table import SlotTable
from .slots import CopyLedger, SlotRun


class KVCache(SlotTable):
    """One pool `data` [layers, 2, kv_heads, slots + 1, head_dim]; the last slot is scratch.

    Attributes:
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
        self._heads = kv_heads
        self._parts = [layer.unbind() for layer in self.data.unbind()]
        self._offsets = [(k.storage_offset(), v.storage_offset()) for k, v in self._parts]
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
        keys, values = self._parts[layer]
        keys.index_copy_(1, slots_Q, keys_hQd)
        values.index_copy_(1, slots_Q, values_hQd)

    def get_valid(self, layer: int, keys: SlotRun | Tensor) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, each [G, kv_heads, K, head_dim]: views of runs of slots, or a copy
        of the slots in an int64 tensor [G, K]."""
        if isinstance(keys, Tensor):
            copy = self.data[layer].index_select(2, keys.reshape(-1))
            size = (2, self._heads, *keys.shape, copy.shape[-1])
            keys_GhKd, values_GhKd = copy.view(size).transpose(1, 2).unbind()
            return keys_GhKd, values_GhKd
        dim = self.data.shape[-1]
        size = (keys.runs, self._heads, keys.length, dim)
        stride = (keys.stride * dim, (self.slots + 1) * dim, dim, 1)
        k, v = self._offsets[layer]
        start = keys.first * dim
        return (
            self.data.as_strided(size, stride, k + start),
            self.data.as_strided(size, stride, v + start),
        )
