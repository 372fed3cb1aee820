"""Fresh rows of a drafter's pool: every branch's own, for one grow_tree, then given back."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention.cascade import plan
from ..attention.metadata import AttentionGroup, AttentionMetadata, tensor
from ..attention.stacks import Member, Stack, group_of, history
from ..kv.pool import KVCache
from ..kv.slots import Ints
from ..types import DraftRows, DraftWork

ROWS = torch.contiguous_format


class _Part(NamedTuple):
    """Branches side by side, as `Stack` has their rows: branch_Gn their numbers, history_GnK what
    they see of committed rows, place_GnM where the fresh rows of each are, if they are here."""

    stack: Stack
    branch_Gn: Tensor
    history_GnK: Tensor
    positions_GK: Tensor
    place_GnM: Tensor | None


class Workspace:
    """Slots of each branch behind its committed rows, and what may be seen from them.

    Attributes:
        slots_SM: int64, flat slots of each branch's M fresh rows.
        spent: the forwards that `fresh` was asked for.
    """

    def __init__(self, kv: KVCache, draft_rows: DraftRows, each: int) -> None:
        self.kv = kv
        self.frame = draft_rows.frame
        self.spent = DraftWork()
        self.device = draft_rows.position_S.device
        branches = len(self.frame.rows_S)
        lineages = draft_rows.rows.lineages
        segment_S = draft_rows.segment_S
        homes_S = [lineages.homes_S[segment] for segment in segment_S]
        rows_S = self.frame.rows_S if kv.rows > 1 else (0,) * branches
        rows = np.repeat(np.asarray(rows_S, np.int32), each)
        owner = np.repeat(lineages.ids_S[segment_S], each)
        # position 0, not committed: only what `fresh` says ever sees them
        self.slots = kv.append_(
            owner, np.zeros(rows.size), rows, np.repeat([homes[0] for homes in homes_S], each)
        )
        slots_SM = self.slots.reshape(branches, each)
        self.slots_SM = tensor(slots_SM, self.device)
        chosen = plan(kv, self._members(homes_S), lineages, segment_S, draft_rows.attention)
        self.parts = [self._part(stack, draft_rows, slots_SM) for stack in chosen.stacks]
        self.merged = chosen.merged

    def _members(self, homes_S: Sequence[tuple[int, ...]]) -> list[Member]:
        """Whose branches (by number) see the same part of the pool: those of a request, or one."""
        if self.kv.rows > 1:
            return [Member(np.array([s]), row, ()) for s, row in enumerate(self.frame.rows_S)]
        parts: dict[tuple[int, ...], list[int]] = {}
        for branch, homes in enumerate(homes_S):
            parts.setdefault(homes, []).append(branch)
        return [Member(np.array(branches), 0, homes) for homes, branches in parts.items()]

    def _part(self, stack: Stack, draft_rows: DraftRows, slots_SM: Ints) -> _Part:
        lineages = draft_rows.rows.lineages
        branch_Gn = stack.rows_Gq
        segment_Gn = draft_rows.segment_S[branch_Gn]
        visible_PK, index_Gn = history(self.kv, stack, lineages, segment_Gn, self.kv.committed)
        before_GnK = (
            self.kv.position[stack.slots_GK][:, None] <= draft_rows.start_S[branch_Gn][..., None]
        )
        sequence_X = np.repeat(np.arange(len(branch_Gn)), branch_Gn.shape[1])
        slots_XM = slots_SM[branch_Gn.reshape(-1)]
        place_GnM = None
        if slots_XM.size and stack.holds(slots_XM[:, 0], sequence_X).all():
            place_XM = stack.places(slots_XM, sequence_X)
            place_GnM = tensor(place_XM.reshape(*branch_Gn.shape, -1), self.device)
        return _Part(
            stack,
            tensor(branch_Gn, self.device),
            tensor(visible_PK[index_Gn] & before_GnK, self.device),
            tensor(self.kv.position[stack.slots_GK], self.device),
            place_GnM,
        )

    def _group(self, part: _Part, seen_SKM: Tensor, position_SM: Tensor) -> AttentionGroup:
        width, fresh = seen_SKM.shape[1:]
        sequences = part.branch_Gn.shape[0]
        # a third of what `repeat` takes
        mask_GnWK = part.history_GnK[:, :, None].expand(-1, -1, width, -1).clone(memory_format=ROWS)
        if part.place_GnM is not None:
            place_GnM = part.place_GnM[:, :, :fresh]
            branch_Gn = part.branch_Gn
            place_GnWM = place_GnM[:, :, None].expand(-1, -1, width, -1)
            mask_GnWK.scatter_(3, place_GnWM, seen_SKM[branch_Gn])
            part.positions_GK.scatter_(1, place_GnM.flatten(1), position_SM[branch_Gn].flatten(1))
        first_Gn = self.frame.place_S[part.stack.rows_Gq] * width
        rows_Gq = (first_Gn[..., None] + np.arange(width)).reshape(sequences, -1)
        stack = part.stack._replace(rows_Gq=rows_Gq)
        rows = stack.rows_on(self.device, self.frame.places * width)
        return group_of(stack, rows, mask_GnWK.flatten(1, 2), part.positions_GK)

    def fresh(
        self, seen_SKM: Tensor, position_SM: Tensor
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """positions_BQ, slots_BQ and attention of the last K of M fresh rows of each branch.

        A row sees its branch's history, and of the M fresh rows those in `seen_SKM` (bool), which
        stand at `position_SM`. Padding is written to the scratch slot.
        """
        fresh = position_SM.shape[1]
        spread = self.frame.spread
        rows = slice(fresh - seen_SKM.shape[1], fresh)
        slots_BQ = spread(self.slots_SM[:, rows], self.kv.scratch)
        padding = slots_BQ.numel() - position_SM.shape[0] * seen_SKM.shape[1]
        self.spent = self.spent.plus(DraftWork(1, slots_BQ.numel(), padding))
        groups = tuple(self._group(part, seen_SKM, position_SM) for part in self.parts)
        seen = AttentionMetadata(groups, self.merged)
        return spread(position_SM[:, rows]), slots_BQ, seen

    def close_(self) -> None:
        """Give the slots back."""
        self.kv.release_(self.slots)
