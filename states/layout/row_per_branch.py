"""What layouts have in common that give every branch a tensor row of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.row_layout import AlignmentManager, AlignmentState, ContinuousDecodingState
from ..cache.segments import SegmentTree
from .layout import Layout, Span
from .queries import PackedQueries
from .tree_rows import Trees


class RowPerBranch(Layout):
    """Queries [B, longest]: what a branch has less than the longest is padding in front."""

    packed = False

    def __init__(self, device: torch.device, segments: SegmentTree) -> None:
        super().__init__(device, segments)
        self._row: dict[int, int] = {}  # owner of a branch -> its tensor row

    def alignment(
        self, packed: PackedQueries, trees: Trees, spans: Sequence[Span], positions_BQ: Tensor
    ) -> AlignmentState | ContinuousDecodingState | None:
        """Running branches alone, or with newcomers beside them."""
        if not spans:
            return packed.aligned
        length = [0] * packed.height
        prefill = [False] * packed.height
        for owner, position in zip(trees.owners, trees.positions, strict=True):
            length[self._row[owner] - packed.first_row] = position
        for span in reversed(spans):  # the first span of a row says where the row goes on
            for row in self.tensor_rows_of(span.owner):
                length[row - packed.first_row] = span.position
                prefill[row - packed.first_row] = True
        return AlignmentManager.align_continuous_decode(
            packed.aligned, length, prefill, positions_BQ
        )
