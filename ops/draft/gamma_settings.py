"""Settings of the draft-length policies in `gamma.py`; without torch, for graphs to be checked."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class GammaPolicy(StrEnum):
    """The name of a policy in a graph."""

    FIXED = "fixed"
    EGAG = "egag"
    SVIP = "svip"
    ADAEDL = "adaedl"
    CONFIDENCE = "confidence"
    HEURISTIC = "heuristic"
    COST = "cost"


LIMITS = {GammaPolicy.SVIP: 0.3, GammaPolicy.CONFIDENCE: 0.4, GammaPolicy.ADAEDL: 0.4}
"""The policies that judge every draft, and the published threshold of each."""
LOOKING = (GammaPolicy.EGAG, *LIMITS)
"""Those that look at the drafter's law."""


@dataclass(frozen=True, slots=True)
class GammaSettings:
    """Settings of a policy, as in a graph's block `drafter`; ValueError for bounds that cross.

    Attributes:
        gamma: drafts per round; of an adaptive policy the first round's.
        gamma_min, gamma_max: bounds of the adaptive policies; None for `gamma`, but at least 1.
        gamma_limit: threshold of `svip`, `confidence` and (at the start) `adaedl`; None for the
            published one (`LIMITS`).
        egag_mode: `linear` between the bounds, or `seed`: floor((1 - h) gamma_max), which reaches
            gamma_max at entropy 0 only.
        egag_ema_beta: share of the past in the moving average; 0 for none.
        egag_h_ref: entropy in nats that counts as no confidence at all; None for ln V.
    """

    gamma: int = 5
    gamma_policy: str = GammaPolicy.FIXED
    gamma_min: int = 1
    gamma_max: int | None = 8
    gamma_limit: float | None = None
    egag_mode: Literal["linear", "seed"] = "linear"
    egag_ema_beta: float = 0.0
    egag_h_ref: float | None = 3.0

    def __post_init__(self) -> None:
        if self.gamma_min > self.longest:
            raise ValueError(
                "draft lengths need 0 <= gamma_min <= gamma_max, gamma_max >= 1 and gamma >= 0, "
                f"not {self.gamma_min}, {self.longest} and {self.gamma}"
            )

    @property
    def longest(self) -> int:
        """The upper bound of the adaptive policies."""
        return self.gamma_max or max(self.gamma, 1)

    @property
    def most(self) -> int:
        """Most drafts that any round can have."""
        return self.gamma if self.gamma_policy == GammaPolicy.FIXED else self.longest

    @property
    def limit(self) -> float:
        """The threshold of a policy that judges every draft; 0 for others."""
        published = {str(policy): limit for policy, limit in LIMITS.items()}
        usual = published.get(self.gamma_policy, 0.0)
        return usual if self.gamma_limit is None else self.gamma_limit
