"""Base of everything in a graph file or a configuration: frozen, strict, no unknown keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Int = Annotated[int, Field(strict=True)]
Count = Annotated[Int, Field(ge=1, le=1024)]
Tokens = Annotated[Int, Field(ge=1, le=1 << 20)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[Number, Field(ge=0, le=1)]
Bool = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
Text = Annotated[str, Field(min_length=1)]


class Spec(BaseModel):
    """Base of everything in a graph file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
