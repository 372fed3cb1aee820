"""Cached document chunks in the rows of a forward (CacheBlend), and which rows were recomputed.

What is reused depends on a prompt alone: `min_tokens` and the budget `per_branch` count the rows of
one owner, and each copy of a prefix counts by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..ops.blend import Blend, BlendReport, BlendRows, ChunkKV, Ints, RowRole, join
from ..ops.layer_plan import BlendSettings
from .round import BlendSummary, PlacedRows, Span
from .text.tokens import Chunk


class Library(Protocol):
    def find(self, chunk: Chunk) -> ChunkKV | None:
        """K, V and features of these ids, not to be written to; None if they must be computed."""


@dataclass(slots=True)
class Reused:
    """Positions of an owner's rows that came from cached chunks, and which were recomputed."""

    cached: set[int] = field(default_factory=set)
    picked: set[int] = field(default_factory=set)


class BlendState:
    """How a run's prefills use cached chunks; reused: by owner, which of its rows did."""

    def __init__(self, settings: BlendSettings, library: Library) -> None:
        self.settings = settings
        self.library = library
        self.reused: dict[int, Reused] = {}

    def rows(self, spans: Sequence[Span], placed: PlacedRows) -> Blend | None:
        """The cached rows of a forward, if any; every copy of a span counts as a branch."""
        cached_chunks = [self._cached(span) for span in spans]
        if not any(cached_chunks):
            return None
        shape = tuple(placed.rows.tokens_BQ.shape)
        role_BQ = np.full(shape, RowRole.SUFFIX, np.int32)
        prompt_BQ, branch_BQ, chunk_BQ = (np.full(shape, -1, np.int32) for _ in range(3))
        for row, padding in enumerate(placed.paddings):
            role_BQ[row, :padding] = RowRole.PADDING
        branch = 0
        cached = dict[int, ChunkKV]()
        for span, slots, chunks in zip(spans, placed.spans, cached_chunks, strict=True):
            for flat in slots.flat_Cn:
                prompt_BQ.reshape(-1)[flat] = span.request
                branch_BQ.reshape(-1)[flat] = branch
                branch += 1
                for number, (chunk, kv) in enumerate(chunks):
                    part = flat[chunk.at : chunk.at + len(chunk.ids)]
                    role = RowRole.PROTECTED if chunk.is_exact else RowRole.REUSED
                    role_BQ.reshape(-1)[part] = role
                    chunk_BQ.reshape(-1)[part] = number
                    cached[int(part[0])] = kv
        rows = BlendRows(role_BQ, prompt_BQ, branch_BQ, chunk_BQ)
        return Blend.of(rows, join([cached[first] for first in sorted(cached)]), self.settings)

    def _cached(self, span: Span) -> list[tuple[Chunk, ChunkKV]]:
        """The chunks of a span that are cached, if there are enough of them."""
        if self._too_few(span.chunks):
            return []
        pairs = [(chunk, chunk.kept or self.library.find(chunk)) for chunk in span.chunks]
        cached = [(chunk, kv) for chunk, kv in pairs if kv is not None]
        return [] if self._too_few([chunk for chunk, _ in cached]) else cached

    def _too_few(self, chunks: Sequence[Chunk]) -> bool:
        rows = sum(len(chunk.ids) for chunk in chunks)
        return self.settings.kind_for(rows) == "plain"

    def mark_(
        self,
        report: BlendReport,
        spans: Sequence[Span],
        placed: PlacedRows,
        *,
        blend: Blend,
        picked_P: npt.NDArray[np.int64] | None,
    ) -> BlendSummary:
        """Note for every owner which of its rows were cached and which of these recomputed."""
        is_cached_M = (blend.rows.role_BQ == RowRole.REUSED).reshape(-1)
        is_picked_M = np.zeros_like(is_cached_M)
        is_picked_M[[] if picked_P is None else picked_P] = True
        for span, slots in zip(spans, placed.spans, strict=True):
            first = span.position
            cached, picked = (
                np.flatnonzero(mask_M[slots.rows]) + first for mask_M in (is_cached_M, is_picked_M)
            )
            if cached.size:
                mark = self.reused.setdefault(span.owner, Reused())
                mark.cached.update(cached.tolist())
                mark.picked.update(picked.tolist())
        return BlendSummary(
            plan=tuple(int(status) for status in report.plan),
            live=report.live_L,
            picked=tuple(len(row_P) for row_P in report.picked.values()),
            reused=report.reused,
            protected=report.protected,
            suffix=report.suffix,
            parts=tuple(_parts(blend.rows.role_BQ, blend.rows.branch_BQ)),
        )

    def forget_(self, owners: Iterable[int]) -> None:
        for owner in owners:
            self.reused.pop(owner, None)


def _parts(role_BQ: Ints, branch_BQ: Ints) -> Iterator[tuple[int, int]]:
    is_cached_BQ = np.isin(role_BQ, (RowRole.PROTECTED, RowRole.REUSED))
    for branch in np.unique(branch_BQ[is_cached_BQ]):
        own_BQ = branch_BQ == branch
        cached = int((own_BQ & is_cached_BQ).sum())
        yield cached, int(own_BQ.sum()) - cached
