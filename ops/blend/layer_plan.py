"""Which layer of a prefill does what with cached rows (CacheBlend), decided before the forward.

From "CacheBlend: Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"
(2405.16444), whose status per layer is that of its code. Needs no torch: graphs are checked by it.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal, get_args


class LayerStatus(IntEnum):
    """What one decoder layer does in a forward.

    DECODE: computes all rows of a forward that verifies trees. FULL: computes all rows. CHECK:
    computes K and V of all rows that are still alive, and goes on with those that deviate most.
    AFTER_CHECK: computes the rows that are alive, takes the others from the cache. REUSE: the
    same with the suffix alone, from the first layer on.
    """

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
OnMiss = Literal["full"]

FIRST = (LayerStatus.FULL, LayerStatus.REUSE, LayerStatus.DECODE)
"""Never CHECK: K and V of the first layer depend on the token alone, so nothing can deviate."""

FOLLOWERS = {
    LayerStatus.FULL: (LayerStatus.FULL, LayerStatus.CHECK),
    LayerStatus.CHECK: (LayerStatus.CHECK, LayerStatus.AFTER_CHECK),
    LayerStatus.AFTER_CHECK: (LayerStatus.AFTER_CHECK, LayerStatus.CHECK),
    LayerStatus.REUSE: (LayerStatus.REUSE,),
    LayerStatus.DECODE: (LayerStatus.DECODE,),
}


@dataclass(frozen=True, slots=True)
class BlendSettings:
    """How a prefill uses cached rows.

    Attributes:
        plan: `plain` computes everything, `reuse` nothing that is cached, `blend` computes the
            cached rows that deviate most.
        check_layers: layers (from 0) where rows are picked, increasing, never the first.
        ratios: for each check layer the share of a budget's rows that is picked, never growing:
            with several, a later layer picks among the rows of the one before.
        metric: what deviates: squared distance of V, of K, or of both.
        check_update: `full` keeps all K and V that a check layer computes; `partial` keeps those
            of the rows that it picks.
        mask: `exact` hides what lies behind a row; `bottom_right` is the original code's mask for
            one sequence, by which picked rows see later ones; for comparisons only.
        budget: over which rows a share is taken: those of a branch, a prompt, or each chunk.
        min_tokens: with fewer cached rows, nothing is reused.
        on_miss: what happens to a chunk that is not in the store: `full` computes it.

    Raises:
        ValueError: a setting is wrong; the message names it and its value.
    """

    plan: PlanKind = "plain"
    check_layers: tuple[int, ...] = (1,)
    ratios: tuple[float, ...] = (0.15,)
    metric: Metric = "v"
    check_update: CheckUpdate = "full"
    mask: MaskKind = "exact"
    budget: Budget = "per_branch"
    min_tokens: int = 256
    on_miss: OnMiss = "full"

    def __post_init__(self) -> None:
        for key, kind in CHOICES.items():
            value = getattr(self, key)
            if value not in get_args(kind):
                raise ValueError(f"`{key}` is one of {', '.join(get_args(kind))}, not {value!r}")
        if not _is_number(self.min_tokens, int) or self.min_tokens < 0:
            raise ValueError(f"`min_tokens` is an integer from 0 on, not {self.min_tokens!r}")
        self._check_layers()
        self._check_ratios()

    def _check_layers(self) -> None:
        layers = self.check_layers
        if not layers:
            raise ValueError("`check_layers` needs at least one layer, not 0 of them")
        for layer in layers:
            if not _is_number(layer, int) or layer < 1:
                raise ValueError(
                    f"`check_layers` are integers from 1 on (nothing deviates in layer 0), "
                    f"not {layer!r}"
                )
        for before, after in pairwise(layers):
            if after <= before:
                raise ValueError(f"`check_layers` must increase, but {after} follows {before}")

    def _check_ratios(self) -> None:
        ratios, checks = self.ratios, len(self.check_layers)
        if len(ratios) != checks:
            raise ValueError(
                f"`ratios` needs one share per check layer: {len(ratios)} for {checks}"
            )
        for ratio in ratios:
            if not _is_number(ratio, int, float) or not 0 <= ratio <= 1:
                raise ValueError(f"`ratios` are shares from 0 to 1, not {ratio!r}")
        for before, after in pairwise(ratios):
            if after > before:
                raise ValueError(f"`ratios` must not grow, but {after} follows {before}")

    def kind_for(self, cached: int) -> PlanKind:
        """The plan of a prefill with so many cached rows: `plain` where the others gain nothing."""
        everything = self.plan == "blend" and min(self.ratios) == 1
        return "plain" if not cached or cached < self.min_tokens or everything else self.plan


CHOICES: dict[str, Any] = {
    "plan": PlanKind,
    "metric": Metric,
    "check_update": CheckUpdate,
    "mask": MaskKind,
    "budget": Budget,
    "on_miss": OnMiss,
}


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def decode_plan(num_layers: int) -> LayerPlan:
    """The plan of a forward with trees in it and nothing to reuse."""
    return (LayerStatus.DECODE,) * num_layers


def compile_layer_plan(settings: BlendSettings, num_layers: int) -> LayerPlan:
    """One status per layer of a prefill.

    Raises:
        ValueError: a check layer does not exist in a model of `num_layers` layers.
    """
    if settings.plan != "blend":
        status = LayerStatus.FULL if settings.plan == "plain" else LayerStatus.REUSE
        return (status,) * num_layers
    last = settings.check_layers[-1]
    if last >= num_layers:
        raise ValueError(
            f"`check_layers` holds {last}, but the model's layers are 0 to {num_layers - 1}"
        )
    plan = tuple(_status(layer, settings.check_layers) for layer in range(num_layers))
    check_transitions(plan)
    return plan


def _status(layer: int, check_layers: tuple[int, ...]) -> LayerStatus:
    if layer in check_layers:
        return LayerStatus.CHECK
    return LayerStatus.AFTER_CHECK if layer > check_layers[0] else LayerStatus.FULL


def check_transitions(plan: LayerPlan) -> None:
    """Raise ValueError, with the layer, unless every status may follow the one before it."""
    if plan and plan[0] not in FIRST:
        raise ValueError(f"layer 0 cannot have the status {LayerStatus(plan[0]).name}")
    for layer, (before, after) in enumerate(pairwise(plan), 1):
        if after not in FOLLOWERS[before]:
            raise ValueError(
                f"the status {LayerStatus(after).name} of layer {layer} cannot follow "
                f"{LayerStatus(before).name}"
            )
