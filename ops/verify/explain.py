"""The figures that a round's drafts were judged by, for whoever wants to see them.

They are made only where `verify.accept` is told to explain itself, and travel to the host in the
round's one read: floats as the bits of float64.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..sampling.settings import Rule
from ..types import Proposal
from .rejection import Acceptance
from .score import Scored


@dataclass(frozen=True, slots=True)
class TreeFigures:
    """What is known of every drafted node.

    bits_SNC: int64: the target's own token after the parent, then the numbers of `DraftFigures` in
        their order, as bits.
    rule: of rejection sampling; None where drafts are matched.
    adjusted: whether a rejected draft's probability is taken out of what the final token is drawn
        from.
    """

    bits_SNC: Tensor
    rule: Rule | None = None
    adjusted: bool = False


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """One drafted node; None for what there is not.

    draw: the target's own token after the node's parent, where drafts are matched.
    score: cumulative log-probability of the node under the drafter.
    coin: Gumbel noise of its token at its position; not of branches at temperature 0.
    p, q, r, chance: under rejection, what a tried node was judged by, its uniform number, and the
        probability of accepting it (`rejection.Acceptance`).
    """

    draw: int | None
    score: float | None
    coin: float | None
    p: float | None
    q: float | None
    r: float | None
    chance: float | None


@dataclass(frozen=True, slots=True)
class RejectionRecord:
    """How rejection sampling judged the trees: under this rule, with these uniform numbers."""

    verdict: Acceptance
    r_SN: Tensor
    rule: Rule
    adjusted: bool


def figures(
    scored: Scored, proposal: Proposal, drawn_ST: Tensor, judged: RejectionRecord | None
) -> TreeFigures:
    """Collect the figures of a round.

    Args:
        scored: the rows of all nodes, tree by tree. drawn_ST: int64, what they draw.
        judged: None where drafts are matched.
    """
    trees, nodes = drawn_ST.shape
    parents_SN = proposal.parents_SN + 1
    row_SN = torch.arange(trees, device=drawn_ST.device)[:, None] * nodes + parents_SN
    coin_SN = scored.noise(row_SN.view(-1), proposal.tokens_SN.view(-1)).view(row_SN.shape)
    numbers = [torch.full_like(coin_SN, torch.nan)] * 4
    if judged is not None:
        verdict = judged.verdict
        tried_SN = ~verdict.chance_SN.isnan()
        known = (verdict.p_SN, verdict.q_SN, judged.r_SN, verdict.chance_SN)
        numbers = [one_SN.where(tried_SN, torch.nan) for one_SN in known]
    floats = (proposal.scores_SN, coin_SN, *numbers)
    bits = [one_SN.double().view(torch.int64) for one_SN in floats]
    bits_SNC = torch.stack([drawn_ST.gather(1, parents_SN), *bits], dim=2)
    if judged is None:
        return TreeFigures(bits_SNC)
    return TreeFigures(bits_SNC, judged.rule, judged.adjusted)


def unpacked(bits_NC: npt.NDArray[np.int64]) -> list[DraftFigures]:
    """One tree's figures from what was read of `TreeFigures.bits_SNC`."""
    floats = np.ascontiguousarray(bits_NC[:, 1:]).view(np.float64).tolist()
    known = ([number if np.isfinite(number) else None for number in row] for row in floats)
    rows = zip(bits_NC[:, 0].tolist(), known, strict=True)
    return [DraftFigures(draw, *numbers) for draw, numbers in rows]
