"""The block `sampling` of a graph. No torch here."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ...ops.sampling.settings import FilterOrder, SamplingRules
from ..yaml.spec import Bool, Int, Spec

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Id = Annotated[Int, Field(ge=0, le=1 << 30)]
Biases = Annotated[
    dict[int, Number],
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^(0|[1-9][0-9]*)$": {"type": "number"}},
            "additionalProperties": False,
        }
    ),
]


class Sampling(Spec):
    """How a token is drawn, and how drafts are accepted."""

    temperature: Number = Field(
        default=0.0, ge=0, le=1e4, description="0 takes the best token, whatever the filters say"
    )
    top_k: Int = Field(default=0, ge=0, le=1 << 30, description="keep the k best; 0 for all")
    top_p: Number = Field(
        default=1.0, gt=0, le=1, description="keep the best until their mass reaches p"
    )
    min_p: Number = Field(
        default=0.0, ge=0, le=1, description="least share of the best token's probability"
    )
    filter_order: FilterOrder = Field(
        default="temperature_first",
        description="whether the filters see the scores after temperature, as in transformers",
    )
    repetition_penalty: Number = Field(
        default=1.0, gt=0, le=1e4, description="above 1: less of what prompt and answer hold"
    )
    presence_penalty: Number = Field(
        default=0.0, ge=-1e4, le=1e4, description="subtracted once for ids of the own answer"
    )
    frequency_penalty: Number = Field(
        default=0.0, ge=-1e4, le=1e4, description="subtracted per occurrence in the own answer"
    )
    logit_bias: Biases = Field(default={}, description="what is added to the logits, by token id")
    banned: tuple[Id, ...] = Field(default=(), description="token ids that are never drawn")
    forced: tuple[Id, ...] = Field(
        default=(), description="token ids that every answer begins with"
    )
    min_new_tokens: Int = Field(
        default=0, ge=0, le=1 << 20, description="tokens before which no stop id is drawn"
    )
    accept: Literal["match", "rejection"] = Field(
        default="match",
        description="drafts must equal the target's own draw with the position's coin (the same "
        "text for every layout and drafter), or rejection sampling (the same distribution)",
    )
    rule: Literal["chain", "block", "with_replacement", "without_replacement", "topk"] | None = (
        Field(
            default=None,
            description="the rule of rejection sampling; by default the usual one for how the "
            "drafter draws",
        )
    )
    skip_sample_adjustment: Bool = Field(
        default=False,
        description="debug, not lossless: draw the token after a rejection without the residual",
    )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _ids_are_sane(cls, biases: Any) -> Any:
        for key in biases if isinstance(biases, dict) else ():
            if not isinstance(key, int) or isinstance(key, bool) or key < 0:
                what = "a token id is an integer from 0 on"
                raise PydanticCustomError("bias_key", what, {"at": key})
        return biases

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
        given = {
            name: value for name, value in self if value != type(self).model_fields[name].default
        }
        shown = ", ".join(f"{name} {value}" for name, value in given.items())
        return shown or "greedy"

    @property
    def exact(self) -> bool:
        """Whether one seed gives one text, whatever layout and drafter are."""
        return self.accept == "match" or self.temperature == 0

    def rules(self) -> SamplingRules:
        """The same for the ops."""
        return SamplingRules(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
            tuple(sorted(self.logit_bias.items())),
            self.banned,
            self.forced,
            self.min_new_tokens,
            self.filter_order,
        )
