"""From branches to the rows of a forward and back: the layout ``bim``, and what all have in common.

A layout says in which rows of the pools an owner lies, and in which tensor rows its queries stand.
Everything else follows: under ``bim`` all lie in row 0, one after another; under ``batching`` each
branch has a row of its own, under ``paged`` only its queries have.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.attention.metadata import QuerySequence
from ..ops.kv.pool import KVCache
from ..ops.kv.slots import UNKNOWN, Ints
from ..ops.row_layout import AlignmentManager, AlignmentState, ContinuousDecodingState, PaddedLayout
from ..ops.types import DraftRows, Rows, no_trees
from .rows import (
    PackedQueries,
    PendingRows,
    PlacedRows,
    QueryRun,
    Roots,
    Span,
    SpanSlots,
    Trees,
    by_node,
    grow,
    stand,
)
from .segments import SegmentTree


class Layout:
    """The layout ``bim``: all branches of all requests in the pools' only row, nothing ever copied.

    Other layouts derive from it and say where their owners lie.
    """

    packed = True

    def __init__(self, device: torch.device, segments: SegmentTree) -> None:
        self.device = device
        self.segments = segments

    def rows_of(self, owner: int) -> Sequence[int]:
        """The rows of the pools that hold, or are to hold, what this owner has."""
        return (0,)

    def tensor_rows_of(self, owner: int) -> Sequence[int]:
        """The tensor rows that its queries stand in, one for each row of the pools."""
        return self.rows_of(owner)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        """Find a place for a request's prefix, and for `size` slots of the request near it, or for
        `least` where others would have to make way."""
        for pool in pools:
            pool.open_(prefix, size, least)

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """Find a place for a branch where it sees its prefix; a fork copies 0 bytes.

        Returns:
            Whether it is the row where finished parts of its request are held.
        """
        return False

    def hold_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> None:
        """A branch has ended, and stays where the one that combines it will see it: 0 bytes."""

    def leave_(self, owners: Iterable[int]) -> None:
        """Owners that have nothing in the pools any more."""

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """No branch waits any more to start behind this prefix."""

    def alignment(
        self, packed: PackedQueries, trees: Trees, spans: Sequence[Span], positions_BQ: Tensor
    ) -> AlignmentState | ContinuousDecodingState | None:
        """How the rows of a forward with trees are padded; None if nothing ever is."""
        return None

    # -- the target's rows ------------------------------------------------------------------------

    def place_(self, kv: KVCache, trees: Trees | None, spans: Sequence[Span]) -> PlacedRows:
        """Take slots for all rows of a forward and lay the rows out, trees first."""
        shared = trees.proposal.shared or None if trees is not None and self.packed else None
        of_trees = [] if trees is None else self._tree_runs(trees, shared)
        packed = PackedQueries(kv, [*of_trees, *(run for s in spans for run in self._runs(s))])
        span_slots = []
        at = len(of_trees)
        for span in spans:
            copies = slice(at, at + len(self.rows_of(span.owner)))
            slots_Cn = np.stack(packed.slots[copies])
            flat_Cn = np.stack(packed.flat[copies])
            span_slots.append(SpanSlots(packed.flat[at], slots_Cn, flat_Cn))
            at = copies.stop
        tips = [one.rows[-1] for s, one in zip(spans, span_slots, strict=True) if s.draws]
        histories = trees.segments if trees else None
        fresh = packed.all_slots[: sum(packed.sizes[: len(of_trees)])]
        if trees is not None and trees.bare:
            roots = stand(trees, packed.index[: len(fresh), None], fresh[:, None], self.device)
            rows = self._chains(kv, packed, tips, 0, None, roots)
        else:
            rows = self._chains(kv, packed, tips, len(of_trees), histories)
        if trees is not None:
            if shared:
                rows = grow(rows, trees, packed.index[: len(fresh)], fresh, shared)
            elif not trees.bare:
                flat, slots = (by_node(parts, trees) for parts in (packed.flat, packed.slots))
                rows = grow(rows, trees, flat, slots, None)
            if not self.packed:
                aligned = self.alignment(packed, trees, spans, rows.positions_BQ)
                rows = replace(rows, alignment=aligned)
        bound = [i for i, span in enumerate(s for s in spans if s.draws) if span.bound]
        return PlacedRows(
            replace(rows, bound_tips=tuple(bound)) if bound else rows,
            rows.node_rows_ST,
            rows.node_slots_ST,
            fresh,
            tuple(span_slots),
            packed.paddings,
            sum(packed.paddings),
        )

    def _tree_runs(self, trees: Trees, shared: int | None) -> list[QueryRun]:
        """The trees' rows; where its nodes stand, the pool is told when they are committed.

        Args:
            shared: rows of the drafted nodes of all trees, if they are shared.
        """

        def run(owner: int, size: int, like: int) -> QueryRun:
            row = self.tensor_rows_of(like)[0]
            homes = self.segments.homes(like)
            return QueryRun(row, owner, homes, [0] * size, [0] * size)

        if trees.bare:
            at = zip(trees.owners, trees.roots, trees.positions, strict=True)
            places = ((self.tensor_rows_of(owner)[0], owner, *rest) for owner, *rest in at)
            return [
                QueryRun(row, owner, self.segments.homes(owner), [root], [position])
                for row, owner, root, position in places
            ]
        sizes = trees.proposal.laid_out if shared is None else [0] * len(trees.owners)
        runs = [run(owner, 1 + n, owner) for owner, n in zip(trees.owners, sizes, strict=True)]
        return [*runs, run(UNKNOWN, shared, trees.owners[0])] if shared else runs

    def _runs(self, part: Span | PendingRows) -> Iterator[QueryRun]:
        """One run for each row that has to hold these tokens: several for a prefix's copies."""
        first = part.position
        positions = list(range(first, first + len(part.tokens)))
        homes = self.segments.homes(part.owner)
        for row in self.tensor_rows_of(part.owner):
            yield QueryRun(row, part.owner, homes, part.tokens, positions)

    def _chains(
        self,
        kv: KVCache,
        packed: PackedQueries,
        tips: Sequence[int],
        trees: int = 0,
        histories: Sequence[Sequence[int]] | None = None,
        roots: Roots | None = None,
    ) -> Rows:
        """All rows of a forward as if there were no trees, but for roots without drafts.

        Args:
            trees: how many of the runs, from the first on, are those of trees with drafts.
            histories: for each tree the segments whose history its nodes see; None for its own.
        """
        runs = packed.runs
        owners = [[run.owner] * run.size for run in runs]
        if histories is not None:
            owners[:trees] = [list(segments) for segments in histories]
        ids = sorted({owner for own in owners for owner in own if owner >= 0})
        number = {owner: at for at, owner in enumerate(ids)}
        numbers = [number.get(owner, len(ids)) for own in owners for owner in own]
        told = packed.tokens, packed.positions, packed.all_slots, numbers
        host_CN = packed.spread((0, 0, kv.scratch, len(ids)), told)
        place_3BQ = torch.from_numpy(host_CN[:3].reshape(3, packed.height, packed.queries))
        tokens_BQ, positions_BQ, slots_BQ = place_3BQ.to(self.device).unbind()
        return Rows(
            tokens_BQ,
            positions_BQ,
            slots_BQ,
            self.segments.lineages(ids),
            host_CN[3].astype(np.int32),
            self.members(packed, trees),
            packed.all_slots[sum(packed.sizes[:trees]) :],
            *(no_trees(self.device) if roots is None else roots[:2]),
            self._ids(tips),
            *(() if roots is None else roots[2:]),
        )

    def members(self, packed: PackedQueries, trees: int) -> tuple[QuerySequence, ...]:
        """Who sees what part of the pool: whoever goes on behind the same segments.

        Where the trees' rows are shared, the device alone knows whose they are: then the requests
        that have any are one member.
        """
        shared = any(run.owner < 0 for run in packed.runs[:trees])
        drafted: tuple[int, ...] = ()
        if shared:
            homes_of = (run.homes for run in packed.runs[:trees])
            drafted = tuple(dict.fromkeys(home for homes in homes_of for home in homes))
        parts: dict[tuple[int, ...], list[Ints]] = {}
        for at, (run, flat) in enumerate(zip(packed.runs, packed.flat, strict=True)):
            homes = drafted if shared and at < trees else run.homes
            parts.setdefault(homes, []).append(flat)
        return tuple(
            QuerySequence(np.concatenate(flats, dtype=np.int64), 0, homes)
            for homes, flats in parts.items()
        )

    # -- the drafter's rows -----------------------------------------------------------------------

    def place_draft_(
        self,
        kv: KVCache,
        pending: Sequence[PendingRows],
        active: Sequence[tuple[int, int, int]],
    ) -> DraftRows:
        """The drafter's rows, one after another; they stay, so they are committed.

        Args:
            active: (owner, root position, root token) of each active branch.
        """
        copies = [
            (run, part.features) for part in pending if part.tokens for run in self._runs(part)
        ]
        packed = PackedQueries(kv, [run for run, _ in copies])
        kv.commit_(packed.all_slots, packed.positions)
        runs = zip(packed.runs, packed.flat, strict=True)
        last = {run.owner: int(flat[-1]) for run, flat in runs}
        order = sorted(range(len(copies)), key=lambda i: int(packed.flat[i][0]))
        features = [part for i in order if (part := copies[i][1]) is not None]
        rows = self._chains(kv, packed, [last[one[0]] for one in active])
        number = {owner: at for at, owner in enumerate(rows.visibility.ids_S.tolist())}
        active_S3 = self._ids(active).view(-1, 3)
        return DraftRows(
            replace(rows, alignment=None if self.packed else packed.aligned),
            torch.cat(features) if features else None,
            self._ids(np.concatenate([packed.flat[i] for i in order])),
            np.array([number[one[0]] for one in active], np.int32),
            np.array([one[1] for one in active], np.int32),
            active_S3[:, 1],
            active_S3[:, 2],
            PaddedLayout.of(
                tuple(self.tensor_rows_of(one[0])[0] for one in active), self.packed, self.device
            ),
        )

    def _ids(self, values: Any) -> Tensor:
        return torch.from_numpy(np.array(values, np.int64)).to(self.device)


