"""Token trees that are made on the host, and their way into a `Proposal`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..types import Proposal


@dataclass(frozen=True, slots=True)
class HostTree:
    """A branch's drafted tokens, parents before children; the root is not counted.

    parents: index of the parent in this tree, -1 for children of the root; depths from 1.
    scores: cumulative log-probability of each node under the drafter.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


def pack(trees: Sequence[HostTree], device: torch.device) -> Proposal:
    """The trees of all active branches, padded to the largest, in one transfer of integers.

    Padding nodes are children of the root with token 0 and score -inf, and not valid.
    """
    most = max((len(tree) for tree in trees), default=0)
    ints = np.zeros((4, len(trees), most), np.int64)
    ints[1] = -1
    ints[2] = 1
    scores = np.full((len(trees), most), -np.inf, np.float32)
    for row, tree in enumerate(trees):
        count = len(tree)
        ints[:3, row, :count] = tree.tokens, tree.parents, tree.depths
        ints[3, row, :count] = 1
        scores[row, :count] = tree.scores
    tokens_SN, parents_SN, depths_SN, valid_SN = torch.from_numpy(ints).to(device).unbind()
    scores_SN = torch.from_numpy(scores).to(device)
    levels = max((max(tree.depths, default=0) for tree in trees), default=0)
    sizes = tuple(map(len, trees))
    drafts = tokens_SN, parents_SN, depths_SN, valid_SN.bool(), scores_SN
    return Proposal(*drafts, levels, sizes=sizes)
