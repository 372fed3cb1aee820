"""Between [S, ...], by branch, and [B, Q, ...], as a drafter's forward takes it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """Where active branches lie in the tensors of a drafter's forward.

    rows_S: the pool's row of each branch (host ints). With `packed`, all share row 0 and follow
    one another there (``bim``); else each has a tensor row of its own, which is pool row
    `first_row + b`; rows in between may be empty (``batching``).
    """

    rows_S: tuple[int, ...]
    packed: bool

    @property
    def first_row(self) -> int:
        return 0 if self.packed else min(self.rows_S, default=0)

    @property
    def height(self) -> int:
        """B, tensor rows of a forward."""
        return 1 if self.packed else max(self.rows_S, default=0) - self.first_row + 1

    def table_rows(self, device: torch.device) -> Tensor:
        """int64 [S], the tensor row of each branch."""
        return torch.tensor([row - self.first_row for row in self.rows_S], device=device)

    def flat(self, width: int, device: torch.device) -> Tensor:
        """int64 [S, K], flat indices (b * Q + q) of each branch's `width` rows."""
        if self.packed:
            return torch.arange(len(self.rows_S) * width, device=device).view(-1, width)
        return self.table_rows(device)[:, None] * width + torch.arange(width, device=device)

    def spread(self, value_SK: Tensor, empty: float = 0) -> Tensor:
        """[S, K, ...] -> [B, Q, ...]; rows without a branch hold `empty`."""
        if self.packed:
            return value_SK.flatten(0, 1)[None]
        if self.height == len(self.rows_S) and list(self.rows_S) == sorted(self.rows_S):
            return value_SK
        out = value_SK.new_full((self.height, *value_SK.shape[1:]), empty)
        return out.index_copy_(0, self.table_rows(value_SK.device), value_SK)

    def collect(self, value_BQ: Tensor) -> Tensor:
        """[B, Q, ...] -> [S, K, ...]: the inverse of `spread`."""
        if self.packed:
            return value_BQ.view(len(self.rows_S), -1, *value_BQ.shape[2:])
        return value_BQ.index_select(0, self.table_rows(value_BQ.device))