class RowPerBranch(Layout):
    """Queries [B, longest]: what a branch has less than the longest is padding in front."""

    packed = False

    def __init__(self, device: torch.device, segments: SegmentTree) -> None:
        super().__init__(device, segments)
        self._row: dict[int, int] = {}  # owner of a branch -> its tensor row

    def alignment(
        self, packed: PackedQueries, trees: Trees, spans: Sequence[Span], positions_BQ: Tensor
    ) -> AlignmentState | ContinuousDecodingState | None:
        """Running branches alone, or with newcomers beside them."""
        if not spans:
            return packed.aligned
        length = [0] * packed.height
        prefill = [False] * packed.height
        for owner, position in zip(trees.owners, trees.positions, strict=True):
            length[self._row[owner] - packed.first_row] = position
        for span in reversed(spans):  # the first span of a row says where the row goes on
            for row in self.tensor_rows_of(span.owner):
                length[row - packed.first_row] = span.position
                prefill[row - packed.first_row] = True
        return AlignmentManager.align_continuous_decode(
            packed.aligned, length, prefill, positions_BQ
        )


class BatchingLayout(RowPerBranch):
    """Which branch has which row, and which rows hold a copy of which prefix.

    A row is given back when its branch ends, but its copy of the prefix stays as long as the
    request has branches that wait: they start there without copying anything.

    Parts that are to be combined where they lie are held in one row of their request, that of the
    first one to end; the others are copied into it.
    """

    def __init__(self, device: torch.device, segments: SegmentTree, rows: int) -> None:
        super().__init__(device, segments)
        self.rows = rows
        self._copies: dict[int, list[int]] = {}  # owner of a prefix -> rows that hold it
        self._held: dict[int, tuple[int, int]] = {}  # owner of a held part -> its prefix, its row

    def rows_of(self, owner: int) -> Sequence[int]:
        if owner in self._copies:
            return self._copies[owner]
        return (self._held[owner][1] if owner in self._held else self._row[owner],)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        """A request's prefix gets its first row."""
        self._copies[prefix] = [self._vacate_(pools)]

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """A branch gets a row: that of held parts, one that holds its prefix, or a copy is made."""
        busy = set(self._row.values())
        parts = self._row_of_parts(prefix)
        ready = [row for row in self._copies[prefix] if row not in busy]
        ready.sort(key=lambda row: row != parts)
        if not ready:
            ready = [self._vacate_(pools)]
            for pool in pools:
                source = pool.slots_of(prefix, self._copies[prefix][0])
                if source.size:
                    pool.copy_(source, pool.lowest_free(source.size, ready[0]), "fork")
            self._copies[prefix].append(ready[0])
        self._row[owner] = ready[0]
        return ready[0] == parts

    def hold_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> None:
        """The first part stays in its row, others are copied there; their rows become free."""
        row = self._row.pop(owner)
        target = self._row_of_parts(prefix, row)
        self._held[owner] = prefix, target
        if target == row:
            return
        for pool in pools:
            source = pool.slots_of(owner, row)
            if source.size:
                pool.copy_(source, pool.lowest_free(source.size, target), "attend")
            pool.retire_([owner], row)

    def _vacate_(self, pools: Sequence[KVCache]) -> int:
        """A row that nobody needs; if there is none, a spare copy of some prefix is dropped."""
        busy = self._busy
        used = busy.union(*self._copies.values())
        for row in range(self.rows):
            if row not in used:
                return row
        for prefix, rows in self._copies.items():
            spare = [row for row in rows if row not in busy]
            if spare and len(rows) > 1:
                self._drop_(prefix, spare[0], pools)
                return spare[0]
        raise AssertionError("admission let in more branches than there are rows")

    @property
    def _busy(self) -> set[int]:
        """Rows where branches run or parts are held."""
        return {*self._row.values(), *(row for _, row in self._held.values())}

    def _row_of_parts(self, prefix: int, new: int = -1) -> int:
        """The row where parts of a request are held, or `new`."""
        return next((row for one, row in self._held.values() if one == prefix), new)

    def _drop_(self, prefix: int, row: int, pools: Sequence[KVCache]) -> None:
        self._copies[prefix].remove(row)
        for pool in pools:
            pool.retire_([prefix], row)

    def members(self, packed: PackedQueries, trees: int) -> tuple[QuerySequence, ...]:
        """Each row of the pool by itself, with all its padding."""
        count = packed.height
        size = packed.queries
        first = packed.first_row
        rows = np.arange(count * size).reshape(count, size)
        return tuple(QuerySequence(rows[b], first + b, ()) for b in range(count)) if size else ()

    def leave_(self, owners: Iterable[int]) -> None:
        """Branches and requests that ended have no rows any more."""
        for owner in owners:
            self._row.pop(owner, None)
            self._copies.pop(owner, None)
            self._held.pop(owner, None)

    def prune_(self, prefix: int, pools: Sequence[KVCache]) -> None:
        """Give back copies that no running branch uses and no waiting one will."""
        busy = self._busy
        for row in [r for r in self._copies.get(prefix, ()) if r not in busy]:
            self._drop_(prefix, row, pools)


