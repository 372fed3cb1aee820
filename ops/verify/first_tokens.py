"""The first token of every branch whose prefill has just ended."""

from dataclasses import dataclass

from torch import Tensor

from ..registry import op
from ..types import Rows
from .score import GrammarRows, score_tips


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """First tokens after a prefill: drawn_R int64; `bound` the rows under a grammar."""

    drawn_R: Tensor
    bound: GrammarRows


@op("branch.root", writes="roots")
def root(rows: Rows, logits: Tensor) -> FirstTokens:
    """Process and draw the first token of every branch whose prefill ends in these rows."""
    scored = score_tips(rows, logits[rows.tree_rows :])
    return FirstTokens(scored.drawn(), scored.bound(rows.bound_tips))
