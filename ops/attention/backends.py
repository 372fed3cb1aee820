"""Attention backends: how the rows of a forward attend to the slots of a pool.

To add one, put a subclass of `AttentionBackend` into a file of this package, or into an installed
package with an entry point of the group `specsot.attention`. Grouped-query attention folds the
query groups into the query axis, so that keys and values stay views of the pool."""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kv.pool import Ints, Keys, is_among
from .metadata import AttentionBatch, AttentionGroup, AttentionMetadata, QuerySequence, SlotRun

MAX_WASTE = 1.25  # sequences share a batch if that costs at most this many times more,
MAX_WASTED_ENTRIES = 4096  # or this many entries of the mask
MIN_SLOTS_SAVED = 2000  # slots read less often that make up for merging (docs/memory.md)

Narrow = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What a layer sees of mask_GqK, given positions_Gq of its rows and positions_GK of the slots."""


class LayerGroup(NamedTuple):
    """A group as layers use it. rows_M: int64, flat; None for all. bias_G1qK: added to the scores
    of the folded queries; the dtype's finite minimum where a row does not see a slot."""

    rows_M: Tensor | None
    keys: SlotRun | Tensor
    bias_G1qK: Tensor


class LayerAttention(NamedTuple):
    """A plan for the layers of one kind."""

    backend: "AttentionBackend"
    groups: tuple[LayerGroup, ...]
    merged: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What a backend computes in each layer of a forward: each row is in one group at most, or, if
    `merged`, in several with other slots, whose results are merged by the log-sum-exps."""

    backend: "AttentionBackend"
    groups: tuple[AttentionGroup, ...]
    merged: bool = False

    @classmethod
    def dense(
        cls, mask_BQK: Tensor, positions_BK: Tensor, first: int = 0, stride: int = 0
    ) -> "AttentionPlan":
        """One group of all rows: tensor row b sees the K slots from `first + b * stride` on."""
        keys = SlotRun(first, mask_BQK.shape[-1], stride, len(mask_BQK))
        positions_GK = positions_BK.expand(len(mask_BQK), -1)
        rows_BQ = np.arange(mask_BQK[..., 0].numel()).reshape(mask_BQK.shape[:2])
        group = AttentionGroup(None, keys, mask_BQK, positions_GK, host_rows_Gq=rows_BQ)
        return cls(GroupedBackend(), (group,))

    @classmethod
    def causal(
        cls, rows: int, device: torch.device | str = "cpu", start: int = 0
    ) -> "AttentionPlan":
        """Rows of one sequence in the slots of a pool from `start` on; each sees those up to
        itself, from slot 0 on."""
        steps_1K = torch.arange(start + rows, device=device)[None]
        return cls.dense(steps_1K[:, start:, None] >= steps_1K[:, None], steps_1K)

    def for_layers(
        self,
        positions_N: Tensor,
        query_groups: int,
        dtype: torch.dtype,
        narrow: Narrow | None = None,
    ) -> LayerAttention:
        """The plan for layers with this many query heads for each key head."""
        groups = []
        for group in self.groups:
            mask_GqK = group.mask_GqK
            if narrow is not None:
                mask_GqK = narrow(mask_GqK, group.of_rows(positions_N), group.positions_GK)
            # a row that sees nothing (padding) has a finite result instead of NaN
            bias_GqK = torch.zeros(mask_GqK.shape, dtype=dtype, device=mask_GqK.device)
            bias_GqK.masked_fill_(~mask_GqK, torch.finfo(dtype).min)
            sequences, queries, slots = bias_GqK.shape
            bias_GgqK = bias_GqK[:, None].expand(-1, query_groups, -1, -1)
            bias_G1qK = bias_GgqK.reshape(sequences, 1, query_groups * queries, slots)
            rows_M = None if group.rows_Gq is None else group.rows_Gq.flatten()
            groups.append(LayerGroup(rows_M, group.keys, bias_G1qK))
        return LayerAttention(self.backend, tuple(groups), self.merged)

    def parts(self, rows: int, max_rows: int) -> list[tuple[Tensor | None, "AttentionPlan"]]:
        """The forward cut into several of about `max_rows` rows, none of which sees another: their
        flat indices (None for all) and their plans. A merged plan is not cut."""
        if rows <= max_rows or self.merged:
            return [(None, self)]
        pieces = []
        for group in self.groups:
            sequences, queries = group.host_rows_Gq.shape
            step = max(1, max_rows // queries)
            pieces += [group.cut(first, step) for first in range(0, sequences, step)]
        parts: list[list[AttentionGroup]] = [[]]
        for piece in pieces:
            if parts[-1] and sum(g.host_rows_Gq.size for g in (*parts[-1], piece)) > max_rows:
                parts.append([])
            parts[-1].append(piece)
        plans: list[tuple[Tensor | None, AttentionPlan]] = []
        for part in parts:  # its rows one after another
            host_M = np.concatenate([g.host_rows_Gq.reshape(-1) for g in part], dtype=np.int64)
            rows_M = torch.from_numpy(host_M).to(part[0].mask_GqK.device)
            moved = []
            first = 0
            for group in part:
                last = first + group.host_rows_Gq.size
                host_Gq = np.arange(first, last).reshape(group.host_rows_Gq.shape)
                rows_Gq = None if len(part) == 1 else torch.from_numpy(host_Gq).to(rows_M)
                moved.append(replace(group, rows_Gq=rows_Gq, host_rows_Gq=host_Gq))
                first = last
            plans.append((rows_M, replace(self, groups=tuple(moved))))
        return plans


def window_mask(mask_BQK: Tensor, positions_BQ: Tensor, keys_BK: Tensor, window: int) -> Tensor:
    """Hide keys that are `window` or more true positions back."""
    return mask_BQK & (positions_BQ[:, :, None] - keys_BK[:, None, :] < window)


def with_sums(
    folded_BgQd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, bias_B1QK: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of folded queries [B, kv_heads, Q, d], and the log-sum-exp of each one's scores,
    [B, kv_heads, Q], in float32 at least; about the dtype's finite minimum if it sees nothing."""
    if folded_BgQd.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = flash(folded_BgQd, keys_BgKd, values_BgKd, attn_mask=bias_B1QK)
        return out, sums
    scores = folded_BgQd @ keys_BgKd.transpose(-1, -2) / folded_BgQd.shape[-1] ** 0.5 + bias_B1QK
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sums = wide.logsumexp(-1)
    return (wide - sums[..., None]).exp().to(folded_BgQd.dtype) @ values_BgKd, sums


