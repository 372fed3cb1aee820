"""Left padding of rows of unequal length, as host integers (the layout ``batching``).

Queries stand at the right end of their tensor row. Padding exists on the query axis only: it has
the pool's scratch slot, sees nothing, and nobody reads what comes out of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AlignmentState:
    """One forward's padding.

    padding_lengths, valid_lengths: queries of each tensor row that are padding, and that are not.
    padding_mask: bool [B, Q], True where a query stands for something.
    position_offsets: what column numbers have to be lowered by: the position of the valid column
        c of a row with n cached positions is n + c - offset.
    """

    padding_lengths: tuple[int, ...]
    valid_lengths: tuple[int, ...]
    padding_mask: Mask = field(compare=False)
    position_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContinuousDecodingState:
    """A forward in which newcomers' prompts ride beside running branches.

    cache_length: positions of the longest row afterwards; valid_lengths: of each row.
    input_lengths: valid queries of each row; is_prefill: whether it is a newcomer.
    padding_mask: bool [B, Q]; position_ids: int64 [B, Q] on the device (padding: 0).
    """

    cache_length: int
    valid_lengths: tuple[int, ...]
    input_lengths: tuple[int, ...]
    is_prefill: tuple[bool, ...]
    padding_mask: Mask = field(compare=False)
    position_ids: Tensor = field(compare=False)


class AlignmentManager:
    """Aligns rows after unequal acceptance, and newcomers with running branches."""

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
        """The same with what each row holds already.

        Args:
            cache_lengths: positions in each row before this forward.
        """
        pairs = zip(cache_lengths, aligned.valid_lengths, strict=True)
        valid = tuple(held + new for held, new in pairs)
        return ContinuousDecodingState(
            max(valid, default=0),
            valid,
            aligned.valid_lengths,
            tuple(is_prefill),
            aligned.padding_mask,
            position_ids,
        )
