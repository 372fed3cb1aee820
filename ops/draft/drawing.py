"""Drawn drafts: with the target's coins (``match``), or with the drafter's own (``rejection``).

Under ``match`` a draft that is drawn with the coin that the target uses at its position agrees with
the target far more often than the drafter's best token. Under ``rejection`` the coins have a role
of their own, and the proposal carries the distribution of every draw.
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
    """How the drafts of all branches of a round are drawn.

    position_S: int64, positions of the roots; root_S their tokens.
    """

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
        """Whether verification needs the distributions that drafts were drawn from."""
        return self.accept is Accept.REJECTION

    def scores(self, logits_RV: Tensor, branch_R: Tensor, behind_RC: Tensor) -> Tensor:
        """The drafter's logits through the branches' own processors, [R, V].

        behind_RC: int64, the root and the drafts that lead to each row.
        """
        past = self.sampler.past(behind_RC, torch.ones_like(behind_RC, dtype=torch.bool))
        return process(logits_RV, self.sampler.rules, branch_R, past)

    def draw(self, scores_RV: Tensor, branch_R: Tensor, depth_R: Tensor) -> Tensor:
        """int64 [R]: a draft of each row, at this depth of its branch's tree."""
        key_R = self.keys(branch_R, depth_R, torch.zeros_like(depth_R))
        return choose(scores_RV, self.sampler.rules, branch_R, key_R)

    def probabilities(self, scores_RV: Tensor, branch_R: Tensor) -> Tensor:
        """float [R, V]: the distribution that a draft of each row is drawn from."""
        return probabilities(scores_RV, self.sampler.rules.greedy_S[branch_R])

    def keys(self, branch_R: Tensor, depth_R: Tensor, rank_R: Tensor) -> Tensor:
        """int64 [R]: keys of drafts at these depths, with these ranks among their siblings."""
        key_R = self.sampler.key_S[branch_R]
        root_R = self.position_S[branch_R]
        if self.accept is Accept.MATCH:
            return token_keys(key_R, root_R + depth_R)
        return round_keys(key_R, root_R, depth_R, rank_R, CoinRole.DRAFT)
