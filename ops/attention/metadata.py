"""What attention is told by: groups of query rows, each with the slots that it may see.

A group costs what its own slots cost, whoever else is in the forward. Under ``bim`` the rows of a
request are a group, under ``batching`` those of a row of the pool; groups of one shape whose slots
lie at equal distances are computed side by side.

Further shape letters: G sequences of a group, q query rows of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kv.pool import KVCache
from ..kv.slots import Ints, SlotRun

Keys = tuple[int, int] | Ints
"""A run of slots (the first one, how many), or a list of slots."""

PADDED = -9  # what no slot is ever owned by
WASTE, SPARE = 1.25, 4096  # side by side if it costs at most so many times more, or entries


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """G sequences of q query rows, and the K slots that each may see.

    rows_Gq: int64, flat indices (b * Q + q) of the query rows; a sequence that is shorter than
        others repeats its last row. None: all rows of the forward, in their order.
    keys: the slots, a run for each sequence, or int64 [K] where G is 1 and they lie apart.
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
        keys, part = self.keys, slice(first, last)
        if isinstance(keys, SlotRun):
            keys = replace(keys, first=keys.first + first * keys.stride, runs=last - first)
        host_Gq, mask_GqK = self.host_rows_Gq[part], self.mask_GqK[part]
        rows_Gq = tensor(host_Gq, mask_GqK.device)
        return AttentionGroup(rows_Gq, keys, mask_GqK, self.positions_GK[part], host_Gq)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Everything that attention needs to know of one forward. Each row is in one group at most;
    padding may be in none."""

    groups: tuple[AttentionGroup, ...]

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
        their flat indices (None for all) and what each of them may see."""
        if rows <= most:
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
    first, moved = 0, []
    for group in groups:
        shape, last = group.host_rows_Gq.shape, first + group.host_rows_Gq.size
        host_Gq = np.arange(first, last).reshape(shape)
        rows_Gq = None if len(groups) == 1 else tensor(host_Gq, rows_M.device)
        moved.append(replace(group, rows_Gq=rows_Gq, host_rows_Gq=host_Gq))
        first = last
    return rows_M, AttentionMetadata(tuple(moved))


class Member(NamedTuple):
    """Query rows of a forward that may see the same part of a pool.

    rows: int64, their flat indices, increasing. row: the pool's row that they attend to; homes:
    those of the segments that they belong to, empty if they may see all of the row.
    """

    rows: npt.NDArray[np.int64]
    row: int
    homes: tuple[int, ...]


