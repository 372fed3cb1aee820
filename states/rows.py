"""Runs of query rows and how they are laid side by side in the tensor rows of a forward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.metadata import tensor
from ..ops.kv.pool import KVCache
from ..ops.kv.slots import Ints
from ..ops.row_layout import AlignmentManager, AlignmentState, LiveNodes, pack_trees, packed_places
from ..ops.tree import ancestors
from ..ops.types import NO_WORK, DraftWork, Proposal, Rows
from .request import Branch, Request
from .text.tokens import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """Prefill rows of one segment, in reading order.

    request: prefix owner of the request whose prompt the rows belong to. draws: whether the last
    row's logits draw a root token; bound: whether a grammar restricts it. chunks: document chunks
    in `tokens`.
    """

    owner: int
    request: int
    position: int
    tokens: Sequence[int]
    draws: bool = False
    bound: bool = False
    chunks: tuple[Chunk, ...] = ()

    @property
    def positions(self) -> list[int]:
        return list(range(self.position, self.position + len(self.tokens)))


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Committed rows that the drafter has not read yet.

    The row at `position + i` has the token `tokens[i]` and, for drafters that read features,
    `features[i]` [F]; the drafter defines how they are paired.
    """

    owner: int
    position: int
    tokens: Sequence[int]
    features: Tensor | None

    def before(self, position: int) -> "PendingRows":
        """The rows before a position."""
        count = max(position - self.position, 0)
        features = None if self.features is None else self.features[:count]
        return PendingRows(self.owner, self.position, self.tokens[:count], features)


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one segment; homes: of all that they may see, its own first."""

    row: int
    owner: int
    homes: tuple[int, ...]
    tokens: Sequence[int]
    positions: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.tokens)


class PackedQueries:
    """Runs of a forward side by side, right-aligned in B tensor rows of Q queries.

    Attributes:
        first_row, height, queries: of the tensors; tensor row b is the pool's `first_row + b`.
        flat, slots: int32, flat row indices and pool slots of each run, in the given order.
        index, all_slots: the same of all runs, one after another.
        tokens, positions: of all runs.
        paddings: the padding in front of each tensor row.
    """

    def __init__(self, kv: KVCache, runs: Sequence[QueryRun]) -> None:
        self.runs = runs
        lengths: dict[int, int] = {}
        for run in runs:
            lengths[run.row] = lengths.get(run.row, 0) + run.size
        self.first_row = min(lengths, default=0)
        self.height = max(lengths, default=0) - self.first_row + 1
        self.queries = max(lengths.values(), default=0)
        self.paddings = tuple(
            self.queries - lengths.get(self.first_row + b, 0) for b in range(self.height)
        )
        self.sizes = [run.size for run in runs]
        self.tokens = [token for run in runs for token in run.tokens]
        self.positions = [position for run in runs for position in run.positions]
        self.index, self.all_slots = self._index(), self._append_(kv)
        ends = [0, *accumulate(self.sizes)]
        parts = [slice(*pair) for pair in pairwise(ends)]
        self.flat = [self.index[part] for part in parts]
        self.slots = [self.all_slots[part] for part in parts]

    @property
    def aligned(self) -> AlignmentState:
        """How the rows are padded."""
        return AlignmentManager.align_for_decode([self.queries - n for n in self.paddings])

    def _index(self) -> Ints:
        if self.height == 1:  # one after another, without padding
            return np.arange(self.queries, dtype=np.int32)
        cursor = [b * self.queries + n for b, n in enumerate(self.paddings)]
        flat = list[Ints]()
        for run in self.runs:
            start = cursor[run.row - self.first_row]
            cursor[run.row - self.first_row] += run.size
            flat.append(np.arange(start, start + run.size, dtype=np.int32))
        return joined(flat)

    def _append_(self, kv: KVCache) -> Ints:
        whose_3 = [(run.owner, run.homes[0], run.row) for run in self.runs]
        whose_R3 = np.array(whose_3, np.int32).reshape(-1, 3).repeat(self.sizes, 0)
        owners, homes, rows = whose_R3.T
        return kv.append_(owners, self.positions, rows if kv.rows > 1 else 0, homes)

    def spread(
        self, empty_C: Sequence[int], values_C: Sequence[Sequence[int] | Ints]
    ) -> npt.NDArray[np.int64]:
        """int64 [C, B * Q]: values of all rows, one run after another, and what is in the
        padding."""
        if self.height == 1:  # one after another, without padding
            return np.array(values_C, np.int64)
        out = np.empty((len(empty_C), self.height * self.queries), np.int64)
        for own, empty, values in zip(out, empty_C, values_C, strict=True):
            if len(self.index) < len(own):
                own.fill(empty)
            own[self.index] = values
        return out


def joined(parts: Sequence[Ints]) -> Ints:
    """All of them, one after another; there may be none."""
    return np.concatenate([*parts, np.zeros(0, np.int32)])


@dataclass(frozen=True, slots=True)
class Trees:
    """The active branches as roots of token trees: host ints, in the proposal's order.

    segments: for each tree those that its nodes see the history of, if not all see its owner's.
    """

    roots: Sequence[int]
    positions: Sequence[int]
    owners: Sequence[int]
    bound: tuple[int, ...]
    proposal: Proposal
    segments: Sequence[Sequence[int]] | None = None

    @property
    def nodes(self) -> int:
        """T, the roots counted."""
        return self.proposal.tokens_SN.shape[1] + 1

    @property
    def bare(self) -> bool:
        """Whether there are roots only, of which the host knows everything."""
        return self.nodes == 1 and self.segments is None


@dataclass(frozen=True, slots=True)
class SpanSlots:
    """Where a span lies: flat row indices (of one copy), and the slots and the flat row indices of
    all its copies, each [C, n]."""

    rows: Ints
    slots_Cn: Ints
    flat_Cn: Ints


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a forward and where they went.

    tree_rows, tree_slots: flat indices and slots of the trees' nodes, each [S, T]; [R] while their
        owners are known on the device alone (`with_host_tokens`).
    fresh: all slots of trees.
    paddings: rows in front of each tensor row that stand for nothing; padding: how many of all
        rows do.
    """

    rows: Rows
    tree_rows: Ints
    tree_slots: Ints
    fresh: Ints
    spans: tuple[SpanSlots, ...]
    paddings: tuple[int, ...]
    padding: int

    def with_host_tokens(self, tokens_ST: npt.NDArray[np.int64]) -> "PlacedRows":
        """The same after the round's read, which says whose the shared rows are, and which rows of
        trees stand for nothing.

        Args:
            tokens_ST: the trees' tokens, -1 for what is padding.
        """
        has_ST = tokens_ST >= 0
        padding = self.padding + self.fresh.size - int(np.count_nonzero(has_ST))
        if self.tree_rows.ndim == 2:
            return self if padding == self.padding else replace(self, padding=padding)
        place_ST = packed_places(has_ST)
        rows_ST = self.tree_rows[place_ST]
        slots_ST = self.tree_slots[place_ST]
        return replace(self, padding=padding, tree_rows=rows_ST, tree_slots=slots_ST)


