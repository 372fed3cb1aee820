"""Random forwards over random segments: trees and prompts anywhere in a pool, and who sees whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from specsot.ops.attention.metadata import QuerySequence
from specsot.ops.kv.pool import KVCache
from specsot.ops.types import Proposal, Rows
from specsot.states.layout import BatchingLayout, Layout, PackedQueries
from specsot.states.request_table import SegmentTree
from specsot.states.round import Span, Trees

KV_HEADS, HEADS, DIM = 2, 4, 4
CPU = torch.device("cpu")


class FixedLayout(Layout):
    """Every segment lies where `places` says; one sequence if there is only row 0."""

    def __init__(self, segments: SegmentTree, places: dict[int, list[int]], packed: bool) -> None:
        super().__init__(CPU, segments)
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
    """A forward of trees and prompts over a pool in which anything may lie anywhere."""
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
    layout = FixedLayout(segments, places, packed=pool_rows == 1)
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
    """For every row that stands for something the slots that it may attend to."""
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
