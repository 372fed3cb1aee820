"""What attention is told by: groups of query rows, each with the slots that it may see.

A group costs what its own slots cost, whoever else is in the forward. Under ``bim`` the rows of a
request are a group, under ``paged`` those of a branch, under ``batching`` those of a row of the
pool. A cascade has a group for every part of the pool that the same rows see.

Further shape letters: G sequences of a group, q query rows of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kv.slots import SlotRun


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """G sequences of q query rows, and the K slots that each may see.

    rows_Gq: int64, flat indices (b * Q + q) of the query rows; a sequence that is shorter than
        others repeats its last row. None: all rows of the forward, in their order.
    keys: the slots, a run for each sequence, or int64 [G, K] where they lie apart.
    mask_GqK: bool, True where a row may attend to a slot.
    positions_GK: int64, RoPE position of each slot; only read by sliding windows and by
        CacheBlend's mask `bottom_right`.
    host_rows_Gq: the rows, on the host.
    """

    rows_Gq: Tensor | None
    keys: SlotRun | Tensor
    mask_GqK: Tensor
    positions_GK: Tensor
    host_rows_Gq: npt.NDArray[np.int64]

    def of_rows(self, value_N: Tensor) -> Tensor:
        """A value of every row of the forward -> [G, q]."""
        shape = self.mask_GqK.shape[:2]
        return (value_N if self.rows_Gq is None else value_N[self.rows_Gq]).view(shape)

    def some(self, first: int, last: int) -> "AttentionGroup":
        """Its sequences from number `first` to before `last`; their rows are given."""
        part = slice(first, last)
        keys = self.keys
        if isinstance(keys, SlotRun):
            keys = replace(keys, first=keys.first + first * keys.stride, runs=last - first)
        else:
            keys = keys[part]
        host_Gq = self.host_rows_Gq[part]
        mask_GqK = self.mask_GqK[part]
        rows_Gq = tensor(host_Gq, mask_GqK.device)
        return AttentionGroup(rows_Gq, keys, mask_GqK, self.positions_GK[part], host_Gq)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Everything that attention needs to know of one forward. Each row is in one group at most;
    padding may be in none.

    merged: rows may be in several groups, each with other slots; what they see there is put
        together by the log-sum-exps of its scores.
    """

    groups: tuple[AttentionGroup, ...]
    merged: bool = False

    @classmethod
    def dense(
        cls, mask_BQK: Tensor, positions_BK: Tensor, first: int = 0, stride: int = 0
    ) -> "AttentionMetadata":
        """One group of all rows: tensor row b sees the K slots from `first + b * stride` on."""
        keys = SlotRun(first, mask_BQK.shape[-1], stride, len(mask_BQK))
        positions_GK = positions_BK.expand(len(mask_BQK), -1)
        rows_BQ = np.arange(mask_BQK[..., 0].numel()).reshape(mask_BQK.shape[:2])
        return cls((AttentionGroup(None, keys, mask_BQK, positions_GK, rows_BQ),))

    @classmethod
    def causal(cls, rows: int, device: torch.device | str = "cpu") -> "AttentionMetadata":
        """Rows of one sequence in the first slots of a pool; each sees those up to itself."""
        steps_1Q = torch.arange(rows, device=device)[None]
        return cls.dense(steps_1Q[:, :, None] >= steps_1Q[:, None], steps_1Q)

    def parts(self, rows: int, most: int) -> list[tuple[Tensor | None, "AttentionMetadata"]]:
        """A forward of many rows cut into several of about `most` rows, none of which sees another:
        their flat indices (None for all) and what each of them may see. A cascade stays whole."""
        if rows <= most or self.merged:
            return [(None, self)]
        pieces = []
        for group in self.groups:
            sequences, queries = group.host_rows_Gq.shape
            step = max(1, most // queries)
            cuts = range(0, sequences, step)
            pieces += [group.some(cut, min(cut + step, sequences)) for cut in cuts]
        parts: list[list[AttentionGroup]] = [[]]
        for piece in pieces:
            if parts[-1] and sum(g.host_rows_Gq.size for g in (*parts[-1], piece)) > most:
                parts.append([])
            parts[-1].append(piece)
        return [_alone(part) for part in parts]


def _alone(groups: Sequence[AttentionGroup]) -> tuple[Tensor, AttentionMetadata]:
    """These groups as a forward of their own, their rows one after another."""
    rows_M = torch.cat([group.rows_Gq.flatten() for group in groups if group.rows_Gq is not None])
    first = 0
    moved = []
    for group in groups:
        shape = group.host_rows_Gq.shape
        last = first + group.host_rows_Gq.size
        host_Gq = np.arange(first, last).reshape(shape)
        rows_Gq = None if len(groups) == 1 else tensor(host_Gq, rows_M.device)
        moved.append(replace(group, rows_Gq=rows_Gq, host_rows_Gq=host_Gq))
        first = last
    return rows_M, AttentionMetadata(tuple(moved))


def tensor(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """An array on a device; integers as int64."""
    is_bool = values.dtype == np.bool_
    wide = np.ascontiguousarray(values) if is_bool else values.astype(np.int64, order="C")
    return torch.from_numpy(wide).to(device)
