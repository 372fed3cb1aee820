"""What the rooms hand to each other: rows of a forward, visibility, proposals."""

from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .attention.metadata import QuerySequence, Visibility
from .blend import Blend
from .kv.slots import NOBODY, Ints
from .row_layout import AlignmentState, ContinuousDecodingState, Frame, LiveNodes, PackedTrees
from .sampling.processors import Sampler


def _no_nodes() -> Ints:
    return np.zeros((0, 1), np.int32)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward: token trees of running branches, and prefill rows.

    Under ``bim`` B is 1 and everything lies one after another; under ``batching`` tensor row b is
    the pool's row `first_row + b`, under ``paged`` a branch's, the pool having one row. Queries
    stand at its right end, behind padding.

    tokens_BQ, positions_BQ, slots_BQ: int64. Slots are flat indices into the pool; padding has
        the scratch slot.
    visibility, segment_N: the segments of the rows, and int32, the number of each row's in it (that
        behind the last one for padding).
    sequences: the rows that may see the same part of the pool. prompt_slots: int32, the slots of
        rows that the host knows: those of prompts, and of roots without drafts.
    nodes_ST: int64, flat indices (b * Q + q) of each tree's nodes, the root first.
    ancestors_STT: bool, for each tree which nodes are ancestors-or-self of which.
    tips_R: int64, flat indices of the prefill rows whose logits draw a root token.
    bound_trees, bound_tips: which trees and which tips (host ints) a grammar restricts.
    node_rows_ST, node_slots_ST: int32 on the host, the flat indices and the slots of the nodes;
        int32 [R] of their rows if the device alone knows whose they are.
    alignment: how the rows are padded; None under ``bim``.
    packed_trees: the rows of the nodes, if only the device knows which nodes have a row;
        such a node has its root's in `nodes_ST`. tree_segment_R: int64, the number of the segment
        of each of its rows.
    live: the rows of trees that differ in size, if the host knows their sizes; a node without a row
        has its root's row and slot, in `nodes_ST` as on the host.
    sampler: how the next tokens are drawn, of the trees' branches and then of the tips'; None if
        everybody takes the best token of the logits.
    blend: which rows are cached, None if none is.
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
        """int32, the id of each row's segment, NOBODY for padding."""
        return np.append(self.visibility.ids_S, np.int32(NOBODY))[self.segment_N]

    def of_trees(self, value_BQ: Tensor) -> Tensor:
        """A value of every row -> [S, T], of the tree nodes alone."""
        return value_BQ.view(-1)[self.nodes_ST]


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a round drafts.

    size: nodes of each tree, or drafts of the longest chain. levels: of each tree. lengths: of each
    chain. tokens, ms: what is expected of the round, the target's own tokens included.
    """

    size: int
    levels: int
    tokens: float
    ms: float
    lengths: tuple[int, ...] = ()


class DraftWork(NamedTuple):
    """Forwards of a drafter in a round, and the rows in them (host ints).

    padding: of these rows those that stand for nothing.
    """

    forwards: int = 0
    rows: int = 0
    padding: int = 0

    def plus(self, other: "DraftWork") -> "DraftWork":
        """Both."""
        forwards, rows, padding = other
        return DraftWork(self.forwards + forwards, self.rows + rows, self.padding + padding)


NO_WORK = DraftWork()


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter offers every active branch: a token tree each.

    tokens_SN: int64 drafted tokens, parents before children.
    parents_SN: int64, index of the parent node in the same tree, -1 for the root token.
    depths_SN: int64, 1 for children of the root.
    valid_SN: bool, False for padding nodes, which nobody may accept.
    scores_SN: float32 cumulative log-probability of the node under the drafter.
    levels: most levels that any tree can have (host int).
    side_outputs_SC: int64, what the drafter wants the host to know; it travels with the round's
        one read.
    shared: how many rows all nodes together take in the target's forward, at least as many as are
        valid (host int); None if every node takes one.
    draft_probs_STV: the distribution that each node's children were drawn from (node 0 is the root;
        rows of nodes without children mean nothing); None if drafts were not drawn, or nobody asks.
    is_chain: whether no tree ever has more than one path, by the way it was drafted.
    forced: which trees (host ints) are no drafter's, but all that a grammar leaves.
    sizes: how many nodes of each tree stand for something, where the host knows it; they come first
        in their tree, and no others get a row. None: any of them may.
    work: what drafting it cost.
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

    @property
    def laid_out(self) -> tuple[int, ...]:
        """How many drafted nodes of each tree get a row, if they are not shared."""
        return self.sizes or (self.tokens_SN.shape[1],) * len(self.tokens_SN)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What a drafter takes in at expand_root: everything committed since its last forward.

    rows: the drafter's own rows; `tips_R` are the last rows of the active branches, in order.
    features_NF: what the drafter needs to know of the target (its true features) at each row that
        is no padding, None for drafters that read tokens alone; index_N the flat indices
        (b * Q + q) of these rows, increasing.
    segment_S, start_S: the number of each branch's segment in `rows.visibility`, and the position
        of its root token (host ints); position_S, root_S: int64, the same position, and the token.
    frame: where the branches lie in the tensors of a forward.
    sampler: how the active branches' next tokens are drawn, as in `Rows`.
    attention: the backend of the drafter's forwards, as for `mask.build`.
    choice: how large the trees are, where the graph does not say it.
    """

    rows: Rows
    features_NF: Tensor | None
    index_N: Tensor
    segment_S: Ints
    start_S: Ints
    position_S: Tensor
    root_S: Tensor
    frame: Frame
    sampler: Sampler | None = None
    attention: str = "auto"
    choice: DraftSize | None = None

    @property
    def work(self) -> DraftWork:
        """What taking them in costs, in one forward."""
        count = self.rows.tokens_BQ.numel()
        return DraftWork(1, count, count - len(self.index_N))


@cache  # what has no elements is the same for everybody
def no_trees(device: torch.device) -> tuple[Tensor, Tensor]:
    """nodes_ST and ancestors_STT of a forward without trees."""
    with torch.inference_mode(False):  # training may ask for the same ones
        ancestors_STT = torch.zeros(0, 1, 1, dtype=torch.bool, device=device)
        return torch.zeros(0, 1, dtype=torch.int64, device=device), ancestors_STT


@cache
def no_drafts(trees: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """[S, 0] in int64, bool and float32."""
    with torch.inference_mode(False):
        kinds = (torch.int64, torch.bool, torch.float32)
        none, valid, scores = (torch.zeros(trees, 0, dtype=kind, device=device) for kind in kinds)
        return none, valid, scores
