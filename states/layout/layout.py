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

from ...ops.kv.align import AlignmentState, ContinuousDecodingState
from ...ops.kv.frame import Frame
from ...ops.kv.pool import NOBODY, PADDING, Ints, KVCache
from ...ops.types import DraftRows, Rows, no_trees
from ..text.prompt_tokens import Chunk
from .queries import PackedQueries, QueryRun
from .tree_rows import PlacedRows, SpanSlots, Trees, grow, place_rows, tree_pieces


@dataclass(frozen=True, slots=True)
class Span:
    """Prefill rows of one owner, in reading order.

    draws: whether the last row's logits draw a root token; bound: under a grammar.
    chunks: of documents, in `tokens`.
    """

    owner: int
    prefix: int
    position: int
    tokens: Sequence[int]
    draws: bool = False
    bound: bool = False
    chunks: tuple[Chunk, ...] = ()

    @property
    def positions(self) -> list[int]:
        return list(range(self.position, self.position + len(self.tokens)))


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

    def place_(self, kv: KVCache, trees: Trees | None, spans: Sequence[Span]) -> PlacedRows:
        """Take slots for all rows of a forward and lay the rows out, trees first."""
        of_trees = [] if trees is None else self._tree_pieces(trees)
        page = PackedQueries(kv, [*of_trees, *(p for span in spans for p in self._pieces(span))])
        count = len(of_trees)
        laid, at = [], count
        for span in spans:
            copies = len(self.rows_of(span.owner))
            slots, places = page.slots[at : at + copies], page.flat[at : at + copies]
            laid.append(SpanSlots(page.flat[at], np.stack(slots), np.stack(places)))
            at += copies
        flat, slots = page.flat[:count], page.slots[:count]
        rows = self._rows(kv, page, trees, flat, spans, laid)
        shared = trees is not None and trees.proposal.shared is not None
        return place_rows(rows, flat, slots, tuple(laid), page.paddings, shared)

    def _shared(self, trees: Trees) -> int | None:
        """How many rows the drafted nodes of all trees lie in together, if they do."""
        return trees.proposal.shared if self.packed else None

    def _tree_pieces(self, trees: Trees) -> list[QueryRun]:
        return list(tree_pieces(trees, lambda owner: self.rows_of(owner)[0], self._shared(trees)))

    def _pieces(self, part: Span | Segment) -> Iterator[QueryRun]:
        """One piece for each row that has to hold these tokens: several for a prefix's copies."""
        first = part.position
        positions = list(range(first, first + len(part.tokens)))
        for row in self.rows_of(part.owner):
            yield QueryRun(row, part.owner, part.prefix, part.tokens, positions)

    def _rows(
        self,
        kv: KVCache,
        page: PackedQueries,
        trees: Trees | None,
        flat: Sequence[Ints],
        spans: Sequence[Span],
        laid: Sequence[SpanSlots],
    ) -> Rows:
        tips = [part.rows[-1] for span, part in zip(spans, laid, strict=True) if span.draws]
        bound = [i for i, span in enumerate(s for s in spans if s.draws) if span.bound]
        rows = self._chains(kv, page, tips)
        if trees is None:
            return replace(rows, bound_tips=tuple(bound))
        rows = grow(rows, trees, flat, self._shared(trees))
        return replace(
            rows,
            bound_tips=tuple(bound),
            alignment=self.alignment(page, trees, spans, rows.positions_BQ),
        )

    def alignment(
        self, page: PackedQueries, trees: Trees, spans: Sequence[Span], positions_BQ: Tensor
    ) -> AlignmentState | ContinuousDecodingState | None:
        """How the rows of a forward with trees are padded; None if nothing ever is."""
        return None

    def _chains(self, kv: KVCache, page: PackedQueries, tips: Sequence[int]) -> Rows:
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
        page = PackedQueries(kv, [piece for piece, _ in copies])
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
