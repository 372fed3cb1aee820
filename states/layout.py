"""The layout ``bim``, the base of all layouts: from branches to the rows of a forward.

A layout decides in which rows of the pools an owner's rows are stored, and in which tensor rows its
queries are computed. Under ``bim`` both are row 0, and all branches are concatenated. The layouts
with a row per branch (`states.row_layouts`) derive from it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.metadata import QuerySequence, tensor
from ..ops.kv.pool import KVCache
from ..ops.kv.slots import UNKNOWN, Ints
from ..ops.row_layout import (
    AlignmentManager,
    AlignmentState,
    ContinuousDecodingState,
    LiveNodes,
    PaddedLayout,
    pack_trees,
)
from ..ops.types import DraftRows, Rows, ancestors, no_trees
from .round import PendingRows, PlacedRows, Span, SpanSlots, Trees
from .segments import SegmentTree


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one segment; homes: of all segments that they see, its own first."""

    row: int
    owner: int
    homes: tuple[int, ...]
    tokens: Sequence[int]
    positions: Sequence[int]


class PackedQueries:
    """The runs of a forward, concatenated and right-aligned in B tensor rows of Q queries.

    Attributes:
        first_row, height, queries: of the tensors; tensor row b is the pool's `first_row + b`.
        sizes: rows of each run.
        flat, slots: int32, flat row indices and pool slots of each run, in the given order.
        index, all_slots: the same of all runs, concatenated.
        tokens, positions: of all runs.
        paddings: number of padding rows at the start of each tensor row.
    """

    def __init__(self, kv: KVCache, runs: Sequence[QueryRun]) -> None:
        self.runs = runs
        self.sizes: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        lengths: dict[int, int] = {}
        for run in runs:
            size = len(run.tokens)
            self.sizes.append(size)
            self.tokens += run.tokens
            self.positions += run.positions
            lengths[run.row] = lengths.get(run.row, 0) + size
        self.first_row = min(lengths, default=0)
        self.height = max(lengths, default=0) - self.first_row + 1
        self.queries = max(lengths.values(), default=0)
        paddings = []
        for row in range(self.first_row, self.first_row + self.height):
            paddings.append(self.queries - lengths.get(row, 0))
        self.paddings = tuple(paddings)
        self.index = self._index()
        self.all_slots = self._append_(kv)
        self.flat: list[Ints] = []
        self.slots: list[Ints] = []
        for start, end in pairwise([0, *accumulate(self.sizes)]):
            self.flat.append(self.index[start:end])
            self.slots.append(self.all_slots[start:end])

    @property
    def aligned(self) -> AlignmentState:
        """The padding of the rows."""
        return AlignmentManager.align_for_decode([self.queries - n for n in self.paddings])

    def _index(self) -> Ints:
        if self.height == 1:  # no padding
            return np.arange(self.queries, dtype=np.int32)
        cursor = [b * self.queries + n for b, n in enumerate(self.paddings)]
        flat = [np.zeros(0, np.int32)]
        for run, size in zip(self.runs, self.sizes, strict=True):
            start = cursor[run.row - self.first_row]
            cursor[run.row - self.first_row] += size
            flat.append(np.arange(start, start + size, dtype=np.int32))
        return np.concatenate(flat)

    def _append_(self, kv: KVCache) -> Ints:
        """Allocate slots for all rows."""
        owners = []
        for run in self.runs:
            owners.append((run.owner, run.homes[0], run.row))
        owners_R3 = np.array(owners, np.int32).reshape(-1, 3).repeat(self.sizes, 0)
        owner_R, home_R, row_R = owners_R3.T
        return kv.append_(owner_R, self.positions, row_R if kv.rows > 1 else 0, home_R)

    def spread(
        self, padding_C: Sequence[int], values_C: Sequence[Sequence[int] | Ints]
    ) -> npt.NDArray[np.int64]:
        """int64 [C, B * Q]: values of all rows in the order of the runs, with padding values."""
        if self.height == 1:  # no padding
            return np.array(values_C, np.int64)
        out = np.empty((len(padding_C), self.height * self.queries), np.int64)
        for row, padding, values in zip(out, padding_C, values_C, strict=True):
            if len(self.index) < len(row):
                row.fill(padding)
            row[self.index] = values
        return out


