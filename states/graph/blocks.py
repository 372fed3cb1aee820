"""The blocks `sampling`, `beam` and `blend` of a graph. No torch here."""

from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ...ops.layer_plan import (
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
from ...ops.sampling.settings import FilterOrder, SamplingRules
from ..yaml.spec import Bool, Int, Number, Share, Spec, Tokens

Layer = Annotated[Int, Field(ge=1, le=1 << 16)]
Penalty = Annotated[Number, Field(ge=-1e4, le=1e4)]
Id = Annotated[Int, Field(ge=0, le=1 << 30)]
_BIAS_SCHEMA = {
    "type": "object",
    "patternProperties": {"^(0|[1-9][0-9]*)$": {"type": "number"}},
    "additionalProperties": False,
}


def _sane_ids(biases: Any) -> Any:
    for key in biases if isinstance(biases, dict) else ():
        if not isinstance(key, int) or isinstance(key, bool) or key < 0:
            what = "a token id is an integer from 0 on"
            raise PydanticCustomError("bias_key", what, {"at": key})
    return biases


Biases = Annotated[dict[int, Number], BeforeValidator(_sane_ids), WithJsonSchema(_BIAS_SCHEMA)]


class Sampling(Spec):
    """How a token is drawn, and how drafts are accepted."""

    temperature: Number = Field(
        0.0, ge=0, le=1e4, description="0 takes the best token, whatever the filters say"
    )
    top_k: Int = Field(0, ge=0, le=1 << 30, description="keep the k best; 0 for all")
    top_p: Number = Field(1.0, gt=0, le=1, description="keep the best until their mass reaches p")
    min_p: Share = Field(0.0, description="least share of the best token's probability")
    filter_order: FilterOrder = Field(
        "temperature_first",
        description="whether the filters see the scores after temperature, as in transformers",
    )
    repetition_penalty: Number = Field(
        1.0, gt=0, le=1e4, description="above 1: less of what prompt and answer hold"
    )
    presence_penalty: Penalty = Field(0.0, description="subtracted once for ids of the own answer")
    frequency_penalty: Penalty = Field(0.0, description="subtracted per occurrence in that answer")
    logit_bias: Biases = Field({}, description="what is added to the logits, by token id")
    banned: tuple[Id, ...] = Field((), description="token ids that are never drawn")
    forced: tuple[Id, ...] = Field((), description="token ids that every answer begins with")
    min_new_tokens: Int = Field(0, ge=0, le=1 << 20, description="tokens before a stop id is drawn")
    accept: Literal["match", "rejection"] = Field(
        "match",
        description="drafts must equal the target's own draw with the position's coin (the same "
        "text for every layout and drafter), or rejection sampling (the same distribution)",
    )
    rule: Literal["chain", "block", "with_replacement", "without_replacement", "topk"] | None = (
        Field(
            None,
            description="the rule of rejection sampling; by default the usual one for how the "
            "drafter draws",
        )
    )
    skip_sample_adjustment: Bool = Field(
        False,
        description="debug, not lossless: draw the token after a rejection without the residual",
    )

    @model_validator(mode="after")
    def _adjusts_something(self) -> Self:
        if self.skip_sample_adjustment and self.accept != "rejection":
            what = "skip_sample_adjustment means something with accept: rejection only"
            raise PydanticCustomError("skip", what, {"at": "skip_sample_adjustment"})
        return self

    @property
    def lossless(self) -> bool:
        """Whether what is drawn is the target's own, exactly or in distribution."""
        return not self.skip_sample_adjustment

    def words(self) -> str:
        """The same for people: what differs from the defaults."""
        usual = type(self).model_fields
        changes = (f"{name} {value}" for name, value in self if value != usual[name].default)
        return ", ".join(changes) or "greedy"

    @property
    def exact(self) -> bool:
        """Whether one seed gives one text, whatever layout and drafter are."""
        return self.accept == "match" or self.temperature == 0

    def rules(self) -> SamplingRules:
        """The same for the ops."""
        values = {field.name: getattr(self, field.name) for field in fields(SamplingRules)}
        return SamplingRules(**values | {"logit_bias": tuple(sorted(self.logit_bias.items()))})


def _three_words(value: Any) -> Any:
    if not (isinstance(value, bool) or value == "never"):
        raise PydanticCustomError("early_stopping", "must be true, false or never")
    return value


EarlyStopping = Annotated[
    bool | Literal["never"],
    BeforeValidator(_three_words),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}]}),
]


class BeamBlock(Spec):
    """Beam search, with the words and the meaning that transformers gives them."""

    num_beams: Int = Field(4, ge=1, le=256, description="hypotheses that live side by side")
    length_penalty: Annotated[float, Field(strict=True)] = Field(
        1.0,
        ge=-5.0,
        le=5.0,
        description="a hypothesis scores its log-probability / its length to this power",
    )
    early_stopping: EarlyStopping = Field(
        False,
        description="true: end when num_beams hypotheses have ended; false: when no live one can "
        "get better at its present length; never: when none can at any length",
    )


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
