"""Runs of query rows and how they are laid side by side in the tensor rows of a forward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...ops.kv.align import AlignmentManager
from ...ops.kv.pool import KVCache
from ...ops.kv.slots import Ints


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one segment; homes: of all that they may see, its own first."""

    row: int
    owner: int
    homes: tuple[int, ...]
    tokens: Sequence[int]
    positions: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.tokens)


class PackedQueries:
    """Runs of a forward side by side, right-aligned in B tensor rows of Q queries.

    Attributes:
        first_row, height, queries: of the tensors; tensor row b is the pool's `first_row + b`.
        flat, slots: flat row indices and pool slots of each run, in the given order.
        aligned: how the rows are padded; `paddings` the padding in front of each tensor row.
    """

    def __init__(self, kv: KVCache, runs: Sequence[QueryRun]) -> None:
        self.runs = runs
        lengths: dict[int, int] = {}
        for run in runs:
            lengths[run.row] = lengths.get(run.row, 0) + run.size
        self.first_row = min(lengths, default=0)
        self.height = max(lengths, default=0) - self.first_row + 1
        self.queries = max(lengths.values(), default=0)
        self.aligned = AlignmentManager.align_for_decode(
            [lengths.get(self.first_row + b, 0) for b in range(self.height)]
        )
        self.paddings = tuple(self.aligned.padding_lengths)
        self.flat = self._flat()
        self.slots = self._append_(kv)

    def _flat(self) -> list[Ints]:
        cursor = [b * self.queries + n for b, n in enumerate(self.aligned.padding_lengths)]
        flat = []
        for run in self.runs:
            start = cursor[run.row - self.first_row]
            cursor[run.row - self.first_row] += run.size
            flat.append(np.arange(start, start + run.size, dtype=np.int32))
        return flat

    def _append_(self, kv: KVCache) -> list[Ints]:
        sizes = [run.size for run in self.runs]
        owners = np.repeat([run.owner for run in self.runs], sizes)
        homes = np.repeat([run.homes[0] for run in self.runs], sizes)
        positions = [p for run in self.runs for p in run.positions]
        rows = np.repeat([run.row for run in self.runs], sizes).astype(np.int32)
        slots = kv.append_(owners, positions, rows if kv.rows > 1 else 0, homes)
        return np.split(slots, np.cumsum(sizes)[:-1]) if sizes else []

    def spread(self, empty: int, values: Iterable[Sequence[int] | Ints | int]) -> Ints:
        """[B * Q]: a value or values for each run, `empty` in the padding."""
        out = np.full(self.height * self.queries, empty, np.int32)
        for flat, value in zip(self.flat, values, strict=True):
            out[flat] = value
        return out

    def tensor(self, empty: int, values: Iterable[Sequence[int] | Ints | int]) -> Tensor:
        """The same as int64 [B, Q]."""
        out_N = self.spread(empty, values).astype(np.int64)
        return torch.from_numpy(out_N.reshape(self.height, self.queries))


def joined(parts: Sequence[Ints]) -> Ints:
    """All of them, one after another; there may be none."""
    return np.concatenate([*parts, np.zeros(0, np.int32)])
