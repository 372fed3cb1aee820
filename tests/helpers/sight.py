"""Forwards that are put together by hand, and what their rows may see, read naively."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specsot.ops.attention.backends import AttentionPlan
from specsot.ops.attention.metadata import QuerySequence, Visibility
from specsot.ops.kv.pool import NOBODY, UNKNOWN, KVCache
from specsot.ops.types import PackedTrees, Rows, no_trees


def drawn(mask_QK: Any) -> str:
    """A mask as a picture: one line per query row, `#` where it sees the slot."""
    return "\n".join("".join("#" if cell else "." for cell in row) for row in mask_QK)


def pool(capacity: int = 64) -> KVCache:
    return KVCache(1, 1, 2, capacity)


def lineages_of(parents: Mapping[int, int]) -> Visibility:
    """Of segments by their parents; NOBODY is a root's."""
    paths = []
    for segment in sorted(parents):
        paths.append([segment])
        while parents[paths[-1][-1]] != NOBODY:
            paths[-1].append(parents[paths[-1][-1]])
    path_SA = np.full((len(paths), max(map(len, paths), default=1)), NOBODY, np.int32)
    for row, path in zip(path_SA, paths, strict=True):
        row[: len(path)] = path
    ids = sorted(parents)
    return Visibility(np.array(ids, np.int32), path_SA, tuple((path[-1],) for path in paths))


@dataclass
class Forward:
    """Rows of one forward in a pool with one row; trees come first, as layouts have them.

    parents: of every segment. Trees have `above` each, [T, T] which nodes are above which; the
    nodes that are not `valid` have no row where the trees share theirs.
    """

    kv: KVCache
    parents: Mapping[int, int]
    owners: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    trees: list[tuple[int, int, list[int]]] = field(default_factory=list)  # owner, start, rows
    above_STT: list[Tensor] = field(default_factory=list)
    forest: dict[str, Any] = field(default_factory=dict)

    def root(self, segment: int) -> int:
        while self.parents[segment] != NOBODY:
            segment = self.parents[segment]
        return segment

    def history(self, owners: Sequence[int], positions: Sequence[int]) -> None:
        """Committed slots, in this order."""
        slots = self.kv.append_(owners, positions, home=[self.root(one) for one in owners])
        self.kv.commit_(slots, positions)

    def add_tree(self, owner: int, start: int, above_TT: Tensor) -> None:
        """A tree whose nodes all have a row, its root at position `start`."""
        count = len(above_TT)
        slots = self.kv.append_([owner] * count, [0] * count, home=self.root(owner))
        depths = (above_TT.long().sum(1) - 1).tolist()
        self._add(owner, start, above_TT, slots.tolist(), [start + depth for depth in depths])

    def _add(
        self, owner: int, start: int, above_TT: Tensor, slots: list[int], positions: list[int]
    ) -> None:
        rows = list(range(len(self.owners), len(self.owners) + len(slots)))
        self.trees.append((owner, start, rows))
        self.above_STT.append(above_TT)
        self.owners += [owner] * len(slots)
        self.positions += positions
        self.slots += slots

    def share_trees(
        self, trees: Sequence[tuple[int, int]], above_STT: Tensor, valid_SN: Tensor, shared: int
    ) -> None:
        """All trees of the forward, (owner, start) each: the roots, then the valid nodes' rows, and
        what is left of `shared` is nobody's."""
        made, first = PackedTrees.of(valid_SN, shared), self.root(trees[0][0])
        roots = [int(self.kv.append_([o], [0], home=self.root(o))[0]) for o, _ in trees]
        drafted = self.kv.append_([UNKNOWN] * shared, [0] * shared, home=first).tolist()
        self.slots, self.above_STT = [*roots, *drafted], list(above_STT)
        tree_R, node_R = made.tree_R.tolist(), made.node_R.tolist()
        for tree, node in zip(tree_R, node_R, strict=True):
            self.owners.append(trees[tree][0] if tree >= 0 else NOBODY)
            depth = int(above_STT[tree, node].sum()) - 1
            self.positions.append(trees[tree][1] + depth if tree >= 0 else 0)
        for tree, (owner, start) in enumerate(trees):
            rows = [r for r, one in enumerate(tree_R) if one == tree]
            self.trees.append((owner, start, rows))
        self.forest = {"packed_trees": made, "node_R": node_R}

    def add_prompt(self, owner: int, positions: Sequence[int], slots: Sequence[int] = ()) -> None:
        """Rows that are in no tree; they take slots unless they have some."""
        if not len(slots):
            slots = self.kv.append_(
                [owner] * len(positions), positions, home=self.root(owner)
            ).tolist()
        self.owners += [owner] * len(positions)
        self.positions += positions
        self.slots += slots

    @property
    def in_trees(self) -> int:
        return len(self.forest["node_R"]) if self.forest else sum(len(r) for _, _, r in self.trees)

    def members(self) -> tuple[QuerySequence, ...]:
        """The rows of a request; those of all trees if they are shared."""
        parts: dict[tuple[int, ...], list[int]] = {}
        drafted = tuple(dict.fromkeys(self.root(owner) for owner, _, _ in self.trees))
        for row, owner in enumerate(self.owners):
            shared = self.forest and row < self.in_trees
            alone = (self.root(owner),) if owner >= 0 else ()
            parts.setdefault(drafted if shared else alone, []).append(row)
        return tuple(QuerySequence(np.array(rows), 0, roots) for roots, rows in parts.items())

    def rows(self) -> Rows:
        segments = {s: self.parents[s] for s in sorted({*self.owners} - {NOBODY})}
        lineages = lineages_of({s: p for one in segments for s, p in self._path(one)})
        number = {segment: at for at, segment in enumerate(lineages.ids_S.tolist())}
        segment_N = np.array([number.get(one, len(number)) for one in self.owners], np.int32)
        nodes_ST, ancestors_STT = no_trees(torch.device("cpu"))
        more: dict[str, Any] = {}
        if self.forest:
            count, made = self.in_trees, self.forest["packed_trees"]
            nodes_ST, ancestors_STT = made.nodes_ST, torch.stack(self.above_STT)
            more = {"packed_trees": made, "tree_segment_R": torch.tensor(segment_N[:count]).long()}
            more |= {"node_rows_ST": np.arange(count, dtype=np.int32)}
            more |= {"node_slots_ST": np.array(self.slots[:count], np.int32)}
            segment_N[len(self.trees) : count] = len(number)
        elif self.trees:
            flat = np.array([rows for _, _, rows in self.trees], np.int32)
            nodes_ST, ancestors_STT = torch.from_numpy(flat).long(), torch.stack(self.above_STT)
            more = {"node_rows_ST": flat, "node_slots_ST": np.array(self.slots, np.int32)[flat]}
        return Rows(
            torch.zeros(1, len(self.owners), dtype=torch.int64),
            torch.tensor([self.positions]),
            torch.tensor([self.slots]),
            lineages,
            segment_N,
            self.members(),
            np.array(self.slots[self.in_trees :], np.int32),
            nodes_ST,
            ancestors_STT,
            torch.tensor([], dtype=torch.int64),
            **more,
        )

    def rows_of_pool(self, height: int, first_row: int) -> Rows:
        """The rows as those of several rows of the pool, side by side."""
        rows, size = self.rows(), len(self.owners) // height
        flat = np.arange(len(self.owners)).reshape(height, size)
        members = tuple(QuerySequence(flat[b], first_row + b, ()) for b in range(height))
        three = (rows.tokens_BQ, rows.positions_BQ, rows.slots_BQ)
        tokens_BQ, positions_BQ, slots_BQ = (value.view(height, size) for value in three)
        return replace(
            rows,
            tokens_BQ=tokens_BQ,
            positions_BQ=positions_BQ,
            slots_BQ=slots_BQ,
            sequences=members,
            prompt_slots=rows.prompt_slots[rows.prompt_slots != self.kv.scratch],
        )

    def _path(self, segment: int) -> Iterator[tuple[int, int]]:
        while segment != NOBODY:
            yield segment, self.parents[segment]
            segment = self.parents[segment]

    def naive(self) -> np.ndarray:
        """bool [N, slots]: a row sees committed and prompt slots of its way to the root that do not
        lie behind it, and of trees its ancestors and itself."""
        kv, fresh = self.kv, {s: r for r, s in enumerate(self.slots)}
        seen = np.zeros((len(self.owners), kv.slots), bool)
        node_of = {
            row: (tree, self.forest["node_R"][row] if self.forest else rows.index(row))
            for tree, (_, _, rows) in enumerate(self.trees)
            for row in rows
        }
        for row, owner in enumerate(self.owners):
            path = [segment for segment, _ in self._path(owner)]
            for slot in range(kv.slots):
                other = fresh.get(slot)
                if other is None or other >= self.in_trees:
                    near = kv.position[slot] <= self.positions[row]
                    there = kv.committed[slot] or other is not None
                    seen[row, slot] = there and near and kv.owner[slot] in path
                elif other in node_of and row in node_of:
                    (tree, node), (mine, at) = node_of[other], node_of[row]
                    seen[row, slot] = tree == mine and bool(self.above_STT[tree][at, node])
                else:
                    seen[row, slot] = other == row  # a row that is nobody's sees itself
        return seen


