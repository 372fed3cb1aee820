"""Layouts of rows in the tensors of a forward: padding, and the rows of token trees.

Queries are at the right end of their tensor row. Padding exists on the query axis only: it has the
pool's scratch slot, sees nothing, and its output is not read.

If the host knows the sizes of unequal trees, every tree has rows of its own (`LiveNodes`). Else the
rows are packed (`PackedTrees`): the roots come first, then the drafted nodes that have a row, tree
by tree. The host knows their number; only the device knows which nodes they are, until the round is
read.

Further shape letters: R the rows of all trees, M those of drafted nodes (R = S + M).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AlignmentState:
    """One forward's padding.

    padding_lengths, valid_lengths: number of padding and of valid queries of each tensor row.
    padding_mask: bool [B, Q], True for valid queries.
    position_offsets: what columns are lowered by: the position of the valid column c of a row with
        n cached positions is n + c - offset.
    """

    padding_lengths: tuple[int, ...]
    valid_lengths: tuple[int, ...]
    padding_mask: Mask = field(compare=False)
    position_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContinuousDecodingState:
    """A forward with the prompts of new branches and the trees of running ones.

    cache_length: positions of the longest row afterwards; valid_lengths: of each row.
    input_lengths: valid queries of each row; is_prefill: whether the row is a prompt's.
    padding_mask: bool [B, Q]; position_ids: int64 [B, Q] on the device (padding: 0).
    """

    cache_length: int
    valid_lengths: tuple[int, ...]
    input_lengths: tuple[int, ...]
    is_prefill: tuple[bool, ...]
    padding_mask: Mask = field(compare=False)
    position_ids: Tensor = field(compare=False)


class AlignmentManager:
    """Aligns rows after unequal acceptance, and prompts with running branches."""

    @staticmethod
    def align_for_decode(lengths: Sequence[int]) -> AlignmentState:
        """Padding that makes rows of these lengths equally long."""
        most = max(lengths, default=0)
        padding = tuple(most - length for length in lengths)
        is_valid_BQ = np.arange(most) >= np.array(padding, np.int64)[:, None]
        return AlignmentState(padding, tuple(lengths), is_valid_BQ, padding)

    @staticmethod
    def align_continuous_decode(
        aligned: AlignmentState,
        cache_lengths: Sequence[int],
        is_prefill: Sequence[bool],
        position_ids: Tensor,
    ) -> ContinuousDecodingState:
        """The padding of a forward with prompts and running branches.

        Args:
            cache_lengths: positions in each row before this forward.
        """
        pairs = zip(cache_lengths, aligned.valid_lengths, strict=True)
        valid = tuple(cached + new for cached, new in pairs)
        return ContinuousDecodingState(
            max(valid, default=0),
            valid,
            aligned.valid_lengths,
            tuple(is_prefill),
            aligned.padding_mask,
            position_ids,
        )


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """Conversion between [S, ...], by branch, and [B, Q, ...], as a drafter's forward takes it.

    rows_S: the pool's row of each branch (host ints). With `packed`, all branches share row 0, one
    after another (``bim``); else each has a tensor row of its own, and rows in between may be empty
    (``batching``). place_S: int64 on the host, the flat index of each branch in a forward with one
    row per branch; index_S: the same on the device. places: rows of such a forward, empty ones
    included. is_whole: whether none is empty and branches are in order.
    """

    rows_S: tuple[int, ...]
    packed: bool
    place_S: npt.NDArray[np.int64]
    index_S: Tensor
    places: int
    is_whole: bool

    @classmethod
    def of(cls, rows_S: tuple[int, ...], packed: bool, device: torch.device) -> "PaddedLayout":
        """The layout of branches in these rows of the pool."""
        first_row = min(rows_S, default=0)
        place_S = np.arange(len(rows_S)) if packed else np.array(rows_S, np.int64) - first_row
        places = int(place_S.max(initial=0)) + 1
        return cls(
            rows_S=rows_S,
            packed=packed,
            place_S=place_S,
            index_S=torch.from_numpy(place_S).to(device),
            places=places,
            is_whole=np.array_equal(place_S, np.arange(places)),
        )

    def spread(self, value_SK: Tensor, empty: float = 0) -> Tensor:
        """[S, K, ...] -> [B, Q, ...]; rows without a branch hold `empty`."""
        if self.packed:
            return value_SK.flatten(0, 1)[None]
        if self.is_whole:
            return value_SK
        out = value_SK.new_full((self.places, *value_SK.shape[1:]), empty)
        return out.index_copy_(0, self.index_S, value_SK)

    def collect(self, value_BQ: Tensor) -> Tensor:
        """[B, Q, ...] -> [S, K, ...]: the inverse of `spread`."""
        if self.packed:
            return value_BQ.view(len(self.rows_S), -1, *value_BQ.shape[2:])
        return value_BQ.index_select(0, self.index_S)


class PackedTrees(NamedTuple):
    """The mapping between the nodes of trees and the first R rows of a forward.

    nodes_ST: int64, the row of each node, the root first; a node without a row has its root's.
    tree_R, node_R: int64, the tree and the node (0 the root) of each row; -1 for unused rows.
    """

    nodes_ST: Tensor
    tree_R: Tensor
    node_R: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [R]: 0, 1, 2 ..., the flat indices of the trees' rows."""
        return torch.arange(len(self.tree_R), device=self.tree_R.device)

    def pick(self, value_ST: Tensor, empty: int) -> Tensor:
        """[S, T], by node -> [R], by row; unused rows hold `empty`."""
        value_R = value_ST[self.tree_R.clamp(min=0), self.node_R.clamp(min=0)]
        return value_R.where(self.tree_R >= 0, empty)

    def spread(self, value_RV: Tensor) -> Tensor:
        """[R + X, V], by row -> [S * T + X, V], by node; the last X rows are not of trees."""
        others = torch.arange(len(self.tree_R), len(value_RV), device=value_RV.device)
        return value_RV.index_select(0, torch.cat([self.nodes_ST.reshape(-1), others]))

    def visible(self, ancestors_STT: Tensor) -> Tensor:
        """bool [R, R]: each row sees itself and the rows of its ancestors in its own tree."""
        tree_R = self.tree_R.clamp(min=0)
        node_R = self.node_R.clamp(min=0)
        above_RR = ancestors_STT[tree_R[:, None], node_R[:, None], node_R]
        same_tree_RR = (self.tree_R[:, None] == self.tree_R) & (self.tree_R >= 0)
        self_RR = torch.eye(len(tree_R), dtype=torch.bool, device=tree_R.device)
        return (above_RR & same_tree_RR) | self_RR


