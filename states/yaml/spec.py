"""Base of everything in a graph file or a configuration: frozen, strict, no unknown keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Int = Annotated[int, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
Text = Annotated[str, Field(min_length=1)]


class Spec(BaseModel):
    """Base of everything in a graph file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
