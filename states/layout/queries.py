"""Pieces of a forward and how they are laid side by side in its tensor rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...ops.kv.align import AlignmentManager
from ...ops.kv.pool import Ints, KVCache


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one owner in one row of the pool."""

    row: int
    owner: int
    prefix: int
    tokens: Sequence[int]
    positions: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.tokens)


class PackedQueries:
    """Pieces of a forward laid side by side, right-aligned in B tensor rows of Q queries.

    Attributes:
        first_row, height, queries: of the tensors; tensor row b is the pool's `first_row + b`.
        flat, slots: flat row indices and pool slots of each piece, in the given order.
        aligned: how the rows are padded; `paddings` the padding in front of each tensor row.
    """

    def __init__(self, kv: KVCache, pieces: Sequence[QueryRun]) -> None:
        self.pieces = pieces
        lengths: dict[int, int] = {}
        for piece in pieces:
            lengths[piece.row] = lengths.get(piece.row, 0) + piece.size
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
        found = []
        for piece in self.pieces:
            start = cursor[piece.row - self.first_row]
            cursor[piece.row - self.first_row] += piece.size
            found.append(np.arange(start, start + piece.size, dtype=np.int32))
        return found

    def _append_(self, kv: KVCache) -> list[Ints]:
        sizes = [piece.size for piece in self.pieces]
        owners = np.repeat([piece.owner for piece in self.pieces], sizes)
        positions = [p for piece in self.pieces for p in piece.positions]
        rows = np.repeat([piece.row for piece in self.pieces], sizes).astype(np.int32)
        slots = kv.append_(owners, positions, rows if kv.rows > 1 else 0)
        return np.split(slots, np.cumsum(sizes)[:-1]) if sizes else []

    def fill(self, empty: int, values: Iterable[Sequence[int] | Ints | int]) -> Tensor:
        """int64 [B, Q]: a value or values for each piece, `empty` in the padding."""
        out = np.full(self.height * self.queries, empty, np.int64)
        for flat, value in zip(self.flat, values, strict=True):
            out[flat] = value
        return torch.from_numpy(out.reshape(self.height, self.queries))