class Stack(NamedTuple):
    """Members side by side: a group before it has its mask. slots_GK: int32."""

    rows_Gq: npt.NDArray[np.int64]
    keys: SlotRun | Ints
    slots_GK: Ints

    def places(self, slots_EX: Ints, sequence_E: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [E, X]: which of the K slots of its sequence each slot is."""
        if isinstance(self.keys, SlotRun):
            first_E = self.keys.first + self.keys.stride * sequence_E
            return slots_EX - first_E[:, None]
        return np.searchsorted(self.keys, slots_EX)


def stacks(
    kv: KVCache, members: Sequence[Member], backend: str, even: bool = False, alone: int = 0
) -> list[Stack]:
    """Members as groups.

    Args:
        backend: `dense` attends to the whole pool (a row of it), `grouped` to what members may see,
            `auto` is `grouped`.
        even: whether only members with the same number of rows lie side by side.
        alone: so many of the first members have nobody beside them.
    """
    members = [member for member in members if len(member.rows)]
    keys = _keys(kv, members)
    if backend == "dense" and members:
        members, keys = _dense(kv, members)
    apart = [i for i, one in enumerate(keys) if i < alone or isinstance(one, np.ndarray)]
    # a row of the pool that holds nothing has rows of padding only, which nobody computes
    runs = sorted((int(one[0]), i) for i, one in enumerate(keys) if i not in apart and one[1])
    groups: list[_Group] = []
    for first, i in runs:
        queries, length = len(members[i].rows), int(keys[i][1])
        if not (groups and groups[-1].take(i, first, queries, length, kv.slots, even)):
            groups.append(_Group(i, first, queries, length))
    together = [*([i] for i in apart), *(group.members for group in groups)]
    return [_stack(members, keys, one) for one in together]


class _Group:
    """Members that are computed side by side, in the order of their first slots."""

    def __init__(self, member: int, first: int, queries: int, length: int) -> None:
        self.members = [member]
        self.queries, self.length, self.own = queries, length, queries * length
        self.last, self.stride = first, 0

    def take(
        self, member: int, first: int, queries: int, length: int, slots: int, even: bool
    ) -> bool:
        """Take a member in if its slots lie at the same distance as those before, and if it costs
        little more than to compute it by itself."""
        count, stride = len(self.members) + 1, first - self.last
        most_q, most_k = max(self.queries, queries), max(self.length, length)
        own = self.own + queries * length
        apart = stride <= 0 or (count > 2 and stride != self.stride)
        costly = count * most_q * most_k > WASTE * own + SPARE
        if apart or costly or (even and queries != self.queries) or first + most_k > slots:
            return False
        self.members.append(member)
        self.queries, self.length, self.own = most_q, most_k, own
        self.last, self.stride = first, stride
        return True


def _keys(kv: KVCache, members: Sequence[Member]) -> list[Keys]:
    extents = [] if all(one.homes for one in members) else kv.extents()
    return [
        kv.keys_of(one.homes) if one.homes else (one.row * kv.capacity, extents[one.row])
        for one in members
    ]


def _dense(kv: KVCache, members: Sequence[Member]) -> tuple[Sequence[Member], list[Keys]]:
    """The whole pool for all; of several rows as much of each as of the fullest."""
    extents = kv.extents()
    if kv.rows == 1:
        rows = np.sort(np.concatenate([member.rows for member in members]))
        return [Member(rows, 0, ())], [(0, extents[0])]
    most = max(extents[member.row] for member in members)
    return members, [(member.row * kv.capacity, most) for member in members]


def _stack(members: Sequence[Member], keys: Sequence[Keys], group: Sequence[int]) -> Stack:
    rows = [members[i].rows for i in group]
    rows_Gq = np.empty((len(rows), max(map(len, rows))), np.int64)
    for own_q, one in zip(rows_Gq, rows, strict=True):
        own_q[: len(one)], own_q[len(one) :] = one, one[-1]
    first = keys[group[0]]
    if isinstance(first, np.ndarray):
        return Stack(rows_Gq, first, first[None])
    length = max(int(keys[i][1]) for i in group)
    stride = int(keys[group[1]][0]) - first[0] if len(group) > 1 else 0
    run = SlotRun(first[0], length, stride, len(group))
    return Stack(rows_Gq, run, run.slots_GK)


class Lineages(NamedTuple):
    """The segments that rows of a forward belong to, and what each of them may see.

    ids_S: int32, ids of the segments. path_SA: int32, the ids on the way from each segment to its
    root, its own first, then those that it reads beside its way, NOBODY behind the last one.
    homes_S: the homes of all that each may see, its own first.
    """

    ids_S: Ints
    path_SA: Ints
    homes_S: tuple[tuple[int, ...], ...]

    def visible(self, segment_P: Ints, owner_PK: Ints) -> npt.NDArray[np.bool_]:
        """bool [P, K]: whether a slot's owner is in a segment's lineage (by number; what lies
        behind the last one sees nothing)."""
        nobody = np.full((1, self.path_SA.shape[1]), PADDED, np.int32)
        path_PA = np.concatenate([self.path_SA, nobody])[segment_P]
        visible_PK: npt.NDArray[np.bool_] = (owner_PK[:, :, None] == path_PA[:, None, :]).any(-1)
        return visible_PK


def history(
    kv: KVCache, stack: Stack, lineages: Lineages, segment_Gq: Ints, readable: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], Ints]:
    """What rows see of the slots that are readable, once for every kind of row.

    Args:
        segment_Gq: number of each row's segment in `lineages`; readable: bool [slots].

    Returns:
        visible_PK, and index_Gq: which of its P rows is whose.
    """
    count = len(lineages.ids_S) + 1
    sequence_G1 = np.arange(len(segment_Gq))[:, None]
    pairs_P, index = np.unique(sequence_G1 * count + segment_Gq, return_inverse=True)
    slots_PK = stack.slots_GK[pairs_P // count]
    visible_PK = lineages.visible(pairs_P % count, kv.owner[slots_PK]) & readable[slots_PK]
    return visible_PK, index.reshape(segment_Gq.shape).astype(np.int32)


def tensor(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """An array on a device; integers as int64."""
    wide = values if values.dtype == np.bool_ else values.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(wide)).to(device)


def group_of(stack: Stack, rows: int, mask_GqK: Tensor, positions_GK: Tensor) -> AttentionGroup:
    """A stack with its mask; `rows` of the forward."""
    device = mask_GqK.device
    natural = stack.rows_Gq.size == rows and (np.diff(stack.rows_Gq.reshape(-1)) == 1).all()
    keys = stack.keys if isinstance(stack.keys, SlotRun) else tensor(stack.keys, device)
    rows_Gq = None if natural else tensor(stack.rows_Gq, device)
    return AttentionGroup(rows_Gq, keys, mask_GqK, positions_GK, stack.rows_Gq)
