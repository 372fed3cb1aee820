"""The block `beam` of a graph. No torch here."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..yaml.spec import Int, Spec


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
