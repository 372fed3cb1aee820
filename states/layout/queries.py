"""Runs of query rows and how they are laid side by side in the tensor rows of a forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from ...ops.kv.pool import KVCache
from ...ops.kv.slots import Ints
from ...ops.row_layout import AlignmentManager, AlignmentState


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
        flat, slots: int32, flat row indices and pool slots of each run, in the given order.
        index, all_slots: the same of all runs, one after another.
        tokens, positions: of all runs.
        paddings: the padding in front of each tensor row.
    """

    def __init__(self, kv: KVCache, runs: Sequence[QueryRun]) -> None:
        self.runs = runs
        lengths: dict[int, int] = {}
        for run in runs:
            lengths[run.row] = lengths.get(run.row, 0) + run.size
        self.first_row = min(lengths, default=0)
        self.height = max(lengths, default=0) - self.first_row + 1
        self.queries = max(lengths.values(), default=0)
        self.paddings = tuple(
            self.queries - lengths.get(self.first_row + b, 0) for b in range(self.height)
        )
        self.sizes = [run.size for run in runs]
        self.tokens = [token for run in runs for token in run.tokens]
        self.positions = [position for run in runs for position in run.positions]
        self.index, self.all_slots = self._index(), self._append_(kv)
        ends = [0, *accumulate(self.sizes)]
        parts = [slice(*pair) for pair in pairwise(ends)]
        self.flat = [self.index[part] for part in parts]
        self.slots = [self.all_slots[part] for part in parts]

    @property
    def aligned(self) -> AlignmentState:
        """How the rows are padded."""
        return AlignmentManager.align_for_decode([self.queries - n for n in self.paddings])

    def _index(self) -> Ints:
        if self.height == 1:  # one after another, without padding
            return np.arange(self.queries, dtype=np.int32)
        cursor = [b * self.queries + n for b, n in enumerate(self.paddings)]
        flat = list[Ints]()
        for run in self.runs:
            start = cursor[run.row - self.first_row]
            cursor[run.row - self.first_row] += run.size
            flat.append(np.arange(start, start + run.size, dtype=np.int32))
        return joined(flat)

    def _append_(self, kv: KVCache) -> Ints:
        whose_3 = [(run.owner, run.homes[0], run.row) for run in self.runs]
        whose_R3 = np.array(whose_3, np.int32).reshape(-1, 3).repeat(self.sizes, 0)
        owners, homes, rows = whose_R3.T
        return kv.append_(owners, self.positions, rows if kv.rows > 1 else 0, homes)

    def spread(
        self, empty_C: Sequence[int], values_C: Sequence[Sequence[int] | Ints]
    ) -> npt.NDArray[np.int64]:
        """int64 [C, B * Q]: values of all rows, one run after another, and what is in the
        padding."""
        if self.height == 1:  # one after another, without padding
            return np.array(values_C, np.int64)
        out = np.empty((len(empty_C), self.height * self.queries), np.int64)
        for own, empty, values in zip(out, empty_C, values_C, strict=True):
            if len(self.index) < len(own):
                own.fill(empty)
            own[self.index] = values
        return out


def joined(parts: Sequence[Ints]) -> Ints:
    """All of them, one after another; there may be none."""
    return np.concatenate([*parts, np.zeros(0, np.int32)])
