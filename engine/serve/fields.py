"""Types of request fields with their limits."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

TOKEN_ID = re.compile("[0-9]{1,10}")


def _number(value: Any) -> Any:
    """1.0 is a whole number, for there are languages with one kind; true and "5" are none."""
    if isinstance(value, bool | str):
        raise ValueError("must be a number")
    return value


def _biases(value: dict[str, float]) -> dict[str, float]:
    if wrong := [key for key in value if not TOKEN_ID.fullmatch(key)]:
        raise ValueError(f"{wrong[0][:20]!r} is not a token id")
    return value


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Penalty = Annotated[Real, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=64, strict=True)]
Stops = Annotated[
    list[Stop],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(max_length=4),
]
TokenId = Annotated[Whole, Field(ge=0, lt=1 << 31)]
Bias = Annotated[Real, Field(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], AfterValidator(_biases), Field(max_length=300)]
Text = Annotated[str, Field(strict=True)]


class RequestPart(BaseModel):
    """A part of a request; extra fields are ignored and reported."""

    model_config = ConfigDict(extra="allow")
