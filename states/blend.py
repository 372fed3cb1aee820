"""Cached chunks in the prompts of a forward: documents (CacheBlend) and finished parts.

What is reused depends on a prompt alone: `min_tokens` and the budget `per_branch` count the rows of
one owner, and each copy of a prefix counts by itself.

Finished parts are folded into one context, after which a last branch combines them. When a part
ends, its rows are copied out with the rotation of their keys undone; in the fold they are cached
chunks like documents. The first part continues the prefix exactly."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.blend import Blend, BlendReport, BlendRows, ChunkKV, Ints, RowRole, join
from ..ops.kv.pool import KVCache
from ..ops.layer_plan import BlendSettings
from .drafter import committed_features
from .request import Branch, Request
from .round import Batch, BlendSummary, CommittedRows, Ids, PlacedRows, Span
from .text.prompts import PromptBook
from .text.tokens import Chunk, PromptTokens

BeforeRope = Callable[[Tensor, Tensor], Tensor]  # keys [L, R, g, d] and positions [R]
NEW = -1  # a row of the fold without a cached row


@dataclass(slots=True)
class Reused:
    """Positions of an owner's rows that came from cached chunks, and which were recomputed."""

    cached: set[int] = field(default_factory=set)
    picked: set[int] = field(default_factory=set)


class BlendState:
    """How a run's prefills use cached chunks; reused: by owner, which of its rows did. library: a
    `ChunkLibrary`, whose `find` returns a chunk's `ChunkKV`, or None if it must be computed."""

    def __init__(self, settings: BlendSettings, library: Any) -> None:
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
        return self.settings.kind_for(sum(len(chunk.ids) for chunk in chunks)) == "plain"

    def mark_(self, report: BlendReport, batch: Batch, picked_P: Ids | None) -> BlendSummary:
        """Note for every owner which of its rows were cached and which of these recomputed."""
        blend = batch.rows.blend
        assert blend is not None, "the report is of a blended forward"
        is_cached_M = (blend.rows.role_BQ == RowRole.REUSED).reshape(-1)
        is_picked_M = np.zeros_like(is_cached_M)
        is_picked_M[[] if picked_P is None else picked_P] = True
        for span, slots in zip(batch.spans, batch.placed.spans, strict=True):
            row_Q = slots.flat_Cn[0]
            cached = np.flatnonzero(is_cached_M[row_Q]) + span.position
            if cached.size:
                picked = np.flatnonzero(is_picked_M[row_Q]) + span.position
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


@dataclass(frozen=True, slots=True, eq=False)
class FinishedPart:
    """A part's rows, `prompt` of them of its prompt, `lead` right after the prefix."""

    ids: tuple[int, ...]
    prompt: int
    lead: int
    rows: ChunkKV


class FoldState:
    """Finished parts by owner; before_rope undoes the rotation of keys, None computes all rows."""

    def __init__(self, prompts: PromptBook, before_rope: BeforeRope | None = None) -> None:
        self.prompts = prompts
        self.before_rope = before_rope
        self.parts: dict[int, FinishedPart] = {}
        self.features: dict[int, list[Tensor]] = {}  # [R, F] of a part's rows, by forward

    def remember_(self, branch: Branch, rows: CommittedRows) -> None:
        """Keep the features of committed rows of a part that is copied out when it ends."""
        if self.before_rope is not None and branch.point is not None:
            features_RF = committed_features(rows)
            if features_RF is not None:
                self.features.setdefault(branch.owner, []).append(features_RF)

    def forget_(self, request: Request) -> None:
        for branch in request.branches:
            self.parts.pop(branch.owner, None)
            self.features.pop(branch.owner, None)

    def keep_(self, branch: Branch, kv: KVCache, slots: Ints) -> None:
        """Copy out the rows of a part that ended, without documents and quotes in its prompt."""
        if self.before_rope is None or not branch.ends_part:
            return
        size = len(branch.prompt)
        # Whether the last token has a row depends on its draft, so it is computed anew.
        answer = max(min(branch.num_cached_tokens, len(branch.tokens) - 1), 0)
        head, tail = common_ends(self._own_prompt(branch).ids, branch.prompt.ids)
        index = [*range(head), *range(size - tail, size + answer)]
        data = kv.take_out(slots[index], "fold")
        where_R = torch.tensor(index, device=data.device)
        keys_LRgd = data[:, 0].transpose(1, 2)
        features = self.features.pop(branch.owner, [])
        rows = ChunkKV(
            self.before_rope(keys_LRgd, branch.start + where_R),
            data[:, 1].transpose(1, 2),
            torch.cat(features)[where_R] if features else None,
        )
        ids = [*branch.prompt, *branch.tokens]
        lead = len(index) if head + tail == size else head
        part_ids = tuple(ids[i] for i in index)
        self.parts[branch.owner] = FinishedPart(part_ids, len(index) - answer, lead, rows)

    def prompt(self, request: Request) -> PromptTokens | None:
        """The parts in reading order, then the request for one answer; None for fewer than two."""
        parts = request.parts
        if len(parts) < 2 or request.outline is None:
            return None
        prompt = self._part(parts[0], self._own_prompt(parts[0]), is_first=True)
        for branch in parts[1:]:
            assert branch.point is not None
            before, part_prompt = self.prompts.next_part(branch.point, request.outline)
            prompt += before + self._part(branch, part_prompt, is_first=False)
        return prompt + self.prompts.combine()

    def _own_prompt(self, branch: Branch) -> PromptTokens:
        assert branch.point is not None and branch.request.outline is not None
        return self.prompts.branch(branch.point, branch.request.outline, ())[1]

    def _part(self, branch: Branch, prompt: PromptTokens, *, is_first: bool) -> PromptTokens:
        ids = (*prompt, *branch.tokens)
        if (part := self.parts.get(branch.owner)) is None:
            return PromptTokens(ids)
        head, tail = common_ends(prompt.ids, part.ids[: part.prompt])
        source = [*range(head), *[NEW] * (len(prompt) - head - tail)]
        source += [*range(part.prompt - tail, len(part.ids))]
        name = f"part {branch.index + 1}"
        kept = part.rows
        chunks = []
        for at, first, count in runs(source, part.lead):
            is_exact = is_first and at == first == 0 < part.lead
            here = slice(first, first + count)
            features_RF = None if kept.features_RF is None else kept.features_RF[here]
            rows = ChunkKV(kept.keys_LRgd[:, here], kept.values_LRgd[:, here], features_RF)
            chunks.append(Chunk(at, ids[at : at + count], name, kept=rows, is_exact=is_exact))
        return PromptTokens(ids, tuple(chunks))


def common_ends(first: Sequence[int], second: Sequence[int]) -> tuple[int, int]:
    """Lengths of the common prefix of two texts and of their common suffix after it."""
    most = min(len(first), len(second))
    head = next((i for i in range(most) if first[i] != second[i]), most)
    most -= head
    tail = next((i for i in range(most) if first[-1 - i] != second[-1 - i]), most)
    return head, tail


def runs(source: Sequence[int], cut: int) -> Iterator[tuple[int, int, int]]:
    """Index, value and length of each run of numbers; NEW is in none, `cut` starts a run."""
    starts = [
        at
        for at, value in enumerate(source)
        if not at or value == cut or NEW in (source[at - 1], value) or value != source[at - 1] + 1
    ]
    for at, end in pairwise([*starts, len(source)]):
        if source[at] != NEW:
            yield at, source[at], end - at
