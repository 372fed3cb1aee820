"""From rows that see the same part of a pool to groups: where their slots lie, who is beside whom.

Groups of one shape whose slots lie at equal distances, or in the same place, are computed side by
side; so are those whose slots are listed, by a table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kv.pool import KVCache
from ..kv.slots import Ints, SlotRun
from .metadata import AttentionGroup, tensor

Keys = tuple[int, int] | Ints
"""A run of slots (the first one, how many), or a list of slots."""

PADDED = -9  # what no slot is ever owned by
# side by side if it costs at most so many times more, or entries
WASTE = 1.25
SPARE = 4096


class Member(NamedTuple):
    """Query rows of a forward that may see the same part of a pool.

    rows: int64, their flat indices, increasing. row: the pool's row that they attend to; homes:
    those of the segments that they belong to, empty if they may see all of the row. owners: the
    segments that they see here, where they see others elsewhere.
    """

    rows: npt.NDArray[np.int64]
    row: int
    homes: tuple[int, ...]
    owners: tuple[int, ...] = ()


class Stack(NamedTuple):
    """Members side by side: a group before it has its mask. slots_GK: int32.

    keys: a run for each, or int32 [G, K], the slots of each in increasing order, the last of them
        again behind a list that is shorter than others.
    held_GK: bool, which of the slots are there to be seen at all; None for all.
    """

    rows_Gq: npt.NDArray[np.int64]
    keys: SlotRun | Ints
    slots_GK: Ints
    held_GK: npt.NDArray[np.bool_] | None = None

    def rows_on(self, device: torch.device, rows: int) -> Tensor | None:
        """Its rows on a device; None if they are all `rows` of a forward, in their order."""
        rows_N = self.rows_Gq.reshape(-1)
        is_whole = rows_N.size == rows and bool((rows_N == np.arange(rows)).all())
        return None if is_whole else tensor(self.rows_Gq, device)

    def places(self, slots_EX: Ints, sequence_E: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [E, X]: which of the K slots of its sequence each slot is."""
        if isinstance(self.keys, SlotRun):
            first_E = self.keys.first + self.keys.stride * sequence_E
            return slots_EX - first_E[:, None]
        count, length = self.keys.shape
        apart = int(self.keys.max(initial=0)) + int(slots_EX.max(initial=0)) + 1
        all_X = (self.keys + apart * np.arange(count)[:, None]).reshape(-1)
        found_EX = np.searchsorted(all_X, slots_EX + apart * sequence_E[:, None])
        places_EX: npt.NDArray[np.int64] = found_EX - length * sequence_E[:, None]
        return places_EX

    def holds(self, slots_E: Ints, sequence_E: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """bool [E]: whether a slot is there to be seen in its sequence."""
        if self.held_GK is None:
            return np.ones(len(slots_E), np.bool_)
        place_E = self.places(slots_E[:, None], sequence_E)[:, 0]
        inside_E = (place_E >= 0) & (place_E < self.slots_GK.shape[1])
        at_E = np.where(inside_E, place_E, 0)
        same_E = self.slots_GK[sequence_E, at_E] == slots_E
        found_E: npt.NDArray[np.bool_] = inside_E & same_E & self.held_GK[sequence_E, at_E]
        return found_E


def stacks(
    kv: KVCache, members: Sequence[Member], backend: str, even: bool = False, alone: int = 0
) -> list[Stack]:
    """Members as groups.

    Args:
        backend: `dense` attends to the whole pool (a row of it), others to what members may see.
        even: whether only members with the same number of rows lie side by side.
        alone: so many of the first members have nobody beside them.
    """
    members = [member for member in members if len(member.rows)]
    keys = _keys(kv, members)
    if backend == "dense" and members:
        members, keys = _dense(kv, members)
    # a row of the pool that holds nothing has rows of padding only, which nobody computes
    there = [i for i in range(alone, len(members)) if _extent(keys[i])[1]]
    groups: list[_Group] = []
    for i in sorted(there, key=lambda i: _place(members[i], keys[i])):
        first, length = _extent(keys[i])
        queries = len(members[i].rows)
        if not (groups and groups[-1].take(i, first, queries, length, kv.slots, even)):
            groups.append(_Group(i, first, queries, length))
    together = [*([i] for i in range(min(alone, len(members)))), *(one.members for one in groups)]
    return [_stack(kv, members, keys, one) for one in together]


def _extent(keys: Keys) -> tuple[int | None, int]:
    """The first slot of a run, None of a list; how many slots."""
    return (None, len(keys)) if isinstance(keys, np.ndarray) else keys


def _place(member: Member, keys: Keys) -> tuple[int, int, int]:
    """Lists by how much is to be computed, then runs by where they begin."""
    first, length = _extent(keys)
    return (0, len(member.rows), length) if first is None else (1, first, 0)


class _Group:
    """Members that are computed side by side; runs in the order of their first slots.

    first: of the first member's run, None of a list of slots.
    """

    def __init__(self, member: int, first: int | None, queries: int, length: int) -> None:
        self.members = [member]
        self.queries = queries
        self.length = length
        self.own = queries * length
        self.last = first
        self.stride = 0

    def take(
        self, member: int, first: int | None, queries: int, length: int, slots: int, even: bool
    ) -> bool:
        """Take a member in if its slots lie at the same distance as those before (or are a list, as
        theirs), and if it costs little more than to compute it by itself."""
        count = len(self.members) + 1
        stride = 0
        most_q = max(self.queries, queries)
        most_k = max(self.length, length)
        own = self.own + queries * length
        if first is not None and self.last is not None:
            stride = first - self.last
            if (count > 2 and stride != self.stride) or first + most_k > slots:
                return False
        elif first is not self.last:
            return False
        costly = count * most_q * most_k > WASTE * own + SPARE
        if costly or (even and queries != self.queries):
            return False
        self.members.append(member)
        self.queries = most_q
        self.length = most_k
        self.own = own
        self.last = first
        self.stride = stride
        return True


def _keys(kv: KVCache, members: Sequence[Member]) -> list[Keys]:
    extents = [] if all(one.homes or one.owners for one in members) else kv.extents()
    return [_keys_of(kv, one, extents) for one in members]


def _keys_of(kv: KVCache, member: Member, extents: Sequence[int]) -> Keys:
    if member.owners:
        return kv.keys_of_segments(member.owners)
    if member.homes:
        return kv.keys_of(member.homes)
    return member.row * kv.capacity, extents[member.row]


def reads(kv: KVCache, members: Sequence[Member]) -> list[int]:
    """Slots that are read for each member by itself."""
    return [_extent(one)[1] for one in _keys(kv, members)]


def _dense(kv: KVCache, members: Sequence[Member]) -> tuple[Sequence[Member], list[Keys]]:
    """The whole pool for all; of several rows as much of each as of the fullest."""
    extents = kv.extents()
    if kv.rows == 1:
        rows = np.sort(np.concatenate([member.rows for member in members]))
        return [Member(rows, 0, ())], [(0, extents[0])]
    most = max(extents[member.row] for member in members)
    return members, [(member.row * kv.capacity, most) for member in members]


def _stack(
    kv: KVCache, members: Sequence[Member], keys: Sequence[Keys], group: Sequence[int]
) -> Stack:
    rows = [members[i].rows for i in group]
    rows_Gq = np.empty((len(rows), max(map(len, rows))), np.int64)
    for own_q, one in zip(rows_Gq, rows, strict=True):
        own_q[: len(one)] = one
        own_q[len(one) :] = one[-1]
    own = [keys[i] for i in group]
    lists = [one for one in own if isinstance(one, np.ndarray)]
    if lists:
        return _table(kv, rows_Gq, [members[i].owners for i in group], lists)
    first = int(own[0][0])
    length = max(int(one[1]) for one in own)
    stride = int(own[1][0]) - first if len(group) > 1 else 0
    run = SlotRun(first, length, stride, len(group))
    slots_GK = run.slots_GK
    held_GK = _held(kv, slots_GK, [members[i].owners for i in group])
    return Stack(rows_Gq, run, slots_GK, held_GK)


def _table(
    kv: KVCache,
    rows_Gq: npt.NDArray[np.int64],
    owners: Sequence[tuple[int, ...]],
    lists: Sequence[Ints],
) -> Stack:
    keys_GK = np.empty((len(lists), max(map(len, lists))), np.int32)
    for own_K, one in zip(keys_GK, lists, strict=True):
        own_K[: len(one)] = one
        own_K[len(one) :] = one[-1]
    held_GK = _held(kv, keys_GK, owners)
    lengths_G = np.array([len(one) for one in lists])
    if (lengths_G < keys_GK.shape[1]).any():
        real_GK = np.arange(keys_GK.shape[1]) < lengths_G[:, None]
        held_GK = real_GK if held_GK is None else held_GK & real_GK
    return Stack(rows_Gq, keys_GK, keys_GK, held_GK)


def _held(
    kv: KVCache, slots_GK: Ints, owners: Sequence[tuple[int, ...]]
) -> npt.NDArray[np.bool_] | None:
    """Which slots belong to the segments that each sequence sees, if that is not all."""
    if not owners[0]:
        return None
    return np.stack(
        [np.isin(kv.owner[one_K], own) for one_K, own in zip(slots_GK, owners, strict=True)]
    )


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
        visible_PK: npt.NDArray[np.bool_] = owner_PK == path_PA[:, :1]
        for above in range(1, path_PA.shape[1]):  # a few: comparing them all at once takes longer
            visible_PK |= owner_PK == path_PA[:, above : above + 1]
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
    pairs_Gq = sequence_G1 * count + segment_Gq
    if (pairs_Gq == pairs_Gq[:1, :1]).all():  # one kind, the usual one
        pairs_P = pairs_Gq[0, :1]
        index_Gq = np.zeros(pairs_Gq.shape, np.int32)
    else:
        pairs_P, index = np.unique(pairs_Gq, return_inverse=True)
        index_Gq = index.reshape(pairs_Gq.shape).astype(np.int32)
    sequence_P, segment_P = np.divmod(pairs_P, count)
    slots_PK = stack.slots_GK[sequence_P]
    visible_PK = lineages.visible(segment_P, kv.owner[slots_PK])
    visible_PK &= readable[slots_PK]
    if stack.held_GK is not None:
        visible_PK &= stack.held_GK[sequence_P]
    return visible_PK, index_Gq


def group_of(
    stack: Stack, rows_Gq: Tensor | None, mask_GqK: Tensor, positions_GK: Tensor
) -> AttentionGroup:
    """A stack with its mask; rows_Gq as `Stack.rows_on` gives them."""
    keys = stack.keys if isinstance(stack.keys, SlotRun) else tensor(stack.keys, mask_GqK.device)
    return AttentionGroup(rows_Gq, keys, mask_GqK, positions_GK, stack.rows_Gq)