def slots_of(keys_hKd: Tensor, values_hKd: Tensor, keys: SlotRun | Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer, [G, kv_heads, K, d]: views of runs, or copies by int64 [G, K]."""
    heads, _, dim = keys_hKd.shape
    if isinstance(keys, Tensor):
        index_X = keys.reshape(-1)
        size = (heads, *keys.shape, dim)
        keys_GhKd = keys_hKd.index_select(1, index_X).view(size).transpose(0, 1)
        return keys_GhKd, values_hKd.index_select(1, index_X).view(size).transpose(0, 1)
    heads_stride, slot_stride, _ = keys_hKd.stride()
    size = (keys.runs, heads, keys.length, dim)
    stride = (keys.stride * slot_stride, heads_stride, slot_stride, 1)
    first = keys.first * slot_stride
    return (
        keys_hKd.as_strided(size, stride, keys_hKd.storage_offset() + first),
        values_hKd.as_strided(size, stride, values_hKd.storage_offset() + first),
    )


class AttentionBackend:
    """A way to compute attention, without state; a graph names it by the `name` in its class
    statement. `plan` is called once for each forward, `run` once in each layer. This class attends
    to each sequence's slots by itself, with dense masks and torch's kernel."""

    name: ClassVar[str] = ""
    attend: ClassVar[Callable[..., Tensor]] = staticmethod(F.scaled_dot_product_attention)
    """(folded queries, keys, values, attn_mask=bias_B1QK) -> [B, kv_heads, Q, d]."""

    def __init_subclass__(cls, name: str = "") -> None:
        cls.name = name

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        batches = self.batches(metadata, metadata.sequences)
        return AttentionPlan(self, tuple([metadata.group(batch) for batch in batches]))

    def batches(
        self, metadata: AttentionMetadata, sequences: Sequence[QuerySequence]
    ) -> list[AttentionBatch]:
        """Sequences as batches: side by side where that costs little more."""
        filled = [sequence for sequence in sequences if len(sequence.rows)]
        return arranged(metadata, filled, _keys(metadata, filled))

    def run(
        self, q_Nhd: Tensor, keys_hKd: Tensor, values_hKd: Tensor, plan: LayerAttention
    ) -> Tensor:
        """Attention of all rows in one layer, over keys and values [kv_heads, slots + 1, d] -> [N,
        heads * d]. The result of a row in several groups is the mean of the groups' results,
        weighted by the sums of their exponentials, in float32 at least."""
        rows, heads, dim = q_Nhd.shape
        kv_heads = keys_hKd.shape[0]
        merged = plan.merged
        out_NI = q_Nhd
        sums_Nh = q_Nhd  # of a merged plan, the log-sum-exps of the groups so far
        if merged:
            wide = torch.promote_types(q_Nhd.dtype, torch.float32)
            out_NI = q_Nhd.new_zeros(rows, heads * dim, dtype=wide)
            sums_Nh = out_NI.new_full((rows, heads), torch.finfo(wide).min)
        elif len(plan.groups) != 1 or plan.groups[0].rows_M is not None:
            out_NI = q_Nhd.new_zeros(rows, heads * dim)
        for group in plan.groups:
            q_Mhd = q_Nhd if group.rows_M is None else q_Nhd.index_select(0, group.rows_M)
            keys_GhKd, values_GhKd = slots_of(keys_hKd, values_hKd, group.keys)
            if keys_GhKd.dtype != q_Mhd.dtype:
                keys_GhKd = keys_GhKd.to(q_Mhd.dtype)
                values_GhKd = values_GhKd.to(q_Mhd.dtype)
            sequences = keys_GhKd.shape[0]
            queries = len(q_Mhd) // sequences if sequences else 0
            if queries == 1:  # already in the order of the heads
                folded = q_Mhd.view(sequences, kv_heads, -1, dim)
            else:
                q_Gqghd = q_Mhd.view(sequences, queries, kv_heads, heads // kv_heads, dim)
                folded = q_Gqghd.permute(0, 2, 3, 1, 4).reshape(sequences, kv_heads, -1, dim)
            if merged:
                out, sums = with_sums(folded, keys_GhKd, values_GhKd, group.bias_G1qK)
            else:
                out = self.attend(folded, keys_GhKd, values_GhKd, attn_mask=group.bias_G1qK)
            if queries > 1:
                out = out.view(sequences, kv_heads, -1, queries, dim).permute(0, 3, 1, 2, 4)
            out_MI = out.reshape(-1, heads * dim)
            if merged:
                index = slice(None) if group.rows_M is None else group.rows_M
                sums_Gqh = sums.view(sequences, kv_heads, -1, queries).permute(0, 3, 1, 2)
                sums_Mh = sums_Gqh.reshape(-1, heads)
                old_Mh = sums_Nh[index]
                both_Mh = torch.logaddexp(old_Mh, sums_Mh)
                out_Mhd = out_NI[index].view(-1, heads, dim) * (old_Mh - both_Mh).exp()[..., None]
                out_Mhd += out_MI.view_as(out_Mhd) * (sums_Mh - both_Mh).exp()[..., None]
                out_NI[index] = out_Mhd.flatten(1)
                sums_Nh[index] = both_Mh
            elif group.rows_M is None:
                return out_MI
            else:
                out_NI.index_copy_(0, group.rows_M, out_MI)
        return out_NI.to(q_Nhd.dtype)


class GroupedBackend(AttentionBackend, name="grouped"):
    """Each sequence attends to its slots."""


class DenseBackend(AttentionBackend, name="dense"):
    """The reference: all rows attend to the pool; of several rows as far as any is filled."""

    def batches(
        self, metadata: AttentionMetadata, sequences: Sequence[QuerySequence]
    ) -> list[AttentionBatch]:
        filled = [sequence for sequence in sequences if len(sequence.rows)]
        extents = metadata.kv.extents()
        if not filled:
            return []
        if metadata.kv.rows == 1:
            rows = np.sort(np.concatenate([sequence.rows for sequence in filled]))
            return arranged(metadata, [QuerySequence(rows, 0, ())], [(0, extents[0])])
        longest = max(extents[sequence.row] for sequence in filled)
        keys = [(sequence.row * metadata.kv.capacity, longest) for sequence in filled]
        return arranged(metadata, filled, keys)


class CascadeBackend(AttentionBackend, name="cascade"):
    """Segments that several branches share are attended to once, by all rows of these branches in
    one group. Cf. "Cascade Inference" (FlashInfer) and Hydragen (Juravsky et al. 2024)."""

    min_saved: ClassVar[int] = 0  # slots read less often

    def plan(self, metadata: AttentionMetadata) -> AttentionPlan:
        if not self.min_saved or len(metadata.sequences) > 1:  # one sequence reads slots once
            levels = self.levels(metadata)
            if len(levels) > 1:
                batches = [batch for level in levels for batch in self.batches(metadata, level)]
                return AttentionPlan(self, tuple([metadata.group(one) for one in batches]), True)
        return super().plan(metadata)

    def levels(self, metadata: AttentionMetadata) -> Sequence[Sequence[QuerySequence]]:
        """The parts of `shared_parts`, if it is worthwhile to read them by themselves."""
        if metadata.kv.rows > 1 or metadata.equal_lengths or metadata.isolated:
            return ()
        sequences = [sequence for sequence in metadata.sequences if len(sequence.rows)]
        lengths = _lengths(metadata, sequences) if self.min_saved else []
        # all sequences together read at least the longest one
        if self.min_saved and sum(lengths) - max(lengths, default=0) < self.min_saved:
            return ()
        levels = shared_parts(metadata, sequences)
        parts = [part for level in levels for part in level]
        saved = sum(lengths) - sum(_lengths(metadata, parts)) if self.min_saved else 0
        return levels if saved >= self.min_saved else ()


class AutoBackend(CascadeBackend, name="auto"):
    """`cascade` where it reads enough fewer slots to make up for merging, else `grouped`."""

    min_saved = MIN_SLOTS_SAVED


@cache
def backend(name: str) -> AttentionBackend:
    """The backend of this name, of this package or of an installed one; raises ValueError."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f".{module.name}", __package__)
    classes = AttentionBackend.__subclasses__()
    for cls in classes:  # which get longer on the way
        if cls.name == name:
            return cls()
        classes += cls.__subclasses__()
    for point in entry_points(group="specsot.attention", name=name):
        loaded: type[AttentionBackend] = point.load()
        return loaded()
    raise ValueError(f"no attention backend {name!r}")


def arranged(
    metadata: AttentionMetadata, sequences: Sequence[QuerySequence], keys: Sequence[Keys]
) -> list[AttentionBatch]:
    """Sequences with these slots as batches: those whose runs have equal distances, or whose slots
    are lists, are computed side by side if that costs little more than a batch for each."""
    if len(sequences) == 1 and not sequences[0].owners and isinstance(keys[0], tuple):
        run = SlotRun(*keys[0])  # the usual case
        return [AttentionBatch(sequences[0].rows[None], run, run.slots_GK)] if run.length else []
    isolated = min(metadata.isolated, len(sequences))
    order = []
    for index in range(isolated, len(sequences)):
        first, length = _extent(keys[index])
        queries = len(sequences[index].rows)
        if length:  # a row of the pool that holds nothing has rows of padding only
            # lists by their entries, then runs by their first slots
            place = (0, queries, length) if first is None else (1, first, 0)
            order.append((place, index, first, queries, length))
    batches = [[index] for index in range(isolated)]
    batch: list[int] = []  # the latest one, of sequences with at most these queries and slots
    most_queries = most_slots = entries = stride = 0
    last: int | None = None  # the first slot of its latest sequence's run; None of a list
    for _, index, first, queries, length in sorted(order, key=itemgetter(0)):
        count = len(batch) + 1
        all_slots = max(most_slots, length)
        distance = first - last if first is not None and last is not None else 0
        fits = (
            count > 1
            and (first is None) == (last is None)
            and (queries == most_queries or not metadata.equal_lengths)
            and (first is None or count == 2 or distance == stride)
            and (first is None or first + all_slots <= metadata.kv.slots)
            and count * max(most_queries, queries) * all_slots
            <= MAX_WASTE * (entries + queries * length) + MAX_WASTED_ENTRIES
        )
        if not fits:
            batch = []
            batches.append(batch)
            most_queries = most_slots = entries = distance = 0
        batch.append(index)
        most_queries = max(most_queries, queries)
        most_slots = max(most_slots, length)
        entries += queries * length
        stride = distance
        last = first
    return [
        _batch(metadata, [sequences[index] for index in batch], [keys[index] for index in batch])
        for batch in batches
    ]


def _extent(keys: Keys) -> tuple[int | None, int]:
    """The first slot of a run, None of a list; the number of slots."""
    return (None, len(keys)) if isinstance(keys, np.ndarray) else keys


def _lengths(metadata: AttentionMetadata, sequences: Sequence[QuerySequence]) -> list[int]:
    """The number of slots that each sequence attends to."""
    return [_extent(keys)[1] for keys in _keys(metadata, sequences)]


def _keys(metadata: AttentionMetadata, sequences: Sequence[QuerySequence]) -> list[Keys]:
    """The slots that each sequence attends to."""
    kv = metadata.kv
    extents: list[int] = []
    keys: list[Keys] = []
    for sequence in sequences:
        if sequence.owners:
            keys.append(kv.keys_of_segments(sequence.owners))
        elif sequence.homes:
            keys.append(kv.keys_of(sequence.homes))
        else:
            extents = extents or kv.extents()
            keys.append((sequence.row * kv.capacity, extents[sequence.row]))
    return keys


def _batch(
    metadata: AttentionMetadata, sequences: Sequence[QuerySequence], keys: Sequence[Keys]
) -> AttentionBatch:
    rows_Gq = _padded([sequence.rows for sequence in sequences], np.int64)
    lists = [slots for slots in keys if isinstance(slots, np.ndarray)]
    slots: SlotRun | Ints
    if lists:
        slots_GK = slots = _padded(lists, np.int32)
    else:
        first = int(keys[0][0])
        stride = int(keys[1][0]) - first if len(keys) > 1 else 0
        slots = SlotRun(first, max(int(run[1]) for run in keys), stride, len(keys))
        slots_GK = slots.slots_GK
    valid_GK = None
    if sequences[0].owners:  # the slots that belong to the segments that each sequence sees
        pairs = zip(metadata.kv.owner[slots_GK], sequences, strict=True)
        valid_GK = np.stack([is_among(owner_K, sequence.owners) for owner_K, sequence in pairs])
    lengths_G = np.array([len(slots) for slots in lists])
    if (lengths_G < slots_GK.shape[1]).any():
        is_real_GK = np.arange(slots_GK.shape[1]) < lengths_G[:, None]
        valid_GK = is_real_GK if valid_GK is None else valid_GK & is_real_GK
    return AttentionBatch(rows_Gq, slots, slots_GK, valid_GK)


def _padded(lists: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """[G, longest]; shorter lists repeat their last entry."""
    if len(lists) == 1:
        return lists[0].astype(dtype)[None]
    table = np.empty((len(lists), max(map(len, lists))), dtype)
    for row, values in zip(table, lists, strict=True):
        row[: len(values)] = values
        row[len(values) :] = values[-1]
    return table


def shared_parts(
    metadata: AttentionMetadata, sequences: Sequence[QuerySequence]
) -> list[list[QuerySequence]]:
    """The rows that see each part of the pool, in levels with every row once; last: not shared."""
    rows_M = np.sort(np.concatenate([np.zeros(0, np.int64), *[one.rows for one in sequences]]))
    segment_M = metadata.segment_N[rows_M]
    readers: dict[int, list[int]] = {}  # of each segment, the numbers of those that see it
    for number in np.unique(segment_M).tolist():
        if number < len(metadata.visibility.ids_S):  # not padding
            for owner in metadata.visibility.path_SA[number].tolist():
                if owner >= 0:
                    readers.setdefault(owner, []).append(number)
    parts: dict[tuple[int, ...], list[int]] = {}
    for owner, numbers in readers.items():
        parts.setdefault(tuple(numbers), []).append(owner)
    levels: list[tuple[set[int], list[QuerySequence]]] = []
    unshared = list[QuerySequence]()
    for sharers in sorted(parts, key=len, reverse=True):
        part = QuerySequence(rows_M[is_among(segment_M, sharers)], 0, (), tuple(parts[sharers]))
        if len(sharers) == 1:
            unshared.append(part)
            continue
        free = (level for level in levels if level[0].isdisjoint(sharers))
        used, level = next(free, (set[int](), list[QuerySequence]()))
        if not level:
            levels.append((used, level))
        used.update(sharers)
        level.append(part)
    return [*(level for _, level in levels), unshared]
