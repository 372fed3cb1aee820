"""`specsot.yaml`: what a run uses when the command line does not say otherwise."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import create_model

from ...states.graph.schema import check_mapping, validated
from ...states.yaml.source import GraphError, Source, decode
from ...states.yaml.spec import Spec
from ..errors import UsageError
from .files import PACKAGE, read_source
from .options import SETTINGS, RunOptions, flag_of

FILE = "specsot.yaml"
OPEN = [name for name, kind in SETTINGS.items() if NoneType in get_args(kind)]  # may be null
KEYS: Any = {name: (kind, None if name in OPEN else ...) for name, kind in SETTINGS.items()}
Settings: type[Spec] = create_model("Settings", __base__=Spec, **KEYS)


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
    kept = {} if saved is None else {**dict.fromkeys(OPEN), **saved}
    source.options.update({(key,): f"{file}: options.{key}" for key in kept})
    source.options.update({(key,): f"{flag_of(key)} {value}" for key, value in given.items()})
    source.data = {**packaged.data, **source.data, **kept, **given}
    return replace(options, **_checked(source))


def _checked(source: Source) -> dict[str, Any]:
    try:
        return validated(Settings, source).model_dump()
    except GraphError as error:
        if any(one.line for one in error.problems):
            raise
        lines = [f"{one.file}: {one.message}" for one in error.problems]
    raise UsageError("\n".join(lines))
