"""What attention needs to know of a forward: its sequences, what their rows see, and the masks.

A row sees a committed slot, or that of a prompt row of the same forward, if the slot's segment is
on the path from the row's segment to the root and its position is not behind the row's. Nodes of
trees are visible to their descendants alone. Shape letters: G sequences of a batch, q query rows of
each, P kinds of rows, E rows of trees in a batch, M fresh slots of a branch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kv.pool import Bools, Ints, SlotTable


@dataclass(frozen=True, slots=True)
class SlotRun:
    """`runs` runs of `length` adjacent slots each; run g begins at slot `first + g * stride`."""

    first: int
    length: int
    stride: int = 0
    runs: int = 1

    @property
    def slots_GK(self) -> Ints:
        """int32 [runs, length]."""
        starts_G: Ints = self.first + self.stride * np.arange(self.runs, dtype=np.int32)
        steps_K: Ints = np.arange(self.length, dtype=np.int32)
        return starts_G[:, None] + steps_K


def tensor(values: npt.ArrayLike, device: torch.device) -> Tensor:
    """An array on a device; integers as int64."""
    array = np.asarray(values)
    is_bool = array.dtype == np.bool_
    wide = np.ascontiguousarray(array) if is_bool else array.astype(np.int64, order="C")
    return torch.from_numpy(wide).to(device)


def row_index(rows_Gq: npt.NDArray[np.int64], rows: int, device: torch.device) -> Tensor | None:
    """Row numbers on a device; None if they are all `rows` of a forward, in their order."""
    rows_N = rows_Gq.reshape(-1)
    if rows_N.size == rows and (rows_N == np.arange(rows)).all():
        return None
    return tensor(rows_Gq, device)


class QuerySequence(NamedTuple):
    """Query rows (int64, flat, increasing) that may see the same homes of the pool's `row`, or all
    of it; `owners`: the segments that they see here, where they see others in other sequences."""

    rows: npt.NDArray[np.int64]
    row: int
    homes: tuple[int, ...]
    owners: tuple[int, ...] = ()


class Visibility(NamedTuple):
    """The segments of a forward's rows (int32), and what each sees: path_SA, int32, the ids from
    itself to its root, then those outside its path, then NO_SEGMENT; homes_S, of all, own first."""

    ids_S: Ints
    path_SA: Ints
    homes_S: tuple[tuple[int, ...], ...]

    def sees(self, segment_P: Ints, owner_PK: Ints) -> Bools:
        """bool [P, K]: whether segments, by number (padding: the one after the last) see owners."""
        nothing_1A = np.full((1, self.path_SA.shape[1]), -9, np.int32)  # never a slot's owner
        path_PA = np.concatenate([self.path_SA, nothing_1A])[segment_P]
        visible_PK: Bools = owner_PK == path_PA[:, :1]
        for above in range(1, path_PA.shape[1]):  # paths are short: faster than one comparison
            visible_PK |= owner_PK == path_PA[:, above : above + 1]
        return visible_PK


class AttentionBatch(NamedTuple):
    """G sequences that are computed side by side, of q query rows and K slots each: int64 flat
    indices, where shorter sequences repeat their last row; a run each, or increasing int32 [G,
    K]; int32, all slots; and which of them exist for the sequence (None for all)."""

    rows_Gq: npt.NDArray[np.int64]
    keys: SlotRun | Ints
    slots_GK: Ints
    valid_GK: Bools | None = None

    def places(self, slots_EX: Ints, sequence_E: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """int64 [E, X]: the index of each slot among the K slots of its sequence."""
        if isinstance(self.keys, SlotRun):
            return slots_EX - (self.keys.first + self.keys.stride * sequence_E)[:, None]
        count, length = self.keys.shape
        offset = int(self.keys.max(initial=0)) + int(slots_EX.max(initial=0)) + 1
        sorted_X = (self.keys + offset * np.arange(count)[:, None]).reshape(-1)
        index_EX = np.searchsorted(sorted_X, slots_EX + offset * sequence_E[:, None])
        places_EX: npt.NDArray[np.int64] = index_EX - length * sequence_E[:, None]
        return places_EX

    def holds(self, slots_E: Ints, sequence_E: npt.NDArray[np.int64]) -> Bools:
        """bool [E]: whether a slot exists for its sequence."""
        if self.valid_GK is None:
            return np.ones(len(slots_E), np.bool_)
        place_E = self.places(slots_E[:, None], sequence_E)[:, 0]
        inside_E = (place_E >= 0) & (place_E < self.slots_GK.shape[1])
        index = sequence_E, np.where(inside_E, place_E, 0)
        holds_E: Bools = inside_E & (self.slots_GK[index] == slots_E) & self.valid_GK[index]
        return holds_E


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """A batch with its mask.

    rows_Gq, host_rows_Gq: int64, flat indices (b * Q + q) of the query rows, on the device (None:
        all rows of the forward, in their order) and on the host.
    keys: a run for each sequence, or int64 [G, K]. positions_GK: int64, of the slots.
    fresh_GqM: int64, index among the K slots of each of a row's `AttentionMetadata.fresh_SM`."""

    rows_Gq: Tensor | None
    keys: SlotRun | Tensor
    mask_GqK: Tensor
    positions_GK: Tensor
    host_rows_Gq: npt.NDArray[np.int64]
    fresh_GqM: Tensor | None = None

    def of_rows(self, value_N: Tensor) -> Tensor:
        """A value of every row of the forward, [N, ...] -> [G, q, ...]."""
        shape = *self.mask_GqK.shape[:2], *value_N.shape[1:]
        return (value_N if self.rows_Gq is None else value_N[self.rows_Gq]).view(shape)

    def cut(self, first: int, count: int) -> "AttentionGroup":
        """Up to `count` of its sequences, from number `first` on; their rows on the host only."""
        part = slice(first, first + count)
        host_Gq = self.host_rows_Gq[part]
        mask_GqK = self.mask_GqK[part]
        keys = self.keys
        if isinstance(keys, SlotRun):
            keys = replace(keys, first=keys.first + first * keys.stride, runs=len(host_Gq))
        else:
            keys = keys[part]
        return AttentionGroup(None, keys, mask_GqK, self.positions_GK[part], host_rows_Gq=host_Gq)

    def widened(
        self, seen_SWM: Tensor, position_SM: Tensor, first_S: npt.NDArray[np.int64], rows: int
    ) -> "AttentionGroup":
        """The group of W fresh rows of each of its rows, which are branches: bool, what each sees
        of fresh slots; int64, their positions, and each branch's first of the forward's `rows`."""
        width, fresh = seen_SWM.shape[1:]
        mask_GqWK = self.mask_GqK[:, :, None].expand(-1, -1, width, -1)
        mask_GqWK = mask_GqWK.clone(memory_format=torch.contiguous_format)  # faster than `repeat`
        if self.fresh_GqM is not None:
            fresh_GqM = self.fresh_GqM[:, :, :fresh]
            place_GqWM = fresh_GqM[:, :, None].expand(-1, -1, width, -1)
            mask_GqWK.scatter_(3, place_GqWM, self.of_rows(seen_SWM))
            position_GX = self.of_rows(position_SM).flatten(1)
            self.positions_GK.scatter_(1, fresh_GqM.flatten(1), position_GX)
        host_GqW = first_S[self.host_rows_Gq][..., None] + np.arange(width)
        host_Gq = host_GqW.reshape(len(host_GqW), -1)
        rows_Gq = row_index(host_Gq, rows, self.mask_GqK.device)
        mask_GqK = mask_GqWK.flatten(1, 2)
        return AttentionGroup(rows_Gq, self.keys, mask_GqK, self.positions_GK, host_rows_Gq=host_Gq)