class PagedLayout(RowPerBranch):
    """Which tensor row a branch has; pools have one row, whose slots everybody shares.

    A prefix is read in the row of a branch that starts behind it. Until there is one, while its
    prompt is read in chunks, it has a row of its own.
    """

    def tensor_rows_of(self, owner: int) -> Sequence[int]:
        return (self._row[owner],)

    def open_(self, prefix: int, size: int, pools: Sequence[KVCache], least: int = 0) -> None:
        super().open_(prefix, size, pools, least)
        self._row[prefix] = self._free_row()

    def enter_(self, owner: int, prefix: int, pools: Sequence[KVCache]) -> bool:
        """A branch gets a row, and takes its slots near those of its prefix."""
        shared = self._row[prefix] in (self._row[one] for one in self._row if one != prefix)
        self._row[owner] = self._free_row() if shared else self._row[prefix]
        self._row[prefix] = self._row[owner]
        for pool in pools:
            pool.near_(owner, prefix)
        return False

    def _free_row(self) -> int:
        taken = {*self._row.values()}
        return next(row for row in range(len(taken) + 1) if row not in taken)

    def leave_(self, owners: Iterable[int]) -> None:
        """Branches and requests that ended have no rows any more."""
        for owner in owners:
            self._row.pop(owner, None)
