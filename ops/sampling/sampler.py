"""What a forward carries so that tokens can be drawn from it."""

from dataclasses import dataclass

from torch import Tensor

from .processors import Past
from .rules import SamplingColumns


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next tokens of S branches are drawn.

    A round without a sampler is one in which everybody takes the best token of the logits.

    rules: the branches' columns.
    key_S: int64, the key of each branch's coins (`coins.branch_key`).
    seen_SV, counts_SV, answered_S: what lies behind each branch, as in `processors.Past`; a tree's
        root token is not counted, it is on every path.
    """

    rules: SamplingColumns
    key_S: Tensor
    seen_SV: Tensor
    counts_SV: Tensor
    answered_S: Tensor

    def past(self, tokens_RC: Tensor, path_RC: Tensor) -> Past:
        """What lies behind rows with these tokens on their way."""
        return Past(self.seen_SV, self.counts_SV, self.answered_S, tokens_RC, path_RC)
