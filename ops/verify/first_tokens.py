"""The first token of every branch whose prefill has just ended."""

from dataclasses import dataclass

from torch import Tensor

from ..registry import op
from ..types import Rows
from .score import Bound, score_tips


@dataclass(frozen=True, slots=True)
class Roots:
    """First tokens after a prefill: drawn_R int64; `bound` the rows under a grammar."""

    drawn_R: Tensor
    bound: Bound


@op("branch.root", writes="roots")
def root(rows: Rows, logits: Tensor) -> Roots:
    """Process and draw the first token of every branch whose prefill ends in these rows."""
    scored = score_tips(rows, logits[rows.tree_rows :])
    return Roots(scored.drawn(), scored.bound(rows.bound_tips))
