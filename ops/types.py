"""Data that packages hand to each other: rows of a forward, token trees, draft rows."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .attention.metadata import QuerySequence, Visibility
from .blend import Blend
from .kv.slots import NOBODY, Ints
from .row_layout import (
    AlignmentState,
    ContinuousDecodingState,
    LiveNodes,
    PackedTrees,
    PaddedLayout,
)
from .sampling.processors import Sampler


def _no_nodes() -> Ints:
    return np.zeros((0, 1), np.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward: token trees of running branches, and prefill rows.

    Under ``bim`` B is 1 and all rows are concatenated; under ``batching`` tensor row b is the
    pool's row `first_row + b`; under ``paged`` it is a branch's, and the pool has one row. Queries
    are at the right end of their row, after padding.

    tokens_BQ, positions_BQ, slots_BQ: int64. Slots are flat indices into the pool; padding has the
        scratch slot.
    visibility, segment_N: the segments of the rows, and int32, the number of each row's segment in
        it (padding: the number after the last one).
    sequences: the rows that may see the same part of the pool. prompt_slots: int32, the slots of
        rows that the host knows: those of prompts, and of roots without drafts.
    nodes_ST: int64, flat indices (b * Q + q) of each tree's nodes, the root first.
    ancestors_STT: bool, for each tree which nodes are ancestors-or-self of which.
    tips_R: int64, flat indices of the prefill rows whose logits draw a root token.
    bound_trees, bound_tips: the trees and the tips (host ints) that a grammar restricts.
    node_rows_ST, node_slots_ST: int32 on the host, the flat indices and the slots of the nodes;
        int32 [R] of packed trees.
    alignment: how the rows are padded; None under ``bim``.
    packed_trees: the rows of the nodes, if only the device knows which nodes have a row; a node
        without one has its root's in `nodes_ST`. tree_segment_R: int64, the number of the segment
        of each of its rows.
    live: the rows of trees that differ in size, if the host knows their sizes; a node without a row
        has its root's row and slot, in `nodes_ST` and on the host.
    sampler: how the next tokens are drawn, of the trees' branches and then of the tips'; None if
        all take the best token of the logits.
    blend: the cached rows, None without any.
    """

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
    node_rows_ST: Ints = field(default_factory=_no_nodes)
    node_slots_ST: Ints = field(default_factory=_no_nodes)
    bound_trees: tuple[int, ...] = ()
    bound_tips: tuple[int, ...] = ()
    alignment: AlignmentState | ContinuousDecodingState | None = None
    sampler: Sampler | None = None
    packed_trees: PackedTrees | None = None
    live: LiveNodes | None = None
    tree_segment_R: Tensor | None = None
    blend: Blend | None = None

    @property
    def trees(self) -> int:
        return self.nodes_ST.shape[0]

    @property
    def tree_rows(self) -> int:
        return self.nodes_ST.shape[0] * self.nodes_ST.shape[1]

    @property
    def owner_N(self) -> Ints:
        """int32, the id of each row's segment; NO_SEGMENT for padding."""
        return np.append(self.visibility.ids_S, np.int32(NOBODY))[self.segment_N]

    def of_trees(self, value_BQ: Tensor) -> Tensor:
        """A value of every row -> [S, T], that of the tree nodes."""
        return value_BQ.view(-1)[self.nodes_ST]


@dataclass(frozen=True, slots=True)
class DraftSize:
    """The size of a round's drafts.

    size: nodes of each tree, or drafts of the longest chain. levels: of each tree. lengths: of each
    chain. tokens, ms: the expected tokens of the round, the target's own included, and its expected
    milliseconds.
    """

    size: int
    levels: int
    tokens: float
    ms: float
    lengths: tuple[int, ...] = ()


class DraftWork(NamedTuple):
    """Forwards of a drafter in a round, and the rows in them (host ints).

    padding: those of the rows that are padding.
    """

    forwards: int = 0
    rows: int = 0
    padding: int = 0

    def plus(self, other: "DraftWork") -> "DraftWork":
        """The sum of both."""
        forwards, rows, padding = other
        return DraftWork(self.forwards + forwards, self.rows + rows, self.padding + padding)


