"""The block `blend` of a graph. No torch here."""

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
from ..yaml.spec import Bool, Int, Spec

Layer = Annotated[Int, Field(ge=1, le=1 << 16)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]


class BlendBlock(Spec):
    """CacheBlend: documents that were read before are reused where they stand now.

    `ops.layer_plan.BlendSettings` says what the first nine mean.
    """

    plan: PlanKind = Field(
        default="blend",
        description="blend: recompute the cached rows that deviate most; reuse: recompute none; "
        "plain: compute everything",
    )
    check_layers: tuple[Layer, ...] = Field(
        default=(1,),
        json_schema_extra={"minItems": 1},
        description="layers (from 0) where rows are picked, increasing; nothing deviates in 0",
    )
    ratios: tuple[Share, ...] = Field(
        default=(0.15,),
        description="for each check layer the share of the cached rows that is recomputed",
    )
    metric: Metric = Field(default="v", description="what deviates: V, K or both (kv)")
    check_update: CheckUpdate = Field(
        default="full",
        description="whether a check layer keeps all K and V that it computes, or (partial) those "
        "of the rows that it picks",
    )
    mask: MaskKind = Field(
        default="exact",
        description="exact hides what lies behind a row; bottom_right is the original code's, for "
        "comparisons of one sequence",
    )
    budget: Budget = Field(default="per_branch", description="the rows over which a share is taken")
    min_tokens: Int = Field(
        default=256,
        ge=0,
        le=1 << 24,
        description="a prompt with fewer cached tokens is computed as a whole",
    )
    on_miss: OnMiss = Field(
        default="full", description="a chunk that is not cached is computed where it stands"
    )
    collect: Bool = Field(
        default=True,
        description="read a chunk that is not cached alone first, once, and keep it",
    )
    chunk_tokens: Int = Field(
        default=512, ge=1, le=1 << 20, description="most tokens of a chunk of a document"
    )

    @property
    def settings(self) -> BlendSettings:
        """The same for the ops."""
        return BlendSettings(
            self.plan,
            self.check_layers,
            self.ratios,
            self.metric,
            self.check_update,
            self.mask,
            self.budget,
            self.min_tokens,
            self.on_miss,
        )

    def plans(self, num_layers: int) -> dict[str, LayerPlan]:
        """The plans that a run can follow, by name.

        Raises:
            ValueError: a check layer does not exist in a model of so many layers.
        """
        plain = compile_layer_plan(BlendSettings(), num_layers)
        found = {"prefill": plain, "rounds": decode_plan(num_layers)}
        if self.settings.kind_for(1 << 62) != "plain":
            found[self.plan] = compile_layer_plan(self.settings, num_layers)
        return found
