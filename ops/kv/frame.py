"""Between [S, ...], by branch, and [B, Q, ...], as a drafter's forward takes it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """Where active branches lie in the tensors of a drafter's forward.

    rows_S: the pool's row of each branch (host ints). With `packed`, all share row 0 and follow
    one another there (``bim``); else each has a tensor row of its own, which is pool row
    `first_row + b`; rows in between may be empty (``batching``). index_S: int64, the tensor row of
    each branch; built once per round, for every forward in it.
    """

    rows_S: tuple[int, ...]
    packed: bool
    index_S: Tensor

    @classmethod
    def of(cls, rows_S: tuple[int, ...], packed: bool, device: torch.device) -> "Frame":
        """The frame of branches in these rows of the pool."""
        first = 0 if packed else min(rows_S, default=0)
        index_S = torch.tensor([row - first for row in rows_S], dtype=torch.int64, device=device)
        return cls(rows_S, packed, index_S)

    @property
    def first_row(self) -> int:
        return 0 if self.packed else min(self.rows_S, default=0)

    @property
    def height(self) -> int:
        """B, tensor rows of a forward."""
        return 1 if self.packed else max(self.rows_S, default=0) - self.first_row + 1

    def flat(self) -> Tensor:
        """int64 [S], flat indices of forwards with one row per branch."""
        if self.packed:
            return torch.arange(len(self.rows_S), device=self.index_S.device)
        return self.index_S

    def spread(self, value_SK: Tensor, empty: float = 0) -> Tensor:
        """[S, K, ...] -> [B, Q, ...]; rows without a branch hold `empty`."""
        if self.packed:
            return value_SK.flatten(0, 1)[None]
        if self.height == len(self.rows_S) and list(self.rows_S) == sorted(self.rows_S):
            return value_SK
        out = value_SK.new_full((self.height, *value_SK.shape[1:]), empty)
        return out.index_copy_(0, self.index_S, value_SK)

    def collect(self, value_BQ: Tensor) -> Tensor:
        """[B, Q, ...] -> [S, K, ...]: the inverse of `spread`."""
        if self.packed:
            return value_BQ.view(len(self.rows_S), -1, *value_BQ.shape[2:])
        return value_BQ.index_select(0, self.index_S)
