"""What the rooms hand to each other: rows of a forward, visibility, proposals, protocols."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .attention.metadata import AttentionMetadata
from .attention.stacks import Lineages, Member
from .blend.blend import Blend, BlendReport
from .blend.layer_plan import LayerPlan as LayerPlan
from .blend.layer_plan import LayerStatus as LayerStatus
from .drafted import NO_WORK, Choice, DraftWork
from .kv.align import AlignmentState, ContinuousDecodingState
from .kv.forest import Forest, LiveNodes
from .kv.frame import Frame
from .kv.pool import KVCache
from .kv.slots import NOBODY, Ints
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
    lineages, segment_N: the segments of the rows, and int32, the number of each row's in it (that
        behind the last one for padding).
    members: which rows may see the same part of the pool. prompt_slots: int32, the slots of rows
        that are in no tree.
    nodes_ST: int64, flat indices (b * Q + q) of each tree's nodes, the root first.
    ancestors_STT: bool, for each tree which nodes are ancestors-or-self of which.
    tips_R: int64, flat indices of the prefill rows whose logits draw a root token.
    bound_trees, bound_tips: which trees and which tips (host ints) a grammar restricts.
    node_rows_ST, node_slots_ST: int32 on the host, the flat indices and the slots of the nodes;
        int32 [R] of their rows if the device alone knows whose they are.
    alignment: how the rows are padded; None under ``bim``.
    forest: which row is whose node, if not every node has a row and the device alone knows which;
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
    lineages: Lineages
    segment_N: Ints
    members: tuple[Member, ...]
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
    forest: Forest | None = None
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
        return np.append(self.lineages.ids_S, np.int32(NOBODY))[self.segment_N]

    def of_trees(self, value_BQ: Tensor) -> Tensor:
        """A value of every row -> [S, T], of the tree nodes alone."""
        return value_BQ.view(-1)[self.nodes_ST]


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
    segment_S, start_S: the number of each branch's segment in `rows.lineages`, and the position of
        its root token (host ints); position_S, root_S: int64, the same position, and the token.
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
    choice: Choice | None = None

    @property
    def work(self) -> DraftWork:
        """What taking them in costs, in one forward."""
        count = self.rows.tokens_BQ.numel()
        return DraftWork(1, count, count - len(self.index_N))


class TargetOutput(NamedTuple):
    """logits_RV in float32 (float64 models: float64) for the asked rows, taps_QF for every row.

    blend: what a forward on a blended cache did.
    """

    logits_RV: Tensor
    taps_QF: Tensor | None
    blend: BlendReport | None = None


class Pooled(Protocol):
    """A model with a KV pool of its own."""

    num_layers: int
    kv_heads: int
    head_dim: int


class Target(Pooled, Protocol):
    """The model whose output counts."""

    hidden_size: int
    vocab_size: int
    max_positions: int

    def forward(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionMetadata,
        kv: KVCache,
        plan: LayerPlan,
        logit_rows_R: Tensor,
        taps: tuple[int, ...],
        blend: Blend | None = None,
    ) -> TargetOutput:
        """One forward; writes K and V of its rows into `kv` at `slots_BQ`, nothing else.

        Each layer writes its rows first and attends to the pool afterwards, so that the rows of
        one forward see each other through the pool.

        Args:
            logit_rows_R: flat row indices (b * Q + q) that need logits.
            taps: Hugging Face `hidden_states` indices whose values are joined, in increasing
                order, into taps_QF [B * Q, len(taps) * H]; empty for None.
            blend: cached rows; `plan` must be the one compiled from its settings. Rows that a
                layer does not compute get their cached K, turned to their position, and V.
                Their logits are NaN, their taps those of the cache.
        """
        ...


class HiddenDrafter(Pooled, Protocol):
    """A drafter that continues on its own hidden states: the EAGLE family."""

    tap_ids: tuple[int, ...]

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """True target features [R, F] -> the hidden states [R, H] that `forward` takes."""
        ...

    def forward(
        self,
        tokens_BQ: Tensor,
        hidden_BQH: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionMetadata,
        kv: KVCache,
    ) -> Tensor:
        """Row j: token j+1 with the feature of token j, at position j -> hidden_BQH for j+1."""
        ...

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, H] -> float32 [R, draft vocabulary]."""
        ...

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids -> target ids, same shape."""
        ...


class BlockDrafter(Pooled, Protocol):
    """A drafter that fills a whole block of masks in one forward: DFlash.

    A block is [anchor, mask, mask, ...]: the root token at its position and `mask_token_id` at the
    following ones. Output row k is the drafter's guess of the token at its own position (no
    shift); row 0, the anchor's, is not used.
    """

    tap_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int

    def fuse(self, taps_RF: Tensor) -> Tensor:
        """True target features [R, F] -> the context [R, H] that `write_context_` takes."""
        ...

    def write_context_(
        self, context_RH: Tensor, positions_R: Tensor, slots_R: Tensor, kv: KVCache
    ) -> None:
        """K and V of committed tokens, each at its own position, into every layer of `kv`.

        Only tokens whose features the target has computed: all before a block's anchor.
        """
        ...

    def forward(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        attention: AttentionMetadata,
        kv: KVCache,
    ) -> Tensor:
        """Blocks -> hidden_BQH for `logits`; writes their rows, which nobody keeps, into `kv`.

        Args:
            attention: a row sees its branch's context and its whole block, in both directions;
                layers that are causal or have a window hide more of it. `positions_GK` must hold
                the true positions of the block's own slots too.
        """
        ...

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V], over the target's vocabulary."""
        ...


def no_trees(device: torch.device) -> tuple[Tensor, Tensor]:
    """nodes_ST and ancestors_STT of a forward without trees."""
    ancestors_STT = torch.zeros(0, 1, 1, dtype=torch.bool, device=device)
    return torch.zeros(0, 1, dtype=torch.int64, device=device), ancestors_STT
