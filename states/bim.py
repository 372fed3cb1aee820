"""The layout ``bim``: all branches of all requests in one sequence, rows told apart by owner."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..ops.kv import NOBODY, Ints, KVCache
from ..ops.tree import ancestors
from ..ops.types import DraftRows, Proposal, Rows, no_ancestors


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
class Placed:
    """The rows of a forward and where they went: slots of each tree [S, T] and of each span."""

    rows: Rows
    tree_slots: Ints
    span_slots: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that the drafter has yet to take in.

    The row at `position + i` belongs to `tokens[i]` (the token after it) and `features[i]` [F].
    """

    owner: int
    prefix: int
    position: int
    tokens: Sequence[int]
    features: Tensor


class BimLayout:
    """Flattens branches into one sequence (B = 1)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place_(self, kv: KVCache, trees: Trees | None, spans: Sequence[Span]) -> Placed:
        """Take slots for all rows of a forward and lay the rows out, trees first."""
        tokens, positions, owners, prefixes, tree_slots = self._tree_parts_(kv, trees)
        span_slots: list[Ints] = []
        tips: list[int] = []
        bound_tips: list[int] = []
        count = tree_slots.size
        for span in spans:
            size = len(span.tokens)
            span_slots.append(kv.append_([span.owner] * size, span.positions))
            tokens.append(self._ids(span.tokens))
            positions.append(self._ids(span.positions))
            owners += [span.owner] * size
            prefixes += [span.prefix] * size
            count += size
            if span.draws:
                bound_tips += [len(tips)] if span.bound else []
                tips.append(count - 1)
        slots = np.concatenate([tree_slots.reshape(-1), *span_slots]).astype(np.int64)
        rows = Rows(
            torch.cat([self._ids(()), *tokens])[None],
            torch.cat([self._ids(()), *positions])[None],
            torch.tensor(slots, device=self.device)[None],
            torch.tensor(owners, dtype=torch.int32, device=self.device)[None],
            torch.tensor(prefixes, dtype=torch.int32, device=self.device)[None],
            self._ancestors(trees),
            self._ids(tips),
            trees.bound if trees else (),
            tuple(bound_tips),
        )
        return Placed(rows, tree_slots, tuple(span_slots))

    def place_draft_(
        self,
        kv: KVCache,
        segments: Sequence[Segment],
        active: Sequence[tuple[int, int, int]],
    ) -> DraftRows:
        """The drafter's rows: all segments one after another; they stay, so they are committed.

        Args:
            active: (owner, prefix owner, root position) of each active branch.
        """
        spans = [Span(s.owner, s.prefix, s.position, s.tokens) for s in segments if s.tokens]
        placed = self.place_(kv, None, spans)
        last: dict[int, int] = {}
        row = -1
        for span, slots in zip(spans, placed.span_slots, strict=True):
            kv.commit_(slots, span.positions)
            row += len(span.tokens)
            last[span.owner] = row
        rows = placed.rows
        tips_R = self._ids([last[owner] for owner, _, _ in active])
        owner_S3 = torch.tensor(active, dtype=torch.int64, device=self.device).view(-1, 3)
        return DraftRows(
            Rows(
                rows.tokens_BQ,
                rows.positions_BQ,
                rows.slots_BQ,
                rows.owner_BQ,
                rows.prefix_BQ,
                rows.ancestors_STT,
                tips_R,
            ),
            torch.cat([s.features for s in segments if s.tokens]),
            owner_S3[:, 0].int(),
            owner_S3[:, 1].int(),
            owner_S3[:, 2],
        )

    def _tree_parts_(
        self, kv: KVCache, trees: Trees | None
    ) -> tuple[list[Tensor], list[Tensor], list[int], list[int], Ints]:
        """Flat tokens and positions, owners, prefixes and slots [S, T] of the tree rows."""
        if trees is None:
            return [], [], [], [], np.zeros((0, 1), np.int32)
        proposal = trees.proposal
        count = proposal.tokens_SN.shape[1] + 1
        owners = [owner for owner in trees.owners for _ in range(count)]
        prefixes = [prefix for prefix in trees.prefixes for _ in range(count)]
        slots = kv.append_(owners, np.zeros(len(owners)))
        root_S1 = self._ids(trees.roots)[:, None]
        tokens_ST = torch.cat([root_S1, proposal.tokens_SN], dim=1)
        depths_ST = torch.cat([torch.zeros_like(root_S1), proposal.depths_SN], dim=1)
        positions_ST = self._ids(trees.positions)[:, None] + depths_ST
        slots_ST = slots.reshape(len(trees.owners), count)
        return [tokens_ST.view(-1)], [positions_ST.view(-1)], owners, prefixes, slots_ST

    def _ancestors(self, trees: Trees | None) -> Tensor:
        if trees is None:
            return no_ancestors(self.device)
        return ancestors(trees.proposal.parents_SN, trees.proposal.levels)

    def _ids(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


__all__ = ["NOBODY", "BimLayout", "Placed", "Segment", "Span", "Trees"]
