"""Between [S, ...], by branch, and [B, Q, ...], as a drafter's forward takes it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """Where active branches lie in the tensors of a drafter's forward.

    rows_S: the pool's row of each branch (host ints). With `packed`, all share row 0 and follow
    one another there (``bim``); else each has a tensor row of its own, and rows in between may be
    empty (``batching``). place_S: int64 on the host, the flat index of each branch in a forward
    with one row per branch; index_S: the same; built once per round, for every forward in it.
    """

    rows_S: tuple[int, ...]
    packed: bool
    place_S: npt.NDArray[np.int64]
    index_S: Tensor

    @classmethod
    def of(cls, rows_S: tuple[int, ...], packed: bool, device: torch.device) -> "Frame":
        """The frame of branches in these rows of the pool."""
        first_row = min(rows_S, default=0)
        place_S = np.arange(len(rows_S)) if packed else np.array(rows_S, np.int64) - first_row
        return cls(rows_S, packed, place_S, torch.from_numpy(place_S).to(device))

    @property
    def places(self) -> int:
        """Rows of a forward with one row per branch, empty ones included."""
        return int(self.place_S.max(initial=0)) + 1

    def spread(self, value_SK: Tensor, empty: float = 0) -> Tensor:
        """[S, K, ...] -> [B, Q, ...]; rows without a branch hold `empty`."""
        if self.packed:
            return value_SK.flatten(0, 1)[None]
        if np.array_equal(self.place_S, np.arange(self.places)):
            return value_SK
        out = value_SK.new_full((self.places, *value_SK.shape[1:]), empty)
        return out.index_copy_(0, self.index_S, value_SK)

    def collect(self, value_BQ: Tensor) -> Tensor:
        """[B, Q, ...] -> [S, K, ...]: the inverse of `spread`."""
        if self.packed:
            return value_BQ.view(len(self.rows_S), -1, *value_BQ.shape[2:])
        return value_BQ.index_select(0, self.index_S)
