"""Forwards made by hand or at random, what their rows may see, and attention written out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specsot.ops.attention.backends import AttentionBackend, AttentionPlan, backend
from specsot.ops.attention.metadata import (
    AttentionBatch,
    AttentionMetadata,
    QuerySequence,
    TreeMask,
    Visibility,
)
from specsot.ops.kv.pool import NO_SEGMENT, KVCache
from specsot.ops.types import Proposal, Rows, no_trees
from specsot.states.layout import BatchingLayout, Layout, PackedQueries
from specsot.states.request_table import SegmentTree
from specsot.states.round import Span, Trees


def plain(folded_BgQd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, attn_mask: Tensor) -> Tensor:
    scaled_BgQd = folded_BgQd * keys_BgKd.shape[-1] ** -0.5
    return torch.softmax(scaled_BgQd @ keys_BgKd.transpose(-1, -2) + attn_mask, -1) @ values_BgKd


def metadata_of(
    kv: KVCache,
    sequences: Sequence[QuerySequence],
    visibility: Visibility | None = None,
    segment_N: Sequence[int] = (),
    *,
    equal_lengths: bool = False,
    isolated: bool = False,
) -> AttentionMetadata:
    """A forward whose rows all have a late position; with `isolated`, trees share their rows."""
    rows = 1 + max((int(one.rows[-1]) for one in sequences if len(one.rows)), default=-1)
    none_12 = np.zeros((1, 2), np.int32)
    tree = TreeMask(
        none_12,
        none_12,
        torch.ones(1, 2, 2, dtype=torch.bool),
        torch.zeros(1, 2, dtype=torch.int64),
        segment_R=torch.zeros(2, dtype=torch.int64),
    )
    if visibility is None:
        visibility = Visibility(np.zeros(0, np.int32), np.zeros((0, 1), np.int32), ())
    return AttentionMetadata(
        kv=kv,
        sequences=tuple(sequences),
        visibility=visibility,
        segment_N=np.array(segment_N or [0] * rows, np.int32),
        positions_N=torch.full((rows,), 1 << 20),
        readable=kv.committed,
        tree=tree if isolated else None,
        equal_lengths=equal_lengths,
    )


def batches(
    kv: KVCache,
    sequences: Sequence[QuerySequence],
    name: str,
    *,
    equal_lengths: bool = False,
    isolated: bool = False,
) -> list[AttentionBatch]:
    """Sequences as a backend puts them side by side."""
    metadata = metadata_of(kv, sequences, equal_lengths=equal_lengths, isolated=isolated)
    return backend(name).batches(metadata, sequences)


class PlainBackend(AttentionBackend):
    """Groups as another backend plans them, attended to by `plain`."""

    attend = staticmethod(plain)


def attended(plan: AttentionPlan, q_Nhd: Tensor, kv: KVCache) -> Tensor:
    """The output of the first layer for these queries -> [N, heads * d]; plain where it can be."""
    positions_N = torch.zeros(len(q_Nhd), dtype=torch.int64)
    heads = q_Nhd.shape[1]
    layer = plan.for_layers(positions_N, heads // kv.data.shape[2], q_Nhd.dtype)
    runner = layer.backend if plan.merged else PlainBackend()
    return runner.run(q_Nhd, *kv.layers[0], layer)


def attend(
    runner: AttentionBackend, q_BQhd: Tensor, keys_BgKd: Tensor, values_BgKd: Tensor, mask: Tensor
) -> Tensor:
    """[B, Q, heads, d], a backend's attention to these keys and values, sequence by sequence."""
    rows, kv_heads, length, dim = keys_BgKd.shape
    pools = [part.transpose(0, 1).reshape(kv_heads, -1, dim) for part in (keys_BgKd, values_BgKd)]
    plan = AttentionPlan.dense(mask, torch.zeros(1, length), stride=length)
    positions_N = torch.zeros(rows * q_BQhd.shape[1], dtype=torch.int64)
    layer = plan.for_layers(positions_N, q_BQhd.shape[2] // kv_heads, q_BQhd.dtype)
    return runner.run(q_BQhd.flatten(0, 1), *pools, layer).view(q_BQhd.shape)


def drawn(mask_QK: Any) -> str:
    """A mask as a picture: one line per query row, `#` where it sees the slot."""
    return "\n".join("".join("#" if cell else "." for cell in row) for row in mask_QK)


def pool(capacity: int = 64) -> KVCache:
    return KVCache(1, 1, 2, capacity)


def lineages_of(parents: Mapping[int, int]) -> Visibility:
    """Of segments by their parents; NO_SEGMENT is a root's."""
    paths = []
    for segment in sorted(parents):
        paths.append([segment])
        while parents[paths[-1][-1]] != NO_SEGMENT:
            paths[-1].append(parents[paths[-1][-1]])
    path_SA = np.full((len(paths), max(map(len, paths), default=1)), NO_SEGMENT, np.int32)
    for row, path in zip(path_SA, paths, strict=True):
        row[: len(path)] = path
    ids = sorted(parents)
    return Visibility(np.array(ids, np.int32), path_SA, tuple((path[-1],) for path in paths))


@dataclass
class Forward:
    """Rows of one forward in a pool with one row; trees come first, as layouts have them. parents:
    of every segment. above_STT: bool [T, T] of each tree, which nodes are above which."""

    kv: KVCache
    parents: Mapping[int, int]
    owners: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    trees: list[list[int]] = field(default_factory=list)  # rows
    above_STT: list[Tensor] = field(default_factory=list)

    def root(self, segment: int) -> int:
        while self.parents[segment] != NO_SEGMENT:
            segment = self.parents[segment]
        return segment

    def history(self, owners: Sequence[int], positions: Sequence[int]) -> None:
        slots = self.kv.append_(owners, positions, home=[self.root(one) for one in owners])
        self.kv.commit_(slots, positions)

    def add_tree(self, owner: int, start: int, above_TT: Tensor) -> None:
        """A tree whose nodes all have a row, its root at position `start`."""
        count = len(above_TT)
        self.trees.append(list(range(len(self.owners), len(self.owners) + count)))
        self.above_STT.append(above_TT)
        depths = (above_TT.long().sum(1) - 1).tolist()
        self._add(owner, [start + depth for depth in depths], [0] * count, ())

    def add_prompt(self, owner: int, positions: Sequence[int], slots: Sequence[int] = ()) -> None:
        """Rows that are in no tree; they take slots unless they have some."""
        self._add(owner, positions, positions, slots)

    def _add(
        self, owner: int, positions: Sequence[int], labels: Sequence[int], slots: Sequence[int]
    ) -> None:
        owners = [owner] * len(positions)
        if not len(slots):
            slots = self.kv.append_(owners, labels, home=self.root(owner)).tolist()
        self.owners += owners
        self.positions += positions
        self.slots += slots

    def rows(self) -> Rows:
        lineages = lineages_of(self.parents)
        flat = np.array(self.trees, np.int32)
        parts: dict[int, list[int]] = {}
        for row, owner in enumerate(self.owners):
            parts.setdefault(self.root(owner), []).append(row)
        nodes_ST, ancestors_STT = no_trees(torch.device("cpu"))
        more: dict[str, Any] = {}
        if self.trees:
            nodes_ST, ancestors_STT = torch.from_numpy(flat).long(), torch.stack(self.above_STT)
            more = {"node_rows_ST": flat, "node_slots_ST": np.array(self.slots, np.int32)[flat]}
        return Rows(
            torch.zeros(1, len(self.owners), dtype=torch.int64),
            torch.tensor([self.positions]),
            torch.tensor([self.slots]),
            lineages,
            np.searchsorted(lineages.ids_S, self.owners).astype(np.int32),
            tuple(QuerySequence(np.array(rows), 0, (root,)) for root, rows in parts.items()),
            np.array(self.slots[flat.size :], np.int32),
            nodes_ST,
            ancestors_STT,
            torch.tensor([], dtype=torch.int64),
            **more,
        )


def sight(attention: AttentionPlan, kv: KVCache, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [N, slots], what each row sees, whatever groups say it, and int64, the position that it
    sees each slot at (-1 where its group does not have the slot). A row is in one group at most, or
    sees each slot in one of its groups; one that is repeated says the same twice."""
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


KV_HEADS, HEADS, DIM = 2, 4, 4
CPU = torch.device("cpu")


class FixedLayout(Layout):
    """Every segment lies where `places` says; one sequence if there is only row 0."""

    def __init__(
        self, kv: KVCache, segments: SegmentTree, places: dict[int, list[int]], packed: bool
    ) -> None:
        super().__init__([kv], segments)
        self.places, self.packed = places, packed

    def rows_of(self, owner: int) -> Sequence[int]:
        return self.places[owner]

    def sequences(self, packed: PackedQueries, num_trees: int) -> tuple[QuerySequence, ...]:
        if self.packed:
            return super().sequences(packed, num_trees)
        return BatchingLayout.sequences(self, packed, num_trees)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Scene:
    """A forward and what it was made of; `trees` says which rows of it are nodes."""

    kv: KVCache
    segments: SegmentTree
    rows: Rows
    trees: Trees | None
    spans: list[Span]


def proposal_of(
    draw: Random, trees: int, nodes: int, shared: bool = False, ragged: bool = False
) -> Proposal:
    """Random trees; with `shared` some nodes are padding, and the others share their rows; with
    `ragged` the host knows of each tree how many of its nodes, the first ones, are not."""
    parents = [[draw.randrange(-1, n) for n in range(nodes)] for _ in range(trees)]
    parents_SN = torch.tensor(parents, dtype=torch.int64)
    depths_SN, valid_SN = torch.ones_like(parents_SN), torch.ones_like(parents_SN, dtype=torch.bool)
    sizes = [draw.randint(0, nodes) for _ in range(trees)] if ragged else []
    for tree in range(trees):
        for node, parent in enumerate(parents_SN[tree].tolist()):
            valid_SN[tree, node] = not shared or draw.random() < 0.7
            valid_SN[tree, node] &= not ragged or node < sizes[tree]
            if parent >= 0:
                depths_SN[tree, node] = depths_SN[tree, parent] + 1
                valid_SN[tree, node] &= valid_SN[tree, parent]
    tokens_SN = 10 + torch.arange(trees * nodes).view(trees, nodes)
    budget = max(int(valid_SN.sum()), min(nodes, 1)) + draw.randrange(2) * bool(nodes)
    scores_SN, rows = -depths_SN.float(), budget if shared else None
    drafts = tokens_SN, parents_SN, depths_SN, valid_SN, scores_SN
    return Proposal(*drafts, nodes, shared=rows, sizes=tuple(sizes) if ragged else None)


def scene(draw: Random, pool_rows: int, shared: bool = False, ragged: bool = False) -> Scene:
    segments = SegmentTree()
    ids = [segments.add() for _ in range(draw.randint(1, 4))]
    ids += [segments.add(draw.choice(ids)) for _ in range(draw.randint(0, 6))]
    kv = KVCache(
        *(1, KV_HEADS, DIM, 256 if pool_rows == 1 else 96, pool_rows),
        block_size=draw.choice([1, 4, 16]),
        dtype=torch.float64,
    )
    places = {s: draw.sample(range(pool_rows), draw.randint(1, pool_rows)) for s in ids}
    _fill_(kv, segments, ids, draw)
    layout = FixedLayout(kv, segments, places, packed=pool_rows == 1)
    owners = draw.sample(ids, draw.randint(0, min(len(ids), 3)))
    trees = None
    if owners:
        proposal = proposal_of(draw, len(owners), draw.randint(0, 4), shared, ragged)
        roots, positions = zip(
            *((draw.randrange(9), draw.randrange(24)) for _ in owners), strict=True
        )
        trees = Trees(roots, positions, owners, (), proposal)
    others = [s for s in ids if s not in owners]
    starting = draw.sample(others, draw.randint(0 if owners else min(1, len(others)), len(others)))
    spans = [
        Span(s, segments.home[s], draw.randrange(24), [7] * draw.randint(1, 5)) for s in starting
    ]
    rows = layout.place_(kv, trees, spans).rows
    kv.data.normal_(generator=torch.Generator().manual_seed(draw.randrange(1 << 20)))
    return Scene(kv, segments, rows, trees, spans)


def _fill_(kv: KVCache, segments: SegmentTree, ids: list[int], draw: Random) -> None:
    """What earlier rounds left behind: committed rows and others, with holes, in any order."""
    for root in {segments.home[s] for s in ids}:
        if draw.random() < 0.7:
            kv.open_(root, draw.choice([32, 32, 64]))
    for _ in range(draw.randint(0, 14)):
        segment, count = draw.choice(ids), draw.randint(1, 5)
        positions = [draw.randrange(24) for _ in range(count)]
        row = draw.randrange(kv.rows)
        slots = kv.append_([segment] * count, positions, row, segments.home[segment])
        if draw.random() < 0.8:
            kv.commit_(slots, positions)
        kv.release_([slot for slot in slots if draw.random() < 0.2])


# -- who sees whom, naively ----------------------------------------------------------------------


def seen_slots(one: Scene) -> dict[int, set[int]]:
    rows, kv = one.rows, one.kv
    nodes = _nodes(one)
    slot_N, position_N = rows.slots_BQ.view(-1).tolist(), rows.positions_BQ.view(-1).tolist()
    prompts = set(rows.prompt_slots.tolist())
    segment_N = rows.owner_N.tolist()
    seen = {}
    for row, slot in enumerate(slot_N):
        segment = nodes[row][0] if row in nodes else segment_N[row]
        if slot == kv.scratch or segment < 0:
            continue
        path = one.segments.path(segment)
        first = slot // kv.capacity * kv.capacity
        seen[row] = {
            other
            for other in range(first, first + kv.capacity)
            if kv.owner[other] in path
            and (kv.committed[other] or other in prompts)
            and kv.position[other] <= position_N[row]
        }
        if row in nodes:
            seen[row] |= {slot_N[ancestor] for ancestor in nodes[row][1]}
    return seen


def _nodes(one: Scene) -> dict[int, tuple[int, list[int]]]:
    """Row of a node -> its segment, and the rows of its ancestors, its own among them."""
    if one.trees is None:
        return {}
    found, proposal = {}, one.trees.proposal
    row_ST = one.rows.nodes_ST.tolist()
    for tree, (segment, parents) in enumerate(
        zip(one.trees.owners, proposal.parents_SN.tolist(), strict=True)
    ):
        above = {0: [row_ST[tree][0]]}
        found[row_ST[tree][0]] = segment, above[0]
        for node, parent in enumerate(parents):
            if proposal.valid_SN[tree, node] or not (proposal.sizes or one.rows.packed_trees):
                row = row_ST[tree][node + 1]
                above[node + 1] = [*above[parent + 1], row]
                found[row] = segment, above[node + 1]
    return found


def attend_naively(one: Scene, q_Nhd: Tensor) -> dict[int, Tensor]:
    """Row -> softmax over the slots that it may see, [heads * d]."""
    keys_hKd, values_hKd = one.kv.data[0]
    out = {}
    for row, slots in seen_slots(one).items():
        at = torch.from_numpy(np.array(sorted(slots), np.int64))
        parts = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores_K = keys_hKd[kv_head, at] @ q_Nhd[row, head] * DIM**-0.5
            parts.append(scores_K.softmax(0) @ values_hKd[kv_head, at])
        out[row] = torch.cat(parts)
    return out
