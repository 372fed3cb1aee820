"""The status of each layer of a prefill with cached rows, fixed before the forward; no torch.

From "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"
(2405.16444); the statuses are those of its code."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal


class LayerStatus(IntEnum):
    """The work of a decoder layer: all rows of a forward that verifies trees (DECODE), or of any
    other (FULL); K and V of all live rows, of which those that deviate most stay live (CHECK); the
    live rows, the others from the cache (AFTER_CHECK); the same with the suffix alone (REUSE)."""

    DECODE = -1
    FULL = 0
    CHECK = 1
    AFTER_CHECK = 2
    REUSE = 3


LayerPlan = tuple[LayerStatus, ...]

PlanKind = Literal["plain", "reuse", "blend"]
Metric = Literal["v", "k", "kv"]
CheckUpdate = Literal["full", "partial"]
MaskKind = Literal["exact", "bottom_right"]
Budget = Literal["per_branch", "per_prompt", "per_chunk"]


@dataclass(frozen=True, slots=True)
class BlendSettings:
    """How a prefill uses cached rows, as the block `blend` of a graph documents it; a later
    check layer picks among the rows of the one before, so that `ratios` never grow."""

    plan: PlanKind = "plain"
    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    metric: Metric = "v"
    check_update: CheckUpdate = "full"
    mask: MaskKind = "exact"
    budget: Budget = "per_branch"
    min_tokens: int = 256

    def kind_for(self, cached: int) -> PlanKind:
        """The plan of a prefill with `cached` cached rows: `plain` if the others gain nothing."""
        everything = self.plan == "blend" and min(self.ratios) == 1
        return "plain" if not cached or cached < self.min_tokens or everything else self.plan


def decode_plan(num_layers: int) -> LayerPlan:
    """The plan of a forward with trees in it and nothing to reuse."""
    return (LayerStatus.DECODE,) * num_layers


def compile_layer_plan(settings: BlendSettings, num_layers: int) -> LayerPlan:
    """One status per layer of a prefill; raises ValueError if a check layer does not exist."""
    if settings.plan != "blend":
        return (LayerStatus.FULL if settings.plan == "plain" else LayerStatus.REUSE,) * num_layers
    last = settings.check_layers[-1]
    if last >= num_layers:
        raise ValueError(
            f"`check_layers` holds {last}, but the model's layers are 0 to {num_layers - 1}"
        )
    first = settings.check_layers[0]
    plan = [LayerStatus.FULL] * first + [LayerStatus.AFTER_CHECK] * (num_layers - first)
    for layer in settings.check_layers:
        plan[layer] = LayerStatus.CHECK
    return tuple(plan)


def prefill_flops(shape: Any, layers: int, rows: int) -> float:
    """Operations of a prefill of `rows` rows that computes everything."""
    return blend_flops(shape, layers, BlendSettings(plan="plain"), 0, suffix=rows)


def blend_flops(
    shape: Any, layers: int, settings: BlendSettings, context: int, suffix: int
) -> float:
    """Operations of a prefill of `context` cached rows and then `suffix` rows, as in section 5.1 of
    the paper, in more detail: projections, visible pairs of query and key, the rest of the layer,
    without embedding and head; picked rows are spread evenly over the context. shape: the model's
    `DecoderShape`."""
    plan = compile_layer_plan(settings, layers)
    shares = iter(settings.ratios)
    alive = 0 if plan[0] is LayerStatus.REUSE else context
    width = shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    total = 0.0
    for status in plan:
        total += 2 * (alive + suffix) * shape.hidden_size * (width + 2 * kv_width)  # q, k and v
        if status is LayerStatus.CHECK:
            alive = int(next(shares) * context)
        pairs = alive * (context + 1) / 2 + suffix * context + suffix * (suffix + 1) / 2
        total += 4 * pairs * width  # scores and weighted sums
        # output, MLP
        total += 2 * (alive + suffix) * shape.hidden_size * (width + 3 * shape.intermediate_size)
    return total