class LiveNodes(NamedTuple):
    """The nodes that have a row, where trees differ in size and the host knows the sizes.

    rows: int64 [R], their flat indices, tree by tree. index_X: int64 [S * T], for every node which
    of the R rows it is; a node without a row has its root's.
    """

    rows: Tensor
    index_X: Tensor

    @classmethod
    def of(
        cls, rows_ST: npt.NDArray[np.integer[Any]], sizes: Sequence[int], device: torch.device
    ) -> "LiveNodes":
        """The first 1 + sizes[s] nodes of each tree, the root counted."""
        counts_S = np.asarray(sizes, np.int64) + 1
        node_T = np.arange(rows_ST.shape[1])
        is_live_ST = node_T < counts_S[:, None]
        first_S1 = (np.cumsum(counts_S) - counts_S)[:, None]
        index_ST = first_S1 + np.where(is_live_ST, node_T, 0)
        rows_R = rows_ST[is_live_ST].astype(np.int64)
        index_X = torch.from_numpy(index_ST.reshape(-1))
        return cls(torch.from_numpy(rows_R).to(device), index_X.to(device))

    def spread(self, value_RV: Tensor) -> Tensor:
        """[R + X, V], by row -> [S * T + X, V], by node; the last X rows are not of trees."""
        others = torch.arange(len(self.rows), len(value_RV), device=value_RV.device)
        return value_RV.index_select(0, torch.cat([self.index_X, others]))


def pack_trees(valid_SN: Tensor, shared: int) -> PackedTrees:
    """Give every valid node a row, without reading values on the host.

    Args:
        valid_SN: bool, the nodes that get a row.
        shared: M, at least the number of valid nodes; further rows are unused.
    """
    trees, drafted = valid_SN.shape
    device = valid_SN.device
    count_X = valid_SN.reshape(-1).cumsum(0)
    root_S1 = torch.arange(trees, device=device)[:, None]
    row_SN = (count_X.view(trees, drafted) - 1 + trees).where(valid_SN, root_S1)
    index_M = torch.searchsorted(count_X, torch.arange(1, shared + 1, device=device))
    unused_M = index_M >= trees * drafted
    none_S = torch.zeros_like(root_S1[:, 0])
    tree_M = (index_M // max(drafted, 1)).masked_fill(unused_M, -1)
    node_M = (index_M % max(drafted, 1) + 1).masked_fill(unused_M, -1)
    return PackedTrees(
        torch.cat([root_S1, row_SN], dim=1),
        torch.cat([root_S1[:, 0], tree_M]),
        torch.cat([none_S, node_M]),
    )


def packed_places(has_ST: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """`PackedTrees.nodes_ST` on the host, from which nodes have a row (the roots always do)."""
    trees = len(has_ST)
    row_SN = trees - 1 + np.cumsum(has_ST[:, 1:]).reshape(trees, -1)
    root_S1 = np.arange(trees)[:, None]
    return np.concatenate([root_S1, np.where(has_ST[:, 1:], row_SN, root_S1)], axis=1)
