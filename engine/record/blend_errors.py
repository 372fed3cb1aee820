"""How far a blended prefill is from the full one: its K and V, and what the target says next."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class ProbeFigures:
    """What a run's probe has found so far. Names and definitions: docs/metrics.md.

    rows: cached rows that were compared. errors: `relative_errors` [L, 2] of every prompt, or part
        of one, that had cached rows. kl: `divergence` of every first token that was drawn behind
        any.
    """

    rows: int = 0
    errors: list[Tensor] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Means over prompts; None and no layers where nothing was blended."""
        return {
            "rows": self.rows,
            "prompts": len(self.errors),
            "draws": len(self.kl),
            "kl": mean(self.kl) if self.kl else None,
            **mean_errors(self.errors),
        }


def relative_errors(blended_L2x: Tensor, full_L2x: Tensor) -> Tensor:
    """[L, 2], for K and V of each layer ||blended - full|| / ||full|| over the same rows."""
    error_L2: Tensor = (blended_L2x - full_L2x).norm(dim=-1) / full_L2x.norm(dim=-1)
    return error_L2


def mean_errors(errors: Sequence[Tensor]) -> dict[str, list[float]]:
    """Per layer the mean over prompts, of K and of V."""
    if not errors:
        return {"error_k": [], "error_v": []}
    error_L2 = torch.stack(list(errors)).mean(0)
    return {"error_k": error_L2[:, 0].tolist(), "error_v": error_L2[:, 1].tolist()}


def divergence(full_V: Tensor, other_V: Tensor) -> float:
    """KL(full || other) in nats, of log-probabilities."""
    return float((full_V.exp() * (full_V - other_V)).sum().clamp(min=0))
