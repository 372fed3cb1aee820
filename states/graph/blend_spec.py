"""The block `blend` of a graph. No torch here."""

from dataclasses import fields
from typing import Annotated

from pydantic import Field

from ...ops.blend.layer_plan import (
    BlendSettings,
    Budget,
    CheckUpdate,
    LayerPlan,
    MaskKind,
    Metric,
    OnMiss,
    PlanKind,
    compile_layer_plan,
    decode_plan,
)
from ..yaml.spec import Bool, Int, Share, Spec, Tokens

Layer = Annotated[Int, Field(ge=1, le=1 << 16)]


class BlendBlock(Spec):
    """CacheBlend: documents that were read before are reused where they stand now.

    `ops.layer_plan.BlendSettings` says what the first nine mean.
    """

    plan: PlanKind = Field(
        "blend",
        description="blend: recompute the cached rows that deviate most; reuse: recompute none; "
        "plain: compute everything",
    )
    check_layers: tuple[Layer, ...] = Field(
        (1,),
        json_schema_extra={"minItems": 1},
        description="layers (from 0) where rows are picked, increasing; nothing deviates in 0",
    )
    ratios: tuple[Share, ...] = Field(
        (0.15,), description="for each check layer the share of the cached rows that is recomputed"
    )
    metric: Metric = Field("v", description="what deviates: V, K or both (kv)")
    check_update: CheckUpdate = Field(
        "full",
        description="whether a check layer keeps all K and V that it computes, or (partial) those "
        "of the rows that it picks",
    )
    mask: MaskKind = Field(
        "exact",
        description="exact hides what lies behind a row; bottom_right is the original code's, for "
        "comparisons of one sequence",
    )
    budget: Budget = Field("per_branch", description="the rows over which a share is taken")
    min_tokens: Int = Field(
        256,
        ge=0,
        le=1 << 24,
        description="a prompt with fewer cached tokens is computed as a whole",
    )
    on_miss: OnMiss = Field("full", description="a chunk that is not cached is computed in place")
    collect: Bool = Field(
        True, description="read a chunk that is not cached alone first, once, and keep it"
    )
    chunk_tokens: Tokens = Field(512, description="most tokens of a chunk of a document")

    @property
    def settings(self) -> BlendSettings:
        """The same for the ops."""
        return BlendSettings(**{f.name: getattr(self, f.name) for f in fields(BlendSettings)})

    def plans(self, num_layers: int) -> dict[str, LayerPlan]:
        """The plans that a run can follow, by name.

        Raises:
            ValueError: a check layer does not exist in a model of so many layers.
        """
        plain = compile_layer_plan(BlendSettings(), num_layers)
        plans = {"prefill": plain, "rounds": decode_plan(num_layers)}
        if self.settings.kind_for(1 << 62) != "plain":
            plans[self.plan] = compile_layer_plan(self.settings, num_layers)
        return plans
