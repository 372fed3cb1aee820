"""`specsot.yaml`: what a run uses when the command line does not say otherwise."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, Field, ValidationError, create_model

from ...states.graph.schema import check_mapping, problem
from ...states.graph.source import GraphError, Source, decode
from ...states.graph.spec import Spec
from ..errors import UsageError
from .files import PACKAGE, read_source
from .options import SETTINGS, RunOptions, flag_of

FILE = "specsot.yaml"
KINDS = {name: kind for name, kind in get_type_hints(RunOptions).items() if name in SETTINGS}
OPEN = [
    name for name, kind in KINDS.items() if NoneType in get_args(kind)
]  # null: as we think best


class _Strict(Spec):
    model_config = ConfigDict(strict=True)


def _key(name: str, kind: Any) -> Any:
    """A setting as pydantic has it: its type with its limits, and its default."""
    limits = dict(SETTINGS[name])
    values = limits.pop("one_of", None)
    kind = Literal[values] if values else Annotated[kind, Field(**limits)]
    return kind, None if name in OPEN else ...


Settings: type[Spec] = create_model(
    "Settings", __base__=_Strict, **{name: _key(name, kind) for name, kind in KINDS.items()}
)


def read_config(
    folder: Path, options: RunOptions, saved: Mapping[str, Any] | None = None, file: str = ""
) -> RunOptions:
    """Options with no setting left open.

    The packaged defaults, under `folder`'s own specsot.yaml, under the settings that a repeated run
    saved in its `file`, under those of the options.

    Raises:
        GraphError: every problem, in file order.
        UsageError: only options have problems; they are named.
    """
    packaged = Source(decode((files(PACKAGE) / FILE).read_bytes(), FILE), FILE)
    own = folder / FILE
    source = read_source(str(own)) if own.exists() or own.is_symlink() else packaged
    if source.data is None:
        source.data = {}
    check_mapping(source, "configuration")
    given = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    prompt = given.pop("prompt", None)  # read, and checked, as any other prompt is
    if saved is not None:
        saved = dict.fromkeys(OPEN) | dict(saved)
    source.options.update({(key,): f"{file}: options.{key}" for key in saved or ()})
    source.options.update({(key,): f"{flag_of(key)} {value}" for key, value in given.items()})
    source.data = {**packaged.data, **source.data, **(saved or {}), **given}
    config = _checked(source)
    return replace(options, **config | ({} if prompt is None else {"prompt": prompt}))


def _checked(source: Source) -> dict[str, Any]:
    try:
        return Settings.model_validate(source.data).model_dump()
    except ValidationError as error:
        errors = error.errors(include_url=False)
    wrong = GraphError(problem(source, one, lambda loc, data: Settings) for one in errors)
    if any(one.line for one in wrong.problems):
        raise wrong
    raise UsageError("\n".join(f"{one.file}: {one.message}" for one in wrong.problems))