class Roots(NamedTuple):
    """Trees without drafts, as `Rows` has them."""

    nodes_ST: Tensor
    ancestors_STT: Tensor
    node_rows_ST: Ints
    node_slots_ST: Ints
    bound_trees: tuple[int, ...]


def stand(trees: Trees, flat_ST: Ints, slots_ST: Ints, device: torch.device) -> Roots:
    """Roots without drafts, of whose rows the host knows everything."""
    nodes_ST = tensor(flat_ST, device)
    ancestors_STT = torch.ones_like(nodes_ST, dtype=torch.bool)[..., None]
    return Roots(nodes_ST, ancestors_STT, flat_ST, slots_ST, trees.bound)


def by_node(parts: Sequence[Ints], trees: Trees) -> Ints:
    """Runs of the trees -> [S, T]; a node without a row has its root's."""
    whole_ST = np.empty((len(trees.owners), trees.nodes), np.int32)
    for own_T, part in zip(whole_ST, parts, strict=False):
        own_T[: len(part)] = part
        own_T[len(part) :] = part[0]
    return whole_ST


def grow(rows: Rows, trees: Trees, flat: Ints, slots: Ints, shared: int | None) -> Rows:
    """The rows with the trees' tokens and positions in them.

    Args:
        flat, slots: of the trees' nodes, as in `PlacedRows`.
    """
    proposal = trees.proposal
    device = rows.tokens_BQ.device
    told_2S1 = np.array([trees.roots, trees.positions], np.int64)[..., None]
    root_S1, start_S1 = tensor(told_2S1, device).unbind()
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
        return _share(rows, trees, tokens_ST, positions_ST, shared)
    nodes_ST = tensor(flat, device)
    if proposal.sizes is not None:  # what has no row of its own leaves its root's as it is
        has_ST = F.pad(proposal.valid_SN, (1, 0), value=True)
        tokens_ST = tokens_ST.where(has_ST, root_S1)
        positions_ST = positions_ST.where(has_ST, start_S1)
        live = LiveNodes.of(flat, proposal.sizes, device)
        rows = replace(rows, live=live)
    rows.tokens_BQ.view(-1)[nodes_ST] = tokens_ST
    rows.positions_BQ.view(-1)[nodes_ST] = positions_ST
    return replace(rows, nodes_ST=nodes_ST)


def _share(rows: Rows, trees: Trees, tokens_ST: Tensor, positions_ST: Tensor, shared: int) -> Rows:
    """Rows that begin with the trees, each with the node that it belongs to."""
    forest = pack_trees(trees.proposal.valid_SN, shared)
    part = slice(len(forest.tree_R))
    device = tokens_ST.device
    numbers = {segment: number for number, segment in enumerate(rows.visibility.ids_S.tolist())}
    number_S = torch.as_tensor([numbers[owner] for owner in trees.owners], device=device)
    rows.tokens_BQ[0, part] = forest.pick(tokens_ST, 0)
    rows.positions_BQ[0, part] = forest.pick(positions_ST, 0)
    segment_R = forest.pick(number_S[:, None].expand(tokens_ST.shape), len(numbers))
    return replace(rows, nodes_ST=forest.nodes_ST, packed_trees=forest, tree_segment_R=segment_R)


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one target forward and their owners; on the blackboard until it is committed.

    placed: the rows and their slots. rows: the same, with sampling parameters and cached rows.
    ran: branches with a tree, in the proposal's order. newcomers: branches that start; opened:
    requests that start. spans: prefill rows, in the order of `placed.spans`.
    forced: trees that a grammar forces; work: the cost of the drafts.
    """

    rows: Rows
    placed: PlacedRows
    ran: tuple[Branch, ...]
    newcomers: tuple[Branch, ...]
    opened: tuple[Request, ...]
    spans: tuple[Span, ...]
    forced: tuple[int, ...] = ()
    work: DraftWork = NO_WORK

    @property
    def everyone(self) -> tuple[Branch, ...]:
        """All branches that get tokens: those with a tree, then those that start."""
        return self.ran + self.newcomers
