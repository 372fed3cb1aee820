"""The block `blend` of a graph, and what only the whole graph can tell about it. No torch here."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..ops.layer_plan import (
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
from .source import Problem, Source
from .spec import Bool, Int, Spec

if TYPE_CHECKING:
    from .graph import Graph

Layer = Annotated[Int, Field(ge=1, le=1 << 16)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]


class Blend(Spec):
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


def check_blend(graph: "Graph", src: Source) -> Iterator[Problem]:
    """Check layers and ratios go together; what the rest of the graph allows."""
    blend = graph.blend
    if blend is None:
        return
    if not blend.check_layers:
        yield src.problem(("blend", "check_layers"), "must not be empty")
        return
    for i, (before, after) in enumerate(pairwise(blend.check_layers), 1):
        if after <= before:
            message = f"check layers must increase, but {after} follows {before}"
            yield src.problem(("blend", "check_layers", i), message)
    if len(blend.ratios) != len(blend.check_layers):
        message = f"one share per check layer: {len(blend.ratios)} for {len(blend.check_layers)}"
        yield src.problem(("blend", "ratios"), message)
    for i, (more, less) in enumerate(pairwise(blend.ratios), 1):
        if less > more:
            message = f"shares must not grow, but {less} follows {more}"
            yield src.problem(("blend", "ratios", i), message)
    if graph.beam is not None:
        message = "beam search reuses nothing: a graph with the block `beam` has no block `blend`"
        yield src.problem(("blend",), message, key=True)
    alone = graph.layout.kind == "bim" and graph.layout.max_active == 1 and graph.skeleton is None
    if blend.mask == "bottom_right" and not alone:
        message = "bottom_right is for one sequence: layout bim with max_active 1, and no skeleton"
        yield src.problem(("blend", "mask"), message)


def check_documents(graph: "Graph", src: Source) -> Iterator[Problem]:
    """Documents for branches are searched for, so a branch must be able to search."""
    skeleton = graph.skeleton
    if skeleton is not None and skeleton.documents == "branches" and "Search" not in skeleton.tools:
        message = "branches get what they search for, but skeleton.tools has no 'Search'"
        yield src.problem(("skeleton", "documents"), message)


FOLD = "branch.fold_"  # the op that starts combined answers


def check_merge(graph: "Graph", src: Source) -> Iterator[Problem]:
    """Parts that are combined must be folded somewhere, and reused as a block says."""
    if graph.skeleton is None or graph.skeleton.merge == "concat":
        return
    at, merge = ("skeleton", "merge"), graph.skeleton.merge
    if all(call.op != FOLD for state in graph.states.values() for call in state.ops):
        yield src.problem(at, f"{merge}, but no state runs the op {FOLD!r} that folds the parts")
    if merge == "blend" and graph.blend is None:
        yield src.problem(at, "blend needs the block `blend`, which says what is recomputed")