class Layout:
    """The layout ``bim``: all branches of all requests in the only row of the pools; nothing is
    copied."""

    packed = True

    def __init__(self, device: torch.device, segments: SegmentTree) -> None:
        self.device = device
        self.segments = segments

    # -- where owners are stored ------------------------------------------------------------------

    def rows_of(self, owner: int) -> Sequence[int]:
        """The pool rows that hold the rows of this owner."""
        return (0,)

    def tensor_rows_of(self, owner: int) -> Sequence[int]:
        """The tensor rows of its queries, one for each pool row."""
        return self.rows_of(owner)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        """Allocate a region of `size` slots for a request, or of `least` if the pool is crowded."""
        for pool in pools:
            pool.open_(prefix, size, least)

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """Allocate a branch where it sees its prefix; a fork copies 0 bytes.

        Returns:
            Whether its pool row holds retained parts of its request.
        """
        return False

    def hold_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> None:
        """Retain the rows of an ended part in place: 0 bytes."""

    def leave_(self, owners: Iterable[int]) -> None:
        """Forget owners without rows."""

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """Free the copies of a prefix that no waiting branch needs."""

    def alignment(
        self, packed: PackedQueries, trees: Trees, spans: Sequence[Span], positions_BQ: Tensor
    ) -> AlignmentState | ContinuousDecodingState | None:
        """The padding of a forward with trees; None without padding."""
        return None

    # -- the target's rows ------------------------------------------------------------------------

    def place_(self, kv: KVCache, trees: Trees | None, spans: Sequence[Span]) -> PlacedRows:
        """Allocate slots for all rows of a forward and lay the rows out, trees first."""
        shared = trees.proposal.shared or None if trees is not None and self.packed else None
        is_bare = trees is not None and _is_bare(trees)
        runs = [] if trees is None else self._tree_runs(trees, shared, is_bare=is_bare)
        num_trees = len(runs)
        for span in spans:
            runs += self._runs(span)
        packed = PackedQueries(kv, runs)
        span_slots = []
        tips: list[int] = []
        bound: list[int] = []
        first = num_trees
        for span in spans:
            copies = slice(first, first + len(self.rows_of(span.owner)))
            flat = packed.flat[first]
            slots_Cn = np.stack(packed.slots[copies])
            span_slots.append(SpanSlots(flat, slots_Cn, np.stack(packed.flat[copies])))
            if span.draws:
                if span.bound:
                    bound.append(len(tips))
                tips.append(int(flat[-1]))
            first = copies.stop
        fresh = packed.all_slots[: sum(packed.sizes[:num_trees])]
        rows = self._plain_rows(
            kv,
            packed,
            tips=tips,
            num_trees=0 if is_bare else num_trees,
            histories=None if trees is None or is_bare else trees.segments,
        )
        if trees is not None:
            rows = self._with_trees(
                rows, trees, packed, fresh, shared=shared, is_bare=is_bare, spans=spans
            )
        if bound:
            rows = replace(rows, bound_tips=tuple(bound))
        return PlacedRows(
            rows=rows,
            tree_rows=rows.node_rows_ST,
            tree_slots=rows.node_slots_ST,
            fresh=fresh,
            spans=tuple(span_slots),
            paddings=packed.paddings,
            padding=sum(packed.paddings),
        )

    def _tree_runs(self, trees: Trees, shared: int | None, *, is_bare: bool) -> list[QueryRun]:
        """The rows of the trees; the pool learns their positions when they are committed.

        Args:
            shared: rows of the drafted nodes of all trees, if they share them.
        """
        runs = []
        sizes = () if shared is not None else trees.proposal.laid_out
        for tree, owner in enumerate(trees.owners):
            row = self.tensor_rows_of(owner)[0]
            homes = self.segments.homes[owner]
            if is_bare:
                tokens = [trees.roots[tree]]
                positions = [trees.positions[tree]]
            else:
                tokens = [0] * (1 + (0 if shared is not None else sizes[tree]))
                positions = tokens
            runs.append(QueryRun(row, owner, homes, tokens, positions))
        if shared:
            first = runs[0]
            runs.append(QueryRun(first.row, UNKNOWN, first.homes, [0] * shared, [0] * shared))
        return runs

    def _runs(self, part: Span | PendingRows) -> list[QueryRun]:
        """A run for each row that holds these tokens: several for the copies of a prefix."""
        positions = list(range(part.position, part.position + len(part.tokens)))
        homes = self.segments.homes[part.owner]
        runs = []
        for row in self.tensor_rows_of(part.owner):
            runs.append(QueryRun(row, part.owner, homes, part.tokens, positions))
        return runs

    def _plain_rows(
        self,
        kv: KVCache,
        packed: PackedQueries,
        *,
        tips: Sequence[int],
        num_trees: int = 0,
        histories: Sequence[Sequence[int]] | None = None,
    ) -> Rows:
        """All rows of a forward without tree fields.

        Args:
            num_trees: number of runs, from the first on, with drafted nodes.
            histories: for each tree the segments whose history its nodes see; None for its own.
        """
        segments = {run.owner for run in packed.runs if run.owner >= 0}
        if histories is not None:
            segments = {run.owner for run in packed.runs[num_trees:] if run.owner >= 0}
            segments.update(*histories)
        ids = sorted(segments)
        number = dict(zip(ids, range(len(ids)), strict=True))
        numbers: list[int] = []
        for at, (run, size) in enumerate(zip(packed.runs, packed.sizes, strict=True)):
            if histories is not None and at < num_trees:
                numbers += [number[segment] for segment in histories[at]]
            else:
                numbers += [number.get(run.owner, len(ids))] * size
        host_CN = packed.spread(
            (0, 0, kv.scratch, len(ids)),
            (packed.tokens, packed.positions, packed.all_slots, numbers),
        )
        place_3BQ = torch.from_numpy(host_CN[:3].reshape(3, packed.height, packed.queries))
        tokens_BQ, positions_BQ, slots_BQ = place_3BQ.to(self.device).unbind()
        nodes_ST, ancestors_STT = no_trees(self.device)
        return Rows(
            tokens_BQ=tokens_BQ,
            positions_BQ=positions_BQ,
            slots_BQ=slots_BQ,
            visibility=self.segments.visibility[tuple(ids)],
            segment_N=host_CN[3].astype(np.int32),
            sequences=self.sequences(packed, num_trees),
            prompt_slots=packed.all_slots[sum(packed.sizes[:num_trees]) :],
            nodes_ST=nodes_ST,
            ancestors_STT=ancestors_STT,
            tips_R=self._ids(tips),
        )

    def sequences(self, packed: PackedQueries, num_trees: int) -> tuple[QuerySequence, ...]:
        """The rows of each set of visible homes.

        If the trees share their rows, only the device knows the owner of a row: then the rows of
        all trees see the homes of all of them.
        """
        tree_homes: dict[int, None] = {}
        shared = False
        for run in packed.runs[:num_trees]:
            shared = shared or run.owner < 0
            tree_homes.update(dict.fromkeys(run.homes))
        rows_by_homes: dict[tuple[int, ...], list[Ints]] = {}
        for at, (run, flat) in enumerate(zip(packed.runs, packed.flat, strict=True)):
            homes = tuple(tree_homes) if shared and at < num_trees else run.homes
            rows_by_homes.setdefault(homes, []).append(flat)
        sequences = []
        for homes, flats in rows_by_homes.items():
            sequences.append(QuerySequence(np.concatenate(flats, dtype=np.int64), 0, homes))
        return tuple(sequences)

    def _with_trees(
        self,
        rows: Rows,
        trees: Trees,
        packed: PackedQueries,
        fresh: Ints,
        *,
        shared: int | None,
        is_bare: bool,
        spans: Sequence[Span],
    ) -> Rows:
        """The rows with the trees' nodes, tokens and positions."""
        index = packed.index[: len(fresh)]
        if is_bare:
            nodes_ST = tensor(index[:, None], self.device)
            rows = replace(
                rows,
                nodes_ST=nodes_ST,
                ancestors_STT=torch.ones_like(nodes_ST, dtype=torch.bool)[..., None],
                node_rows_ST=index[:, None],
                node_slots_ST=fresh[:, None],
                bound_trees=trees.bound,
            )
        elif shared:
            rows = _tree_rows(rows, trees, index, fresh, shared=shared)
        else:
            num_nodes = trees.proposal.tokens_SN.shape[1] + 1
            size = (len(trees.owners), num_nodes)
            flat_ST = np.empty(size, np.int32)
            slots_ST = np.empty(size, np.int32)
            for tree in range(len(trees.owners)):
                _fill(flat_ST[tree], packed.flat[tree])
                _fill(slots_ST[tree], packed.slots[tree])
            rows = _tree_rows(rows, trees, flat_ST, slots_ST, shared=None)
        if not self.packed:
            aligned = self.alignment(packed, trees, spans, rows.positions_BQ)
            rows = replace(rows, alignment=aligned)
        return rows

    # -- the drafter's rows -----------------------------------------------------------------------

    def place_draft_(
        self,
        kv: KVCache,
        pending: Sequence[PendingRows],
        active: Sequence[tuple[int, int, int]],
    ) -> DraftRows:
        """The drafter's new rows, which are committed at once.

        Args:
            active: (owner, root position, root token) of each active branch.
        """
        runs = []
        features = []
        for part in pending:
            if part.tokens:
                for run in self._runs(part):
                    runs.append(run)
                    features.append(part.features)
        packed = PackedQueries(kv, runs)
        kv.commit_(packed.all_slots, packed.positions)
        last = {}
        starts = []
        for run, flat in zip(runs, packed.flat, strict=True):
            last[run.owner] = int(flat[-1])
            starts.append(int(flat[0]))
        order = np.argsort(starts, kind="stable").tolist()
        ordered = [features[i] for i in order]
        present = [part for part in ordered if part is not None]
        tips = [last[owner] for owner, _, _ in active]
        rows = self._plain_rows(kv, packed, tips=tips)
        ids = rows.visibility.ids_S.tolist()
        active_S3 = self._ids(active).view(-1, 3)
        tensor_rows = []
        for owner, _, _ in active:
            tensor_rows.append(self.tensor_rows_of(owner)[0])
        return DraftRows(
            rows=replace(rows, alignment=None if self.packed else packed.aligned),
            features_NF=torch.cat(present) if present else None,
            index_N=self._ids(np.concatenate([packed.flat[i] for i in order])),
            segment_S=np.array([ids.index(owner) for owner, _, _ in active], np.int32),
            start_S=np.array([position for _, position, _ in active], np.int32),
            position_S=active_S3[:, 1],
            root_S=active_S3[:, 2],
            frame=PaddedLayout.of(tuple(tensor_rows), self.packed, self.device),
        )

    def _ids(self, values: Any) -> Tensor:
        return torch.from_numpy(np.array(values, np.int64)).to(self.device)


