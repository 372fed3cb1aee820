"""Data that packages hand to each other: rows of a forward, token trees, draft rows.

If the host knows the sizes of unequal trees, every tree has rows of its own (`LiveNodes`). Else the
rows are packed (`PackedTrees`): the roots, then M drafted nodes (R = S + M) known to the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import add
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .attention.metadata import QuerySequence, Visibility
from .blend import Blend
from .kv.pool import NO_SEGMENT, Bools, Ints
from .sampling.processors import Sampler


@dataclass(frozen=True, slots=True)
class AlignmentState:
    """The padding of a forward of trees, by tensor row: valid column c has the position of its
    cached positions, plus c, less `position_offsets`."""

    padding_lengths: tuple[int, ...]
    valid_lengths: tuple[int, ...]
    position_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContinuousDecodingState:
    """A forward with prompts and trees, by tensor row: positions of the longest row afterwards,
    and of each row; valid queries; whether they are a prompt's."""

    cache_length: int
    valid_lengths: tuple[int, ...]
    input_lengths: tuple[int, ...]
    is_prefill: tuple[bool, ...]


class PaddedLayout:
    """Conversion between [S, ...], by branch, and [B, Q, ...], as a drafter's forward takes it.

    With `packed` all branches share a row, one after another (``bim``); else each has a tensor row
    (place_S, index_S: int64 on the host and the device), and rows in between may be empty
    (``batching``), unless it `is_whole`. rows_S: the pool's row of each branch."""

    def __init__(self, rows_S: Sequence[int], packed: bool, device: torch.device) -> None:
        self.rows_S = rows_S
        self.packed = packed
        first_row = min(rows_S, default=0)
        self.place_S = np.arange(len(rows_S)) if packed else np.array(rows_S, np.int64) - first_row
        self.index_S = torch.from_numpy(self.place_S).to(device)
        self.places = int(self.place_S.max(initial=0)) + 1
        self.is_whole = np.array_equal(self.place_S, np.arange(self.places))

    def spread(self, value_SK: Tensor, empty: float = 0) -> Tensor:
        """[S, K, ...] -> [B, Q, ...]; rows without a branch hold `empty`."""
        if self.packed:
            return value_SK.flatten(0, 1)[None]
        if self.is_whole:
            return value_SK
        out = value_SK.new_full((self.places, *value_SK.shape[1:]), empty)
        return out.index_copy_(0, self.index_S, value_SK)

    def collect(self, value_BQ: Tensor) -> Tensor:
        if self.packed:
            return value_BQ.view(len(self.rows_S), -1, *value_BQ.shape[2:])
        return value_BQ.index_select(0, self.index_S)


@dataclass(frozen=True, slots=True)
class NodeRows:
    """Trees of which not every node has a row. rows: int64 [R], their flat indices. nodes_ST:
    int64, which of the R rows each node is; the root's for a node without one."""

    rows: Tensor
    nodes_ST: Tensor

    def spread(self, value_RV: Tensor) -> Tensor:
        """[R + X, V], by row -> [S * T + X, V], by node; the last X rows are not of trees."""
        others = torch.arange(len(self.rows), len(value_RV), device=value_RV.device)
        return value_RV.index_select(0, torch.cat([self.nodes_ST.reshape(-1), others]))


