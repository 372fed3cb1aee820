"""Drawn drafts: under ``match`` with the coin that the target uses at a position, which agrees with
it far more often than the best token; under ``rejection`` with coins of a role of their own, and
the proposal has the distribution of every draw.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling.coins import CoinRole, round_keys, token_keys
from ..sampling.processors import Sampler, choose, probabilities, process
from ..sampling.settings import Accept, Draws
from ..types import DraftRows


@dataclass(frozen=True, slots=True)
class Drawing:
    """How the drafts of a round are drawn, after the roots' positions and tokens (int64)."""

    sampler: Sampler
    accept: Accept
    position_S: Tensor
    root_S: Tensor

    @classmethod
    def of(cls, draft_rows: DraftRows, draws: str, accept: str) -> "Drawing | None":
        """None where the drafts are the drafter's best tokens."""
        if draft_rows.sampler is None or draws == Draws.BEST:
            return None
        return cls(draft_rows.sampler, Accept(accept), draft_rows.position_S, draft_rows.root_S)

    @property
    def shows_probs(self) -> bool:
        """Whether verification needs the distributions of the drafts."""
        return self.accept is Accept.REJECTION

    def scores(self, logits_RV: Tensor, branch_R: Tensor, behind_RC: Tensor) -> Tensor:
        """[R, V]: logits through the branches' processors; behind_RC: int64, the root and the
        drafts that lead to each row."""
        path_RC = torch.ones_like(behind_RC, dtype=torch.bool)
        return process(logits_RV, self.sampler, branch_R, tokens_RC=behind_RC, path_RC=path_RC)

    def draw(self, scores_RV: Tensor, branch_R: Tensor, depth_R: Tensor) -> Tensor:
        """int64 [R]: a draft of each row, at this depth of its tree."""
        key_R = self.keys(branch_R, depth_R, torch.zeros_like(depth_R))
        return choose(scores_RV, self.sampler.rules, branch_R, key_R)

    def probabilities(self, scores_RV: Tensor, branch_R: Tensor) -> Tensor:
        return probabilities(scores_RV, self.sampler.rules.greedy_S[branch_R])

    def keys(self, branch_R: Tensor, depth_R: Tensor, rank_R: Tensor) -> Tensor:
        """int64 [R]: keys of drafts at these depths, with these ranks among their siblings."""
        key_R = self.sampler.key_S[branch_R]
        root_R = self.position_S[branch_R]
        if self.accept is Accept.MATCH:
            return token_keys(key_R, root_R + depth_R)
        return round_keys(key_R, root_R, depth_R, rank_R, CoinRole.DRAFT)