class TreeMask(NamedTuple):
    """Token trees of a forward: int32 on the host, flat index and slot of each node; bool, the
    nodes (columns) that each sees; int64, their positions; whether nodes without a row have
    their root's. segment_R: if trees share the R first rows (S is 1, T is R), int64, the number
    of each row's segment, which only the device knows."""

    rows_ST: Ints
    slots_ST: Ints
    visible_STT: Tensor
    positions_ST: Tensor
    roots_shared: bool = False
    segment_R: Tensor | None = None

    def mark_(
        self, batch: AttentionBatch, mask_GqK: Tensor, positions_GK: Tensor, rows: int
    ) -> None:
        """Write what the nodes see of each other into a batch's mask, and the slots' positions."""
        device = mask_GqK.device
        if self.segment_R is not None:
            place_R = tensor(batch.places(self.slots_ST, np.zeros(1, np.int64))[0], device)
            mask_GqK[0, : self.slots_ST.size, place_R] = self.visible_STT[0]
            positions_GK[0, place_R] = self.positions_ST[0]
            return
        node_N = np.full(rows, -1, np.int64)
        number_ST = np.arange(self.rows_ST.size).reshape(self.rows_ST.shape)
        node_N[self.rows_ST] = number_ST
        node_N[self.rows_ST[:, 0]] = number_ST[:, 0]  # nodes without a row have their root's
        node_Gq = node_N[batch.rows_Gq]
        sequence_E, query_E = np.nonzero(node_Gq >= 0)
        if not sequence_E.size:
            return
        tree_E, node_E = np.divmod(node_Gq[sequence_E, query_E], self.rows_ST.shape[1])
        place_ET = batch.places(self.slots_ST[tree_E], sequence_E)
        index_EX = np.column_stack((sequence_E, query_E, tree_E, node_E, place_ET))
        here_E = batch.holds(self.slots_ST[tree_E, 0], sequence_E)
        index = tensor(index_EX[here_E], device)
        sequence_E1 = index[:, :1]
        tree = index[:, 2]
        place = index[:, 4:]
        seen_ET = self.visible_STT[tree, index[:, 3]]
        if self.roots_shared:  # all nodes see the root
            at_root_ST = self.slots_ST == self.slots_ST[:, :1]
            seen_ET = seen_ET | tensor(at_root_ST[tree_E[here_E]], device)
        mask_GqK[sequence_E1, index[:, 1:2], place] = seen_ET
        positions_GK[sequence_E1, place] = self.positions_ST[tree]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One forward, as backends get it.

    sequences: its query rows, each in one sequence; padding may be in none.
    visibility, segment_N: the segments of the rows, and int32 on the host, the number of each row's
        (the number after the last one for padding). positions_N: int64 on the device.
    readable: bool [slots], the slots that are history: committed ones and those of prompt rows.
    tree: the token trees; None if all their slots are history.
    fresh_SM: slots of rows in a drafter's forwards to come, for each row, which is a branch.
    equal_lengths: whether sequences of different lengths must be in different batches."""

    kv: SlotTable
    sequences: tuple[QuerySequence, ...]
    visibility: Visibility
    segment_N: Ints
    positions_N: Tensor
    readable: Bools
    tree: TreeMask | None = None
    fresh_SM: Ints | None = None
    equal_lengths: bool = False

    @property
    def isolated(self) -> int:
        """How many first sequences must each be a batch: the one of trees with shared rows."""
        return int(self.tree is not None and self.tree.segment_R is not None)

    def slot_lists(self) -> tuple[Ints, Ints]:
        """kv_indptr [sequences + 1] and kv_indices, int32: the slots in use that rows of sequence i
        may see are those from kv_indptr[i] to before kv_indptr[i + 1]."""
        kv = self.kv
        lists = []
        for sequence in self.sequences:
            first = sequence.row * kv.capacity
            part = slice(first, first + kv.capacity)
            labels = kv.owner if sequence.owners else kv.home
            seen = sequence.owners or sequence.homes or np.unique(labels[part])
            is_seen = np.isin(labels[part], seen)
            lists.append(first + np.flatnonzero(is_seen & (kv.owner[part] >= 0)))
        indptr = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        return indptr, np.concatenate([np.zeros(0, np.int64), *lists]).astype(np.int32)

    def history(self, batch: AttentionBatch, segment_Gq: Ints) -> tuple[Bools, Ints]:
        """bool [P, K]: what each kind of row of these segments (by number) sees of the readable
        slots; int32 [G, q], the kind of each row."""
        count = len(self.visibility.ids_S) + 1
        pairs_Gq = np.arange(len(segment_Gq))[:, None] * count + segment_Gq
        if (pairs_Gq == pairs_Gq[:1, :1]).all():  # one kind, the usual case
            pairs_P = pairs_Gq[0, :1]
            index_Gq = np.zeros(pairs_Gq.shape, np.int32)
        else:
            kinds: dict[int, int] = {}  # for some tens of rows faster than `np.unique`
            index = [kinds.setdefault(pair, len(kinds)) for pair in pairs_Gq.ravel().tolist()]
            pairs_P = np.array([*kinds])
            index_Gq = np.array(index, np.int32).reshape(pairs_Gq.shape)
        sequence_P, segment_P = np.divmod(pairs_P, count)
        slots_PK = batch.slots_GK[sequence_P]
        visible_PK = self.visibility.sees(segment_P, self.kv.owner[slots_PK])
        visible_PK &= self.readable[slots_PK]
        if batch.valid_GK is not None:
            visible_PK &= batch.valid_GK[sequence_P]
        return visible_PK, index_Gq

    def group(self, batch: AttentionBatch) -> AttentionGroup:
        """The batch with its dense mask."""
        device = self.positions_N.device
        tree = self.tree
        rows = len(self.positions_N)
        segment_Gq = self.segment_N[batch.rows_Gq]
        index_Gq = None
        if tree is not None and tree.segment_R is not None:
            if batch.rows_Gq[0, 0] == 0:  # a row may be of any segment
                number_1S = np.arange(len(self.visibility.ids_S) + 1, dtype=np.int32)[None]
                visible_PK, _ = self.history(batch, number_1S)
                index_Gq = tensor(segment_Gq, device)
                index_Gq[0, : len(tree.segment_R)] = tree.segment_R
            else:
                tree = None
        if index_Gq is None:
            visible_PK, kind_Gq = self.history(batch, segment_Gq)
            if len(visible_PK) > 1:
                index_Gq = tensor(kind_Gq, device)
        visible = tensor(visible_PK, device)
        positions_GK = tensor(self.kv.position[batch.slots_GK], device)
        rows_Gq = row_index(batch.rows_Gq, rows, device)
        positions_Gq = self.positions_N if rows_Gq is None else self.positions_N[rows_Gq]
        positions_Gq = positions_Gq.view(segment_Gq.shape)
        mask_GqK = positions_GK[:, None] <= positions_Gq[..., None]
        mask_GqK &= visible if index_Gq is None else visible[index_Gq]
        if tree is not None:
            tree.mark_(batch, mask_GqK, positions_GK, rows)
        fresh_GqM = None
        if self.fresh_SM is not None:
            sequence_X = np.repeat(np.arange(len(batch.rows_Gq)), batch.rows_Gq.shape[1])
            slots_XM = self.fresh_SM[batch.rows_Gq.reshape(-1)]
            if slots_XM.size and batch.holds(slots_XM[:, 0], sequence_X).all():
                place_XM = batch.places(slots_XM, sequence_X)
                fresh_GqM = tensor(place_XM.reshape(*batch.rows_Gq.shape, -1), device)
        keys = batch.keys if isinstance(batch.keys, SlotRun) else tensor(batch.keys, device)
        return AttentionGroup(
            rows_Gq, keys, mask_GqK, positions_GK, host_rows_Gq=batch.rows_Gq, fresh_GqM=fresh_GqM
        )