@dataclass(frozen=True, slots=True)
class PackedTrees(NodeRows):
    """The nodes of trees in the first R rows of a forward. tree_R, node_R: int64, the tree and the
    node (0 the root) of each row; -1 for unused rows."""

    tree_R: Tensor
    node_R: Tensor

    @classmethod
    def of(cls, valid_SN: Tensor, shared: int) -> "PackedTrees":
        """Give every valid node a row, without a host read; `shared` is M, their number or more."""
        trees, drafted = valid_SN.shape
        device = valid_SN.device
        count_X = valid_SN.reshape(-1).cumsum(0)
        root_S1 = torch.arange(trees, device=device)[:, None]
        row_SN = (count_X.view(trees, drafted) - 1 + trees).where(valid_SN, root_S1)
        index_M = torch.searchsorted(count_X, torch.arange(1, shared + 1, device=device))
        unused_M = index_M >= trees * drafted
        tree_M = (index_M // max(drafted, 1)).masked_fill(unused_M, -1)
        node_M = (index_M % max(drafted, 1) + 1).masked_fill(unused_M, -1)
        return cls(
            rows=torch.arange(trees + shared, device=device),
            nodes_ST=torch.cat([root_S1, row_SN], dim=1),
            tree_R=torch.cat([root_S1[:, 0], tree_M]),
            node_R=torch.cat([torch.zeros_like(root_S1[:, 0]), node_M]),
        )

    def pick(self, value_ST: Tensor, empty: int) -> Tensor:
        """[S, T], by node -> [R], by row; unused rows hold `empty`."""
        value_R = value_ST[self.tree_R.clamp(min=0), self.node_R.clamp(min=0)]
        return value_R.where(self.tree_R >= 0, empty)

    def visible(self, ancestors_STT: Tensor) -> Tensor:
        """bool [R, R]: each row sees itself and the rows of its ancestors in its own tree."""
        tree_R = self.tree_R.clamp(min=0)
        node_R = self.node_R.clamp(min=0)
        above_RR = ancestors_STT[tree_R[:, None], node_R[:, None], node_R]
        same_tree_RR = (self.tree_R[:, None] == self.tree_R) & (self.tree_R >= 0)
        self_RR = torch.eye(len(tree_R), dtype=torch.bool, device=tree_R.device)
        return (above_RR & same_tree_RR) | self_RR


class LiveNodes(NodeRows):
    """The rows of trees that differ in size, where the host knows the sizes; tree by tree."""

    @classmethod
    def of(
        cls, rows_ST: npt.NDArray[np.integer[Any]], sizes: Sequence[int], device: torch.device
    ) -> "LiveNodes":
        """The first 1 + sizes[s] nodes of each tree, the root counted."""
        counts_S = np.asarray(sizes, np.int64) + 1
        node_T = np.arange(rows_ST.shape[1])
        is_live_ST = node_T < counts_S[:, None]
        index_ST = (np.cumsum(counts_S) - counts_S)[:, None] + np.where(is_live_ST, node_T, 0)
        rows_R = rows_ST[is_live_ST].astype(np.int64)
        return cls(torch.from_numpy(rows_R).to(device), torch.from_numpy(index_ST).to(device))


def packed_places(has_ST: Bools) -> npt.NDArray[np.int64]:
    """`PackedTrees.nodes_ST` on the host, from which nodes have a row (the roots always do)."""
    trees = len(has_ST)
    row_SN = trees - 1 + np.cumsum(has_ST[:, 1:]).reshape(trees, -1)
    root_S1 = np.arange(trees)[:, None]
    return np.concatenate([root_S1, np.where(has_ST[:, 1:], row_SN, root_S1)], axis=1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward: token trees of running branches, and prefill rows.

    Under ``bim`` B is 1; under ``batching`` tensor row b is the pool's row `first_row + b`; under
    ``paged`` it is a branch's. Queries are at the right end, after padding with the scratch slot.

    tokens_BQ, positions_BQ, slots_BQ: int64; slots are flat indices into the pool.
    visibility, segment_N: the segments, and int32, the number of each row's (of padding: the number
        after the last one). sequences: the rows that may see the same part of the pool.
    prompt_slots: int32, slots of rows that the host knows: of prompts, and of roots without drafts.
    nodes_ST: int64, flat indices (b * Q + q) of each tree's nodes, the root first; the root's for
        nodes without a row. ancestors_STT: bool, which nodes are ancestors-or-self of which.
    tips_R: int64, flat indices of the prefill rows whose logits draw a root token.
    node_rows_ST, node_slots_ST: int32 on the host, of the nodes; int32 [R] of packed trees.
    bound_trees, bound_tips: those that a grammar restricts (host ints).
    sampler: of the trees' branches, then of the tips'; None if all take the best token.
    packed_trees, tree_segment_R: the nodes' rows if only the device knows them, and int64, the
        number of each row's segment. live: the nodes' rows if trees differ in size.
    tapped: a drafter reads the target's features of these rows, if it reads any."""

    tokens_BQ: Tensor
    positions_BQ: Tensor
    slots_BQ: Tensor
    visibility: Visibility
    segment_N: Ints
    sequences: tuple[QuerySequence, ...]
    prompt_slots: Ints
    nodes_ST: Tensor
    ancestors_STT: Tensor
    tips_R: Tensor
    node_rows_ST: Ints = field(default_factory=lambda: np.zeros((0, 1), np.int32))
    node_slots_ST: Ints = field(default_factory=lambda: np.zeros((0, 1), np.int32))
    bound_trees: tuple[int, ...] = ()
    bound_tips: tuple[int, ...] = ()
    alignment: AlignmentState | ContinuousDecodingState | None = None
    sampler: Sampler | None = None
    packed_trees: PackedTrees | None = None
    live: LiveNodes | None = None
    tree_segment_R: Tensor | None = None
    blend: Blend | None = None
    tapped: bool = True

    @property
    def trees(self) -> int:
        return self.nodes_ST.shape[0]

    @property
    def tree_rows(self) -> int:
        return self.nodes_ST.shape[0] * self.nodes_ST.shape[1]

    @property
    def owner_N(self) -> Ints:
        """int32, the id of each row's segment."""
        return np.append(self.visibility.ids_S, np.int32(NO_SEGMENT))[self.segment_N]

    def of_trees(self, value_BQ: Tensor) -> Tensor:
        """A value of every row -> [S, T], that of the tree nodes."""
        return value_BQ.view(-1)[self.nodes_ST]


class DraftSize(NamedTuple):
    """A round's drafts. size: nodes of a tree, or drafts of the longest chain. lengths: of each
    chain. tokens, ms: expected tokens, the target's own included, and milliseconds of the round.
    kind: the drafter's, where several take turns."""

    size: int
    levels: int
    tokens: float
    ms: float
    lengths: tuple[int, ...] = ()
    kind: str = ""


class DraftWork(NamedTuple):
    """Forwards of a drafter in a round, their rows, and those that are padding (host ints)."""

    forwards: int = 0
    rows: int = 0
    padding: int = 0

    def plus(self, other: "DraftWork") -> "DraftWork":
        return DraftWork(*map(add, self, other))


NO_WORK = DraftWork()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's offer to every active branch: a token tree each.

    tokens_SN: int64, parents before children. parents_SN: int64, index in the same tree, -1 for the
        root. depths_SN: int64, from 1. valid_SN: bool, False for padding, which is never accepted.
    scores_SN: float32 cumulative log-probability under the drafter. levels: most depth (host int).
    side_outputs_SC: int64, values for the host, part of the round's one read.
    draft_probs_STV: the distribution that each node's children were drawn from (node 0 is the root;
        undefined without children); None if drafts were not drawn or it is not needed.
    is_chain: every tree has one path. shared: rows of all nodes together; None if each has one.
    forced: the trees that a grammar determines. sizes: if the host knows them, the numbers of first
        nodes that are real and have a row. candidates: the target's best tokens are of use."""

    tokens_SN: Tensor
    parents_SN: Tensor
    depths_SN: Tensor
    valid_SN: Tensor
    scores_SN: Tensor
    levels: int
    side_outputs_SC: Tensor | None = None
    draft_probs_STV: Tensor | None = None
    is_chain: bool = False
    shared: int | None = None
    forced: tuple[int, ...] = ()
    sizes: tuple[int, ...] | None = None
    work: DraftWork = NO_WORK
    candidates: bool = True

    @property
    def laid_out(self) -> tuple[int, ...]:
        """The number of drafted nodes of each tree that get a row, if rows are not shared."""
        return self.sizes or (self.tokens_SN.shape[1],) * len(self.tokens_SN)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The input of a drafter at expand_root: all rows committed since its last forward.

    rows: the drafter's own; `tips_R` are the last rows of the active branches, in order.
    features_NF, index_N: the target's features (None for drafters that read tokens alone), and
        int64, the flat indices of the rows that are not padding, increasing.
    segment_S: int32 on the host, the number of each branch's segment in `rows.visibility`.
    position_S, root_S: int64, the position of each root token, and the token."""

    rows: Rows
    features_NF: Tensor | None
    index_N: Tensor
    segment_S: Ints
    position_S: Tensor
    root_S: Tensor
    frame: PaddedLayout
    sampler: Sampler | None = None
    attention: str = "auto"

    @property
    def work(self) -> DraftWork:
        count = self.rows.tokens_BQ.numel()
        return DraftWork(1, count, count - len(self.index_N))


@cache  # tensors without elements can be shared; training may ask for the same ones
def no_trees(device: torch.device) -> tuple[Tensor, Tensor]:
    """nodes_ST and ancestors_STT of a forward without trees."""
    with torch.inference_mode(False):
        ancestors_STT = torch.zeros(0, 1, 1, dtype=torch.bool, device=device)
        return torch.zeros(0, 1, dtype=torch.int64, device=device), ancestors_STT


def ancestors(parents_SN: Tensor, levels: int) -> Tensor:
    """bool [S, T, T]: which nodes (columns) are ancestors-or-self of which (rows)."""
    trees = parents_SN.shape[0]
    parent_ST = torch.cat([parents_SN.new_zeros(trees, 1), parents_SN + 1], dim=1)
    self_TT = torch.eye(parent_ST.shape[1], dtype=torch.bool, device=parents_SN.device)
    seen_STT = self_TT.expand(trees, -1, -1).clone(memory_format=torch.contiguous_format)
    above_ST = parent_ST
    for _ in range(levels):
        seen_STT.scatter_(2, above_ST[:, :, None], True)
        above_ST = parent_ST.gather(1, above_ST)
    return seen_STT


class Candidates(NamedTuple):
    """All nodes a drafter created, parents before children; fields as in `Proposal`."""

    tokens_SC: Tensor
    parents_SC: Tensor
    depths_SC: Tensor
    scores_SC: Tensor

    def pick(self, pick_SN: Tensor) -> "Candidates":
        """These nodes, in this order. The parent of a node without its parent is undefined."""
        place_N = torch.arange(pick_SN.shape[1], device=pick_SN.device)
        place_SC = torch.zeros_like(self.tokens_SC).scatter(1, pick_SN, place_N.expand_as(pick_SN))
        parents_SN = self.parents_SC.gather(1, pick_SN)
        return Candidates(
            self.tokens_SC.gather(1, pick_SN),
            place_SC.gather(1, parents_SN.clamp(min=0)).where(parents_SN >= 0, -1),
            self.depths_SC.gather(1, pick_SN),
            self.scores_SC.gather(1, pick_SN),
        )

    def proposal(self, levels: int) -> Proposal:
        valid_SC = torch.ones_like(self.tokens_SC, dtype=torch.bool)
        nodes = (self.tokens_SC, self.parents_SC, self.depths_SC, valid_SC, self.scores_SC)
        return Proposal(*nodes, levels)


def rerank(levels: Sequence[Candidates], nodes: int, ranked: bool = False) -> Candidates:
    """The `nodes` best candidates of all levels, in creation order or `ranked`. The stable sort
    keeps the set connected (EAGLE-2's top-k can keep a child without its parent)."""
    candidates = Candidates(*(torch.cat(values, dim=1) for values in zip(*levels, strict=True)))
    best_SN = candidates.scores_SC.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    return candidates.pick(best_SN if ranked else best_SN.sort(dim=1).values)


def single_path(tokens_SN: Tensor, log_probs_SN: Tensor) -> Proposal:
    """One path per branch: int64 tokens, each with its float32 log-probability."""
    level_SN = torch.arange(tokens_SN.shape[1], device=tokens_SN.device).expand_as(tokens_SN)
    nodes = Candidates(tokens_SN, level_SN - 1, level_SN + 1, log_probs_SN.cumsum(1))
    return replace(nodes.proposal(tokens_SN.shape[1]), is_chain=True)