NO_WORK = DraftWork()


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's offer to every active branch: a token tree each.

    tokens_SN: int64 drafted tokens, parents before children.
    parents_SN: int64, index of the parent node in the same tree, -1 for the root token.
    depths_SN: int64, 1 for children of the root.
    valid_SN: bool, False for padding nodes, which are never accepted.
    scores_SN: float32 cumulative log-probability of the node under the drafter.
    levels: upper bound of the trees' depth (host int).
    side_outputs_SC: int64, values of the drafter for the host; they are part of the round's one
        read.
    shared: rows of all nodes together in the target's forward, at least the number of valid nodes
        (host int); None if every node has a row.
    draft_probs_STV: the distribution that each node's children were drawn from (node 0 is the root;
        rows of nodes without children are undefined); None if drafts were not drawn or the
        distributions are not needed.
    is_chain: whether every tree has one path, by the drafting method.
    forced: the trees (host ints) that a grammar determines instead of the drafter.
    sizes: the number of real nodes of each tree, if the host knows it; they come first in their
        tree, and only they have a row. None: any node may be real.
    work: the cost of drafting.
    """

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

    @classmethod
    def without_drafts(
        cls, trees: int, device: torch.device, work: DraftWork = NO_WORK
    ) -> "Proposal":
        """Trees [S, 0]: verifying them is one ordinary decoding step of all branches."""
        with torch.inference_mode(False):
            none_S0 = torch.zeros(trees, 0, dtype=torch.int64, device=device)
            valid_S0 = none_S0.bool()
            scores_S0 = none_S0.float()
        return cls(none_S0, none_S0, none_S0, valid_S0, scores_S0, 0, is_chain=True, work=work)

    @property
    def laid_out(self) -> tuple[int, ...]:
        """The number of drafted nodes of each tree that get a row, if rows are not shared."""
        return self.sizes or (self.tokens_SN.shape[1],) * len(self.tokens_SN)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The input of a drafter at expand_root: all rows committed since its last forward.

    rows: the drafter's own rows; `tips_R` are the last rows of the active branches, in order.
    features_NF: the true features of the target at each row that is not padding, None for drafters
        that read tokens alone; index_N the flat indices (b * Q + q) of these rows, increasing.
    segment_S, start_S: the number of each branch's segment in `rows.visibility`, and the position
        of its root token (host ints); position_S, root_S: int64, the same position, and the token.
    frame: where the branches are in the tensors of a forward.
    sampler: how the active branches' next tokens are drawn, as in `Rows`.
    attention: the backend of the drafter's forwards, as for `mask.build`.
    choice: the size of the trees, where the graph does not give it.
    """

    rows: Rows
    features_NF: Tensor | None
    index_N: Tensor
    segment_S: Ints
    start_S: Ints
    position_S: Tensor
    root_S: Tensor
    frame: PaddedLayout
    sampler: Sampler | None = None
    attention: str = "auto"
    choice: DraftSize | None = None

    @property
    def work(self) -> DraftWork:
        """The cost of reading them, in one forward."""
        count = self.rows.tokens_BQ.numel()
        return DraftWork(1, count, count - len(self.index_N))


@cache  # tensors without elements can be shared
def no_trees(device: torch.device) -> tuple[Tensor, Tensor]:
    """nodes_ST and ancestors_STT of a forward without trees."""
    with torch.inference_mode(False):  # training may ask for the same ones
        ancestors_STT = torch.zeros(0, 1, 1, dtype=torch.bool, device=device)
        return torch.zeros(0, 1, dtype=torch.int64, device=device), ancestors_STT


@cache
def ancestors(parents_SN: Tensor, levels: int) -> Tensor:
    """bool [S, T, T]: which nodes (columns) are ancestors-or-self of which (rows).

    Args:
        parents_SN: int64, -1 for children of the root; node n of the tree is column n + 1.
        levels: upper bound of the trees' depth.
    """
    trees, drafted = parents_SN.shape
    nodes = drafted + 1
    root_S1 = parents_SN.new_zeros(trees, 1)
    parent_ST = torch.cat([root_S1, parents_SN + 1], dim=1)
    own_TT = torch.eye(nodes, dtype=torch.bool, device=parents_SN.device)
    seen_STT = own_TT.expand(trees, -1, -1).clone(memory_format=torch.contiguous_format)
    above_ST = parent_ST
    for _ in range(levels):
        seen_STT.scatter_(2, above_ST[:, :, None], True)
        above_ST = parent_ST.gather(1, above_ST)
    return seen_STT


class Candidates(NamedTuple):
    """All nodes a drafter created, in creation order (a parent before its children).

    tokens_SC int64; parents_SC int64 creation index of the parent, -1 for the root;
    depths_SC int64; scores_SC float32 cumulative log-probability.
    """

    tokens_SC: Tensor
    parents_SC: Tensor
    depths_SC: Tensor
    scores_SC: Tensor

    @classmethod
    def joined(cls, parts: Iterable["Candidates"]) -> "Candidates":
        """All nodes of some levels, one level after another."""
        tokens, parents, depths, scores = zip(*parts, strict=True)
        return cls(
            tokens_SC=torch.cat(tokens, dim=1),
            parents_SC=torch.cat(parents, dim=1),
            depths_SC=torch.cat(depths, dim=1),
            scores_SC=torch.cat(scores, dim=1),
        )

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
        """Trees of all these nodes, none of them padding."""
        return Proposal(
            self.tokens_SC,
            self.parents_SC,
            self.depths_SC,
            torch.ones_like(self.tokens_SC, dtype=torch.bool),
            self.scores_SC,
            levels,
        )


def rerank(candidates: Candidates, nodes: int, ranked: bool = False) -> Candidates:
    """The `nodes` best candidates over all levels, still in creation order, or the best first.

    The sort is stable and the scores are float32: a child never scores above its parent, and among
    equals the parent comes first, so the kept set is always connected (EAGLE-2 relies on an
    unstable top-k here and can keep a child without its parent).
    """
    order_SC = candidates.scores_SC.sort(dim=1, descending=True, stable=True).indices
    best_SN = order_SC[:, :nodes]
    return candidates.pick(best_SN if ranked else best_SN.sort(dim=1).values)


def single_path(tokens_SN: Tensor, log_probs_SN: Tensor) -> Proposal:
    """One path per branch: int64 tokens, each with its float32 log-probability."""
    level_SN = torch.arange(tokens_SN.shape[1], device=tokens_SN.device).expand_as(tokens_SN)
    nodes = Candidates(tokens_SN, level_SN - 1, level_SN + 1, log_probs_SN.cumsum(1))
    return replace(nodes.proposal(tokens_SN.shape[1]), is_chain=True)
