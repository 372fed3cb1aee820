"""What the rooms hand to each other: rows of a forward, visibility, proposals, protocols."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .kv import KVCache


class LayerStatus(IntEnum):
    """What one decoder layer does in a forward (CacheBlend's per-layer status)."""

    DECODE = -1
    FULL = 0
    CHECK = 1
    AFTER_CHECK = 2
    REUSE = 3


LayerPlan = tuple[LayerStatus, ...]


@dataclass(frozen=True, slots=True)
class Visibility:
    """Who may see whom in one forward.

    mask_BQK: bool, True where the query row may attend to the key slot. Every query row sees at
        least one slot.
    positions_BK: int64, RoPE position of each slot; only read by sliding-window layers.
    """

    mask_BQK: Tensor
    positions_BK: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward. Under ``bim`` B is 1 and the branches lie one after another.

    The first `trees` x `nodes` rows (in flat order) are token trees, branch by branch, root first;
    the rest are prefill rows in reading order.

    tokens_BQ, positions_BQ, slots_BQ: int64. Slots are flat indices into the pool.
    owner_BQ, prefix_BQ: int32, the owner of each row and the owner of its prefix (NOBODY if none).
    ancestors_STT: bool, for each tree which nodes are ancestors-or-self of which.
    tips_R: int64, flat indices of the prefill rows whose logits draw a root token.
    bound_trees, bound_tips: which trees and which tips (host ints) a grammar restricts.
    """

    tokens_BQ: Tensor
    positions_BQ: Tensor
    slots_BQ: Tensor
    owner_BQ: Tensor
    prefix_BQ: Tensor
    ancestors_STT: Tensor
    tips_R: Tensor
    bound_trees: tuple[int, ...] = ()
    bound_tips: tuple[int, ...] = ()

    @property
    def trees(self) -> int:
        return self.ancestors_STT.shape[0]

    @property
    def tree_rows(self) -> int:
        return self.ancestors_STT.shape[0] * self.ancestors_STT.shape[1]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafter offers every active branch: a token tree each.

    tokens_SN: int64 drafted tokens, parents before children.
    parents_SN: int64, index of the parent node in the same tree, -1 for the root token.
    depths_SN: int64, 1 for children of the root.
    valid_SN: bool, False for padding nodes, which nobody may accept.
    scores_SN: float32 cumulative log-probability of the node under the drafter.
    levels: most levels that any tree can have (host int).
    """

    tokens_SN: Tensor
    parents_SN: Tensor
    depths_SN: Tensor
    valid_SN: Tensor
    scores_SN: Tensor
    levels: int


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What a drafter takes in at expand_root: everything committed since its last forward.

    rows: the drafter's own rows; `tips_R` are the last rows of the active branches, in order.
    features_QF: what the drafter needs to know of the target at each row (its true features).
    owner_S, prefix_S: int32, position_S: int64 position of each branch's root token.
    """

    rows: Rows
    features_QF: Tensor
    owner_S: Tensor
    prefix_S: Tensor
    position_S: Tensor


class TargetOutput(NamedTuple):
    """logits_RV in float32 (float64 models: float64) for the asked rows, taps_QF for every row."""

    logits_RV: Tensor
    taps_QF: Tensor | None


class Target(Protocol):
    """The model whose output counts."""

    num_layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int

    def forward(
        self,
        tokens_BQ: Tensor,
        positions_BQ: Tensor,
        slots_BQ: Tensor,
        visible: Visibility,
        kv: KVCache,
        plan: LayerPlan,
        logit_rows_R: Tensor,
        taps: tuple[int, ...],
    ) -> TargetOutput:
        """One forward; writes K and V of its rows into `kv` at `slots_BQ`, nothing else.

        Each layer writes its rows first and attends to the pool afterwards, so that the rows of
        one forward see each other through the pool.

        Args:
            logit_rows_R: flat row indices (b * Q + q) that need logits.
            taps: Hugging Face `hidden_states` indices whose values are joined, in increasing
                order, into taps_QF [B * Q, len(taps) * H]; empty for None.
        """
        ...


class HiddenDrafter(Protocol):
    """A drafter that continues on its own hidden states: the EAGLE family."""

    num_layers: int
    kv_heads: int
    head_dim: int
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
        visible: Visibility,
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


def no_ancestors(device: torch.device) -> Tensor:
    """ancestors_STT of a forward without trees."""
    return torch.zeros(0, 1, 1, dtype=torch.bool, device=device)
