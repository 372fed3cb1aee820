"""Layouts: in which rows of the pools branches are stored, and in which tensor rows they run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ..ops.attention.metadata import QuerySequence, tensor
from ..ops.kv.pool import UNKNOWN, Ints, KVCache, Region
from ..ops.types import (
    AlignmentState,
    ContinuousDecodingState,
    DraftRows,
    LiveNodes,
    PackedTrees,
    PaddedLayout,
    Rows,
    ancestors,
    no_trees,
)
from .request_table import SegmentTree
from .round import PendingRows, PlacedRows, Span, SpanSlots, Trees


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Rows of one segment; homes: of all segments that they see, its own first. history: for each
    row the segment whose history it sees; None for `owner`."""

    row: int
    owner: int
    homes: tuple[int, ...]
    tokens: Sequence[int]
    positions: Sequence[int]
    history: Sequence[int] | None = None


class PackedQueries:
    """The runs of a forward, right-aligned in tensor rows; row b is the pool's `first_row + b`.
    flat, slots: int32, flat row indices and pool slots of each run; index, all_slots: of all runs.
    paddings: padding rows at the start of each tensor row."""

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
        rows = range(self.first_row, self.first_row + self.height)
        self.paddings = tuple([self.queries - lengths.get(row, 0) for row in rows])
        self.index = self._index()
        owners = [(run.owner, run.homes[0], run.row) for run in runs]
        owner_R, home_R, row_R = np.array(owners, np.int32).reshape(-1, 3).repeat(self.sizes, 0).T
        self.all_slots = kv.append_(owner_R, self.positions, row_R if kv.rows > 1 else 0, home_R)
        self.flat: list[Ints] = []
        self.slots: list[Ints] = []
        for start, end in pairwise([0, *accumulate(self.sizes)]):
            self.flat.append(self.index[start:end])
            self.slots.append(self.all_slots[start:end])

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
    """The layout ``bim``: all branches, concatenated, in the only row of the pools; no copies."""

    packed = True

    def __init__(self, pools: Sequence[KVCache], segments: SegmentTree) -> None:
        self.pools = pools
        self.device = pools[0].data.device
        self.segments = segments

    def rows_of(self, owner: int) -> Sequence[int]:
        """The pool rows that hold the rows of this owner."""
        return (0,)

    def tensor_rows_of(self, owner: int) -> Sequence[int]:
        """The tensor rows of its queries, one for each pool row."""
        return self.rows_of(owner)

    def open_(self, prefix: int, size: int, least: int) -> None:
        """Allocate a region of `size` slots for a request, `least` if the pool is crowded."""
        for pool in self.pools:
            pool.open_(prefix, size, least)

    def enter_(self, owner: int, prefix: int) -> bool:
        """Allocate a branch; returns whether its pool row holds retained parts of its request."""
        return False

    def hold_(self, owner: int, prefix: int) -> None:
        """Retain the rows of an ended part."""

    def leave_(self, owners: Iterable[int]) -> None:
        """Forget owners without rows."""

    def prune_(self, prefix: int) -> None:
        """Free the copies of a prefix that no waiting branch needs."""

    def alignment(
        self, packed: PackedQueries, trees: Trees, spans: Sequence[Span]
    ) -> AlignmentState | ContinuousDecodingState | None:
        return None

    def place_(
        self, kv: KVCache, trees: Trees | None, spans: Sequence[Span], *, tapped: bool = True
    ) -> PlacedRows:
        """Allocate slots for all rows of a forward and lay the rows out, trees first."""
        shared = trees.proposal.shared or None if trees is not None and self.packed else None
        # The host knows trees of roots only completely.
        nodes = 0 if trees is None else trees.proposal.tokens_SN.shape[1]
        is_bare = trees is not None and trees.segments is None and not nodes
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
            flat_Cn = np.stack(packed.flat[copies])
            span_slots.append(SpanSlots(np.stack(packed.slots[copies]), flat_Cn))
            if span.draws:
                if span.bound:
                    bound.append(len(tips))
                tips.append(int(flat_Cn[0, -1]))
            first = copies.stop
        fresh = packed.all_slots[: sum(packed.sizes[:num_trees])]
        num_drafted = 0 if is_bare else num_trees
        rows = self._plain_rows(kv, packed, tips=tips, num_trees=num_drafted, tapped=tapped)
        if trees is not None:
            if is_bare:
                index_S1 = packed.index[: len(fresh), None]
                nodes_ST = tensor(index_S1, self.device)
                rows = replace(
                    rows,
                    nodes_ST=nodes_ST,
                    ancestors_STT=torch.ones_like(nodes_ST, dtype=torch.bool)[..., None],
                    node_rows_ST=index_S1,
                    node_slots_ST=fresh[:, None],
                    bound_trees=trees.bound,
                )
            else:
                rows = self._with_trees(rows, trees, packed, fresh, shared=shared)
            if not self.packed:
                rows = replace(rows, alignment=self.alignment(packed, trees, spans))
        if bound:
            rows = replace(rows, bound_tips=tuple(bound))
        return PlacedRows(rows=rows, fresh=fresh, spans=tuple(span_slots), paddings=packed.paddings)

    def _tree_runs(self, trees: Trees, shared: int | None, *, is_bare: bool) -> list[QueryRun]:
        """The rows of the trees; the pool learns their positions when they are committed."""
        runs = []
        sizes = () if shared else trees.proposal.laid_out
        for tree, owner in enumerate(trees.owners):
            row = self.tensor_rows_of(owner)[0]
            homes = self.segments.homes(owner)
            tokens = [0] * (1 + (0 if shared else sizes[tree]))
            positions: Sequence[int] = tokens
            history = None if trees.segments is None else trees.segments[tree]
            if is_bare:
                tokens = [trees.roots[tree]]
                positions = [trees.positions[tree]]
            run = QueryRun(row, owner, homes, tokens=tokens, positions=positions, history=history)
            runs.append(run)
        if shared:
            padding = [0] * shared
            runs.append(replace(runs[0], owner=UNKNOWN, tokens=padding, positions=padding))
        return runs

    def _runs(self, part: Span | PendingRows) -> list[QueryRun]:
        """A run for each copy of these rows."""
        positions = list(range(part.position, part.position + len(part.tokens)))
        homes = self.segments.homes(part.owner)
        return [
            QueryRun(row, part.owner, homes, tokens=part.tokens, positions=positions)
            for row in self.tensor_rows_of(part.owner)
        ]

    def _plain_rows(
        self,
        kv: KVCache,
        packed: PackedQueries,
        *,
        tips: Sequence[int],
        num_trees: int = 0,
        tapped: bool = True,
    ) -> Rows:
        """All rows of a forward without tree fields; num_trees: first runs with drafted nodes."""
        segments = {UNKNOWN}
        for run in packed.runs:
            segments.update(run.history or (run.owner,))
        ids = sorted(segments - {UNKNOWN})
        number = dict(zip(ids, range(len(ids)), strict=True))
        numbers: list[int] = []
        for run, size in zip(packed.runs, packed.sizes, strict=True):
            if run.history is None:
                numbers += [number.get(run.owner, len(ids))] * size
            else:
                numbers += [number[segment] for segment in run.history]
        values = (packed.tokens, packed.positions, packed.all_slots, numbers)
        host_CN = packed.spread((0, 0, kv.scratch, len(ids)), values)
        place_3BQ = torch.from_numpy(host_CN[:3].reshape(3, packed.height, packed.queries))
        tokens_BQ, positions_BQ, slots_BQ = place_3BQ.to(self.device).unbind()
        nodes_ST, ancestors_STT = no_trees(self.device)
        return Rows(
            tokens_BQ=tokens_BQ,
            positions_BQ=positions_BQ,
            slots_BQ=slots_BQ,
            visibility=self.segments.visibility(tuple(ids)),
            segment_N=host_CN[3].astype(np.int32),
            sequences=self.sequences(packed, num_trees),
            prompt_slots=packed.all_slots[sum(packed.sizes[:num_trees]) :],
            nodes_ST=nodes_ST,
            ancestors_STT=ancestors_STT,
            tips_R=tensor(tips, self.device),
            tapped=tapped,
        )

    def sequences(self, packed: PackedQueries, num_trees: int) -> tuple[QuerySequence, ...]:
        """The rows of each set of visible homes. If the trees share their rows, only the device
        knows the owner of a row: then the rows of all trees see the homes of all of them."""
        trees = packed.runs[:num_trees]
        shared = bool(trees) and trees[-1].owner == UNKNOWN
        tree_homes = tuple(dict.fromkeys(chain(*[run.homes for run in trees])) if shared else ())
        rows_by_homes: dict[tuple[int, ...], list[Ints]] = {}
        for at, (run, flat) in enumerate(zip(packed.runs, packed.flat, strict=True)):
            homes = tree_homes if shared and at < num_trees else run.homes
            rows_by_homes.setdefault(homes, []).append(flat)
        return tuple(
            QuerySequence(np.concatenate(flats, dtype=np.int64), 0, homes)
            for homes, flats in rows_by_homes.items()
        )

    def _with_trees(
        self, rows: Rows, trees: Trees, packed: PackedQueries, fresh: Ints, *, shared: int | None
    ) -> Rows:
        """The rows with the trees' nodes, tokens and positions; fresh: slots of these rows."""
        proposal = trees.proposal
        host_2S1 = np.array([trees.roots, trees.positions], np.int64)[..., None]
        root_S1, start_S1 = tensor(host_2S1, self.device).unbind()
        tokens_ST = torch.cat([root_S1, proposal.tokens_SN], dim=1)
        positions_ST = torch.cat([start_S1, start_S1 + proposal.depths_SN], dim=1)
        above_STT = ancestors(proposal.parents_SN, proposal.levels)
        rows = replace(rows, ancestors_STT=above_STT, bound_trees=trees.bound)
        if shared:  # the device assigns each row to a node
            packed_trees = PackedTrees.of(proposal.valid_SN, shared)
            part = slice(len(packed_trees.tree_R))
            ids = rows.visibility.ids_S.tolist()
            number_S = tensor([ids.index(owner) for owner in trees.owners], self.device)
            rows.tokens_BQ[0, part] = packed_trees.pick(tokens_ST, 0)
            rows.positions_BQ[0, part] = packed_trees.pick(positions_ST, 0)
            segment_R = packed_trees.pick(number_S[:, None].expand(tokens_ST.shape), len(ids))
            return replace(
                rows,
                nodes_ST=packed_trees.nodes_ST,
                node_rows_ST=packed.index[: len(fresh)],
                node_slots_ST=fresh,
                packed_trees=packed_trees,
                tree_segment_R=segment_R,
            )
        node_rows_ST = np.empty(tokens_ST.shape, np.int32)
        node_slots_ST = np.empty(tokens_ST.shape, np.int32)
        for node_ST, parts in ((node_rows_ST, packed.flat), (node_slots_ST, packed.slots)):
            # The runs of trees are the first ones; nodes without a row have their root's.
            for node_T, part_n in zip(node_ST, parts, strict=False):
                node_T[: len(part_n)] = part_n
                node_T[len(part_n) :] = part_n[0]
        nodes_ST = tensor(node_rows_ST, self.device)
        if proposal.sizes is not None:  # a node without a row repeats its root
            has_ST = F.pad(proposal.valid_SN, (1, 0), value=True)
            tokens_ST = tokens_ST.where(has_ST, root_S1)
            positions_ST = positions_ST.where(has_ST, start_S1)
            rows = replace(rows, live=LiveNodes.of(node_rows_ST, proposal.sizes, self.device))
        rows.tokens_BQ.view(-1)[nodes_ST] = tokens_ST
        rows.positions_BQ.view(-1)[nodes_ST] = positions_ST
        return replace(
            rows, nodes_ST=nodes_ST, node_rows_ST=node_rows_ST, node_slots_ST=node_slots_ST
        )

    def place_draft_(
        self, kv: KVCache, pending: Sequence[PendingRows], active: Sequence[tuple[int, int, int]]
    ) -> DraftRows:
        """The drafter's new rows; active: (owner, root position, root token) of each branch."""
        pairs = [(part, run) for part in pending if part.tokens for run in self._runs(part)]
        runs = [run for _, run in pairs]
        packed = PackedQueries(kv, runs)
        kv.commit_(packed.all_slots, packed.positions)
        last = {}
        starts = []
        for run, flat in zip(runs, packed.flat, strict=True):
            last[run.owner] = int(flat[-1])
            starts.append(int(flat[0]))
        order = np.argsort(starts, kind="stable").tolist()
        features = [part.features for part, _ in pairs]
        present = [features[i] for i in order if features[i] is not None]
        rows = self._plain_rows(kv, packed, tips=[last[owner] for owner, _, _ in active])
        ids = rows.visibility.ids_S.tolist()
        active_S3 = tensor(active, self.device).view(-1, 3)
        tensor_rows = [self.tensor_rows_of(owner)[0] for owner, _, _ in active]
        return DraftRows(
            rows=rows,
            features_NF=torch.cat(present) if present else None,
            index_N=tensor(np.concatenate([packed.flat[i] for i in order]), self.device),
            segment_S=np.array([ids.index(owner) for owner, _, _ in active], np.int32),
            position_S=active_S3[:, 1],
            root_S=active_S3[:, 2],
            frame=PaddedLayout(tensor_rows, self.packed, self.device),
        )


