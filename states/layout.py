"""From branches to the rows of a forward and back: what both layouts have in common.

A layout says in which rows of the pools an owner lies. Everything else follows: under ``bim`` all
lie in row 0, one after another; under ``batching`` each branch has a row of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.align import AlignmentManager, AlignmentState, ContinuousDecodingState
from ..ops.frame import Frame
from ..ops.kv import NOBODY, PADDING, Ints, KVCache
from ..ops.tree import ancestors
from ..ops.types import DraftRows, Proposal, Rows, no_trees


@dataclass(frozen=True, slots=True)
class Span:
    """Prefill rows of one owner, in reading order.

    draws: whether the last row's logits draw a root token; bound: under a grammar.
    """

    owner: int
    prefix: int
    position: int
    tokens: Sequence[int]
    draws: bool = False
    bound: bool = False

    @property
    def positions(self) -> list[int]:
        return list(range(self.position, self.position + len(self.tokens)))


@dataclass(frozen=True, slots=True)
class Trees:
    """The active branches as roots of token trees: host ints, in the proposal's order."""

    roots: Sequence[int]
    positions: Sequence[int]
    owners: Sequence[int]
    prefixes: Sequence[int]
    bound: tuple[int, ...]
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that the drafter has yet to take in.

    The row at `position + i` takes `tokens[i]` and, of drafters that want any, `features[i]` [F];
    how they are paired is the drafter's own (see `picked.py`).
    """

    owner: int
    prefix: int
    position: int
    tokens: Sequence[int]
    features: Tensor | None


@dataclass(frozen=True, slots=True)
class Laid:
    """Where a span lies: flat row indices (of one copy), and the slots of all its copies [C, n]."""

    rows: Ints
    slots_Cn: Ints


@dataclass(frozen=True, slots=True)
class Placed:
    """The rows of a forward and where they went: flat indices and slots, each [S, T], of the trees.

    padding: how many of the rows stand for nothing.
    """

    rows: Rows
    tree_rows: Ints
    tree_slots: Ints
    spans: tuple[Laid, ...]
    padding: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one owner in one row of the pool."""

    row: int
    owner: int
    prefix: int
    tokens: Sequence[int]
    positions: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.tokens)


class Page:
    """Pieces of a forward laid side by side, right-aligned in B tensor rows of Q queries.

    Attributes:
        first_row, height, queries: of the tensors; tensor row b is the pool's `first_row + b`.
        flat, slots: flat row indices and pool slots of each piece, in the given order.
        aligned: the padding in front of each tensor row; `padding` is the sum of it.
    """

    def __init__(self, kv: KVCache, pieces: Sequence[Piece]) -> None:
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
        self.padding = sum(self.aligned.padding_lengths)
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