def sight(attention: AttentionPlan, kv: KVCache, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [N, slots], what each row sees, whatever groups say it, and int64, the position that it
    sees each slot at (-1 where its group does not have the slot).

    A row is in one group at most, or sees each slot in one of its groups; one that is repeated says
    the same twice.
    """
    seen, place = np.zeros((rows, kv.slots + 1), bool), np.full((rows, kv.slots + 1), -1)
    group_of: dict[tuple[int, int], tuple[int, int]] = {}
    told: set[tuple[int, int, int]] = set()
    for number, group in enumerate(attention.groups):
        keys = group.keys
        slots_GK = keys.numpy() if isinstance(keys, Tensor) else keys.slots_GK
        shape = group.host_rows_Gq.shape
        rows_Gq = group.rows_Gq
        assert rows_Gq is None or (rows_Gq.numpy() == group.host_rows_Gq).all()
        assert rows_Gq is not None or group.host_rows_Gq.reshape(-1).tolist() == list(range(rows))
        for g, q in np.ndindex(shape):
            row = int(group.host_rows_Gq[g, q])
            again = group_of.setdefault((row, number if attention.merged else 0), (number, g))
            assert again == (number, g), "a row in two groups"
            mask_K, slots_K = group.mask_GqK[g, q].numpy(), slots_GK[g]
            if (row, number, g) not in told:
                assert not seen[row, slots_K[mask_K]].any(), "a slot that is seen twice"
                assert len(set(slots_K[mask_K].tolist())) == mask_K.sum(), "a slot seen twice"
            told.add((row, number, g))
            seen[row, slots_K[mask_K]] = True
            other_K = mask_K | (place[row, slots_K] < 0)
            place[row, slots_K[other_K]] = group.positions_GK[g].numpy()[other_K]
    assert not seen[:, kv.slots].any(), "nobody sees the scratch slot"
    return seen[:, : kv.slots], place[:, : kv.slots]