class RowPerBranch(Layout):
    """A tensor row per branch: queries [B, Q], shorter rows padded on the left."""

    packed = False

    def __init__(self, pools: Sequence[KVCache], segments: SegmentTree) -> None:
        super().__init__(pools, segments)
        self._row: dict[int, int] = {}  # owner of a branch -> its tensor row

    def alignment(
        self, packed: PackedQueries, trees: Trees, spans: Sequence[Span]
    ) -> AlignmentState | ContinuousDecodingState | None:
        inputs = tuple([packed.queries - padding for padding in packed.paddings])
        if not spans:
            return AlignmentState(packed.paddings, inputs, packed.paddings)
        length = [0] * packed.height
        prefill = [False] * packed.height
        for owner, position in zip(trees.owners, trees.positions, strict=True):
            length[self._row[owner] - packed.first_row] = position
        for span in reversed(spans):  # the first span of a row has its first position
            for row in self.tensor_rows_of(span.owner):
                length[row - packed.first_row] = span.position
                prefill[row - packed.first_row] = True
        valid = tuple(map(sum, zip(length, inputs, strict=True)))
        return ContinuousDecodingState(max(valid), valid, inputs, tuple(prefill))


class BatchingLayout(RowPerBranch):
    """A pool row per branch, with its own copy of the prefix, which stays while branches wait.
    Retained parts are moved into one row, that of the first part that ended."""

    def __init__(self, pools: Sequence[KVCache], segments: SegmentTree) -> None:
        super().__init__(pools, segments)
        self._copies: dict[int, list[int]] = {}  # owner of a prefix -> rows that hold it
        self._retained: dict[int, tuple[int, int]] = {}  # owner of a part -> its prefix, its row

    def rows_of(self, owner: int) -> Sequence[int]:
        if owner in self._copies:
            return self._copies[owner]
        return (self._retained[owner][1] if owner in self._retained else self._row[owner],)

    def open_(self, prefix: int, size: int, least: int) -> None:
        self._copies[prefix] = [self._vacate_()]

    def enter_(self, owner: int, prefix: int) -> bool:
        """Allocate the row of retained parts, a row with the prefix, or a new copy of it."""
        busy = set(self._row.values())
        parts = self._row_of_parts(prefix)
        ready = [row for row in self._copies[prefix] if row not in busy]
        ready.sort(key=lambda row: row != parts)
        if not ready:
            ready = [self._vacate_()]
            for pool in self.pools:
                pool.copy_rows_(prefix, self._copies[prefix][0], ready[0], "fork")
            self._copies[prefix].append(ready[0])
        self._row[owner] = ready[0]
        return ready[0] == parts

    def hold_(self, owner: int, prefix: int) -> None:
        row = self._row.pop(owner)
        target = self._row_of_parts(prefix, row)
        self._retained[owner] = prefix, target
        if target == row:
            return
        for pool in self.pools:
            pool.copy_rows_(owner, row, target, "attend")
            pool.retire_([owner], row)

    def _vacate_(self) -> int:
        busy = self._busy
        used = busy.union(*self._copies.values())
        for row in range(self.pools[0].rows):
            if row not in used:
                return row
        for prefix, rows in self._copies.items():
            spare = [row for row in rows if row not in busy]
            if spare and len(rows) > 1:
                self._drop_(prefix, spare[0])
                return spare[0]
        raise AssertionError("admission admits at most as many branches as rows")

    @property
    def _busy(self) -> set[int]:
        """Rows with running branches or retained parts."""
        return {*self._row.values(), *(row for _, row in self._retained.values())}

    def _row_of_parts(self, prefix: int, new: int = -1) -> int:
        return dict(self._retained.values()).get(prefix, new)

    def _drop_(self, prefix: int, row: int) -> None:
        self._copies[prefix].remove(row)
        for pool in self.pools:
            pool.retire_([prefix], row)

    def sequences(self, packed: PackedQueries, num_trees: int) -> tuple[QuerySequence, ...]:
        """A sequence per pool row, its padding included."""
        rows_BQ = np.arange(packed.height * packed.queries).reshape(packed.height, packed.queries)
        rows = enumerate(rows_BQ, packed.first_row)
        return tuple(QuerySequence(row_Q, row, ()) for row, row_Q in rows if row_Q.size)

    def leave_(self, owners: Iterable[int]) -> None:
        for owner in owners:
            self._row.pop(owner, None)
            self._copies.pop(owner, None)
            self._retained.pop(owner, None)

    def prune_(self, prefix: int) -> None:
        busy = self._busy
        for row in [r for r in self._copies.get(prefix, ()) if r not in busy]:
            self._drop_(prefix, row)


class PagedLayout(RowPerBranch):
    """A tensor row per branch over pools with one row; a prefix is prefilled in one of these."""

    def tensor_rows_of(self, owner: int) -> Sequence[int]:
        return (self._row[owner],)

    def open_(self, prefix: int, size: int, least: int) -> None:
        super().open_(prefix, size, least)
        self._row[prefix] = self._free_row()

    def enter_(self, owner: int, prefix: int) -> bool:
        """Allocate a tensor row, and slots near those of the prefix."""
        shared = self._row[prefix] in (self._row[other] for other in self._row if other != prefix)
        self._row[owner] = self._free_row() if shared else self._row[prefix]
        self._row[prefix] = self._row[owner]
        for pool in self.pools:
            pool.regions[owner] = Region(pool.regions[prefix].first)
        return False

    def _free_row(self) -> int:
        used = {*self._row.values()}
        return next(row for row in count() if row not in used)

    def leave_(self, owners: Iterable[int]) -> None:
        for owner in owners:
            self._row.pop(owner, None)