class Layout:
    """How branches lie in tensors; `rows_of` says where, the two kinds differ in it."""

    packed: bool

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def rows_of(self, owner: int) -> Sequence[int]:
        """The rows of the pools that hold, or are to hold, what this owner has."""
        raise NotImplementedError

    def open_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """Find a place for a request's prefix."""
        raise NotImplementedError

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> None:
        """Find a place for a branch where it sees its prefix."""
        raise NotImplementedError

    def leave_(self, owners: Iterable[int]) -> None:
        """Owners that have nothing in the pools any more."""
        raise NotImplementedError

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """No branch waits any more to start behind this prefix."""
        raise NotImplementedError

    def place_(self, kv: KVCache, trees: Trees | None, spans: Sequence[Span]) -> Placed:
        """Take slots for all rows of a forward and lay the rows out, trees first."""
        pieces = [*self._tree_pieces(trees), *(p for span in spans for p in self._pieces(span))]
        page = Page(kv, pieces)
        count = len(trees.owners) if trees else 0
        laid, at = [], count
        for span in spans:
            copies = len(self.rows_of(span.owner))
            laid.append(Laid(page.flat[at], np.stack(page.slots[at : at + copies])))
            at += copies
        rows = self._rows(kv, page, trees, spans, laid)
        empty = np.zeros((0, 1), np.int32)
        slots_ST = np.stack(page.slots[:count]) if count else empty
        rows_ST = np.stack(page.flat[:count]) if count else empty
        return Placed(rows, rows_ST, slots_ST, tuple(laid), page.padding)

    def _tree_pieces(self, trees: Trees | None) -> Iterator[Piece]:
        if trees is not None:
            size = trees.proposal.tokens_SN.shape[1] + 1
            for owner, prefix in zip(trees.owners, trees.prefixes, strict=True):
                # where its nodes stand is on the device; the pool is told when they are committed
                yield Piece(self.rows_of(owner)[0], owner, prefix, [0] * size, [0] * size)

    def _pieces(self, part: Span | Segment) -> Iterator[Piece]:
        """One piece for each row that has to hold these tokens: several for a prefix's copies."""
        first = part.position
        positions = list(range(first, first + len(part.tokens)))
        for row in self.rows_of(part.owner):
            yield Piece(row, part.owner, part.prefix, part.tokens, positions)

    def _rows(
        self,
        kv: KVCache,
        page: Page,
        trees: Trees | None,
        spans: Sequence[Span],
        laid: Sequence[Laid],
    ) -> Rows:
        tips = [part.rows[-1] for span, part in zip(spans, laid, strict=True) if span.draws]
        bound = [i for i, span in enumerate(s for s in spans if s.draws) if span.bound]
        rows = self._chains(kv, page, tips)
        if trees is None:
            return replace(rows, bound_tips=tuple(bound))
        proposal, count = trees.proposal, len(trees.owners)
        nodes_ST = self._ids(np.concatenate([*page.flat[:count], np.zeros(0, np.int32)]))
        nodes_ST = nodes_ST.view(count, -1)
        root_S1 = self._ids(trees.roots)[:, None]
        tokens_ST = torch.cat([root_S1, proposal.tokens_SN], dim=1)
        depths_ST = torch.cat([torch.zeros_like(root_S1), proposal.depths_SN], dim=1)
        positions_ST = self._ids(trees.positions)[:, None] + depths_ST
        rows.tokens_BQ.view(-1)[nodes_ST] = tokens_ST
        rows.positions_BQ.view(-1)[nodes_ST] = positions_ST
        return replace(
            rows,
            nodes_ST=nodes_ST,
            ancestors_STT=ancestors(proposal.parents_SN, proposal.levels),
            bound_trees=trees.bound,
            bound_tips=tuple(bound),
            alignment=self.alignment(page, trees, spans, rows.positions_BQ),
        )

    def alignment(
        self, page: Page, trees: Trees, spans: Sequence[Span], positions_BQ: Tensor
    ) -> AlignmentState | ContinuousDecodingState | None:
        """How the rows of a forward with trees are padded; None if nothing ever is."""
        return None

    def _chains(self, kv: KVCache, page: Page, tips: Sequence[int]) -> Rows:
        """All rows of a page, those of trees without their tokens."""
        pieces = page.pieces
        return Rows(
            page.fill(0, (p.tokens for p in pieces)).to(self.device),
            page.fill(0, (p.positions for p in pieces)).to(self.device),
            page.fill(kv.scratch, page.slots).to(self.device),
            page.fill(PADDING, (p.owner for p in pieces)).to(self.device, torch.int32),
            page.fill(NOBODY, (p.prefix for p in pieces)).to(self.device, torch.int32),
            *no_trees(self.device),
            self._ids(tips),
            first_row=page.first_row,
        )

    def place_draft_(
        self,
        kv: KVCache,
        segments: Sequence[Segment],
        active: Sequence[tuple[int, int, int, int]],
    ) -> DraftRows:
        """The drafter's rows: all segments one after another; they stay, so they are committed.

        Args:
            active: (owner, prefix owner, root position, root token) of each active branch.
        """
        copies = [(piece, s.features) for s in segments if s.tokens for piece in self._pieces(s)]
        page = Page(kv, [piece for piece, _ in copies])
        last: dict[int, int] = {}
        for piece, slots, flat in zip(page.pieces, page.slots, page.flat, strict=True):
            kv.commit_(slots, piece.positions)
            last[piece.owner] = int(flat[-1])
        order = sorted(range(len(copies)), key=lambda i: int(page.flat[i][0]))
        active_S4 = self._ids(active).view(-1, 4)
        features = [f for i in order if (f := copies[i][1]) is not None]
        rows = self._chains(kv, page, [last[one[0]] for one in active])
        return DraftRows(
            replace(rows, alignment=None if self.packed else page.aligned),
            torch.cat(features) if features else None,
            self._ids(np.concatenate([page.flat[i] for i in order])),
            active_S4[:, 0].int(),
            active_S4[:, 1].int(),
            active_S4[:, 2],
            active_S4[:, 3],
            Frame.of(tuple(self.rows_of(one[0])[0] for one in active), self.packed, self.device),
        )

    def _ids(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64), device=self.device)
