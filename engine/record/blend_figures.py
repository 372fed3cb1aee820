"""What a run reused of cached chunks, what that saved, and how far a blended prefill is from the
full one. Names and definitions: docs/metrics.md.

Operations are estimated as `ops.layer_plan` says, for each prompt (or part of one: the shared
prefix, a branch) by itself; attention to rows that were there before is left out on both sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from ...ops.layer_plan import LayerShape, blend_flops, prefill_flops
from ...states.blend import BlendState, BlendSummary
from ..chunks.cache import ChunkLibrary


@dataclass(slots=True)
class ProbeFigures:
    """What a run's probe has found so far.

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
    """KL(full || other) in nats, of log-probabilities; ids without a token (-inf) count 0."""
    terms_V = torch.where(full_V > -torch.inf, full_V.exp() * (full_V - other_V), 0.0)
    return float(terms_V.sum().clamp(min=0))


def blend_figures(
    forwards: Sequence[BlendSummary], board: Mapping[str, Any], probed: ProbeFigures | None = None
) -> dict[str, Any] | None:
    """The part `blend` of metrics.json; None for a graph that reuses nothing."""
    blending: BlendState | None = board["branches"].blend
    if blending is None:
        return None
    target = board["target"]
    library = blending.library
    assert isinstance(library, ChunkLibrary)
    config = target.config
    layers = target.num_layers
    sizes = (config.hidden_size, config.intermediate_size, config.heads, config.kv_heads)
    shape = LayerShape(*sizes, config.head_dim)
    parts = [part for one in forwards for part in one.parts]
    flops = sum(blend_flops(shape, layers, blending.settings, *part) for part in parts)
    full = sum(prefill_flops(shape, layers, sum(part)) for part in parts)
    collected = library.made_sizes
    return {
        "plan": list(map(int, forwards[0].plan)) if forwards else None,
        "forwards": len(forwards),
        "reused_rows": sum(one.reused for one in forwards),
        "picked_rows": sum(one.picked[0] for one in forwards if one.picked),
        "protected_rows": sum(one.protected for one in forwards),
        "suffix_rows": sum(one.suffix for one in forwards),
        "flops": flops,
        "flops_full": full,
        "saved_share": 1 - flops / full if full else 0.0,
        "chunks": {
            "hits": library.hits,
            "missed": library.missed,
            "collected": len(collected),
            "collected_rows": sum(collected),
            "collected_flops": sum(prefill_flops(shape, layers, size) for size in collected),
            "collected_milliseconds": library.made_nanos / 1e6,
        },
        **({} if probed is None else {"probe": probed.figures()}),
    }
