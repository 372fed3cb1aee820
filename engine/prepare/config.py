"""`specsot.yaml`: what a run uses when the command line does not say otherwise."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ...states.graph.schema import check_mapping, problem
from ...states.graph.source import GraphError, Problem, Source, decode
from ...states.graph.spec import Int, Spec, Text
from .files import PACKAGE, read_source

FILE = "specsot.yaml"


class RunConfig(Spec):
    """Defaults of a run. None means that somebody else decides."""

    graph: Text = Field(description="a shipped graph or a path")
    prompt: str = Field(description="the question to answer")
    model: Text = Field(description="the target: `embedded` or a checkpoint directory")
    drafter_model: Text = Field(description="the drafter: `embedded` or a checkpoint directory")
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
    dtype: Literal["float32", "float64", "bfloat16", "float16"]
    seed: Annotated[Int, Field(ge=0, lt=1 << 63)]
    threads: Annotated[Int, Field(ge=1, le=1024)] | None = None
    max_new_tokens: Annotated[Int, Field(ge=1, le=1 << 20)] | None = None


def read_config(folder: Path, options: Mapping[str, Any] | None = None) -> RunConfig:
    """The packaged defaults, under `folder`'s own specsot.yaml, under options that are not None.

    Args:
        options: values of command-line options, by key.

    Raises:
        GraphError: every problem, in file order; an option's problem names the option.
    """
    packaged = Source(decode((files(PACKAGE) / FILE).read_bytes(), FILE), FILE)
    own = folder / FILE
    source = read_source(str(own)) if own.exists() or own.is_symlink() else packaged
    if source.data is None:
        source.data = {}
    check_mapping(source, "configuration")
    given = {k: v for k, v in (options or {}).items() if v is not None}
    for key, value in given.items():
        source.options[(key,)] = f"--{key.replace('_', '-')} {value}"
    source.data = {**packaged.data, **source.data, **given}
    try:
        return RunConfig.model_validate(source.data)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise GraphError([_problem(source, e) for e in found]) from None


def _problem(source: Source, error: Any) -> Problem:
    return problem(source, error, lambda loc, data: RunConfig)