def _is_bare(trees: Trees) -> bool:
    """Whether the trees are roots only, which the host knows completely."""
    return not trees.proposal.tokens_SN.shape[1] and trees.segments is None


def _fill(nodes_T: Ints, part: Ints) -> None:
    """Write a tree's rows or slots; nodes without a row get the root's."""
    nodes_T[: len(part)] = part
    nodes_T[len(part) :] = part[0]


def _tree_rows(rows: Rows, trees: Trees, flat: Ints, slots: Ints, *, shared: int | None) -> Rows:
    """The rows with the trees' tokens and positions.

    Args:
        flat, slots: of the trees' nodes, as in `PlacedRows`.
        shared: rows of the drafted nodes of all trees, if they share them.
    """
    proposal = trees.proposal
    device = rows.tokens_BQ.device
    host_2S1 = np.array([trees.roots, trees.positions], np.int64)[..., None]
    root_S1, start_S1 = tensor(host_2S1, device).unbind()
    tokens_ST = torch.cat([root_S1, proposal.tokens_SN], dim=1)
    positions_ST = torch.cat([start_S1, start_S1 + proposal.depths_SN], dim=1)
    rows = replace(
        rows,
        ancestors_STT=ancestors(proposal.parents_SN, proposal.levels),
        node_rows_ST=flat,
        node_slots_ST=slots,
        bound_trees=trees.bound,
    )
    if shared is not None:
        return _packed_tree_rows(rows, trees, tokens_ST, positions_ST, shared)
    nodes_ST = tensor(flat, device)
    if proposal.sizes is not None:  # a node without a row repeats its root
        has_ST = F.pad(proposal.valid_SN, (1, 0), value=True)
        tokens_ST = tokens_ST.where(has_ST, root_S1)
        positions_ST = positions_ST.where(has_ST, start_S1)
        rows = replace(rows, live=LiveNodes.of(flat, proposal.sizes, device))
    rows.tokens_BQ.view(-1)[nodes_ST] = tokens_ST
    rows.positions_BQ.view(-1)[nodes_ST] = positions_ST
    return replace(rows, nodes_ST=nodes_ST)


def _packed_tree_rows(
    rows: Rows, trees: Trees, tokens_ST: Tensor, positions_ST: Tensor, shared: int
) -> Rows:
    """The rows with trees that share `shared` rows; the device assigns each row to a node."""
    packed = pack_trees(trees.proposal.valid_SN, shared)
    part = slice(len(packed.tree_R))
    device = tokens_ST.device
    ids = rows.visibility.ids_S.tolist()
    number_S = torch.as_tensor([ids.index(owner) for owner in trees.owners], device=device)
    rows.tokens_BQ[0, part] = packed.pick(tokens_ST, 0)
    rows.positions_BQ[0, part] = packed.pick(positions_ST, 0)
    segment_R = packed.pick(number_S[:, None].expand(tokens_ST.shape), len(ids))
    return replace(rows, nodes_ST=packed.nodes_ST, packed_trees=packed, tree_segment_R=segment_R)
