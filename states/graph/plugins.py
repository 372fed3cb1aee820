"""Drafters by kind, and extensions of other packages; no torch here.

A graph names a function as `package.module:function`, or a package has entry points:
`specsot.ops` (a module or package whose declared functions join the table of ops),
`specsot.drafters` (a kind = its `Drafter` class), `specsot.policies` (a name = a `Policy`) and
`specsot.attention` (a name = a subclass of `AttentionBackend`). None can replace what specsot has.
Checking a graph reads sources; it imports no class but that of the graph's drafter."""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from ...ops.registry import OpEntry, OpTable, RegistryError, declarations, parse
from ..yaml.source import hint, quoted
from .drafter_settings import DrafterSettings

OPS_GROUP = "specsot.ops"
DRAFTERS_GROUP = "specsot.drafters"
POLICIES_GROUP = "specsot.policies"
ATTENTION_GROUP = "specsot.attention"
# The names in the class statements of the attention backends, which need torch to be imported.
_BACKEND = re.compile(r'^class \w+\([\w., ]+, name="(\w+)"\):', re.M)
_FOLDER = Path(__file__).parents[2] / "ops" / "attention"
BACKENDS = sorted(n for file in _FOLDER.glob("*.py") for n in _BACKEND.findall(file.read_text()))

BUILT_IN = {
    "none": "drafter:NoDrafter",
    "eagle3": "drafters.eagle:Eagle3Drafter",
    "eagle2": "drafters.eagle:Eagle2Drafter",
    "dflash": "drafters.dflash:DFlashDrafter",
    "vanilla": "drafters.vanilla:VanillaDrafter",
    "ngram": "drafters.ngram:NgramDrafter",
    "recycle": "drafters.recycle:RecycleDrafter",
    "suffix": "drafters.suffix:SuffixDrafter",
    "medusa": "drafters.medusa:MedusaDrafter",
    "mtp": "drafters.mtp:MtpDrafter",
}
"""By kind the class in `states`, as module:class."""

PLUG_INS = {"eagle1": "examples/eagle1", "adaptive": "examples/draft_lengths"}
"""By kind the folder of the repository with its package."""

_STATES = f"{__name__.split('.')[0]}.states"
_CLASSES = {
    kind: EntryPoint(kind, f"{_STATES}.{reference}", DRAFTERS_GROUP).load()
    for kind, reference in BUILT_IN.items()
}
DRAFTERS: Mapping[str, type[DrafterSettings]] = {k: d.Settings for k, d in _CLASSES.items()}


def module_file(module: str) -> Path:
    """The source file of a module or package, found without importing; raises RegistryError."""
    top, *inner = parts = module.split(".")
    spec = None
    if all(map(str.isidentifier, parts)):
        with suppress(ImportError, ValueError):  # an imported module may lack its spec
            spec = find_spec(top)
    folders = (spec.submodule_search_locations if spec else None) or ()
    places = [Path(folder, *inner) for folder in folders]
    files = [f for p in places for f in (p / "__init__.py", p.with_suffix(".py"))]
    if spec and not inner:
        files = [Path(spec.origin or "")]
    for file in files:
        if file.suffix == ".py" and file.is_file():
            return file
    raise RegistryError(f"no source of a module {quoted(module)}: is its package installed?")


def named_function(kind: str, reference: str) -> OpEntry:
    """The op or guard `package.module:function`; raises RegistryError."""
    module, _, function = reference.partition(":")
    file = module_file(module)
    declared = {e.function: e for k, e in declarations(module, file) if k == kind}
    if function in declared:
        return declared[function]
    names = {node.name for node in parse(file).body if isinstance(node, ast.FunctionDef)}
    if function in names:
        raise RegistryError(f"{module}.{function} is not declared with @{kind}(...)")
    raise RegistryError(f"no function {quoted(function)} in {file}{hint(function, names)}")


def with_installed(table: OpTable) -> OpTable:
    """The table with the ops and guards of installed packages, except of faulty ones."""
    faults = []
    for point in sorted(entry_points(group=OPS_GROUP)):
        try:
            file = module_file(point.value)
            place = file.parent if file.name == "__init__.py" else file
            table = table.joined(declarations(point.value, place))
        except RegistryError as error:
            faults.append(f"{title_of(point)}: {error}")
    return OpTable(table.ops, table.guards, tuple(faults))


def title_of(point: EntryPoint) -> str:
    """The entry point and its distribution, for messages."""
    owner = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
    return f"entry point {point.name!r} ({point.group}){owner}"


def installed(group: str, name: str) -> Iterator[tuple[EntryPoint, Any]]:
    """The entry point of this name, imported, if a package has it; raises RegistryError."""
    points = [*entry_points(group=group, name=name)]
    if len(points) > 1:
        raise RegistryError(f"more than one package has it: {', '.join(map(title_of, points))}")
    for point in points:
        try:
            value = point.load()
        except Exception as error:  # a module of another package may raise anything
            message = str(error).partition("\n")[0]
            reason = f"{type(error).__name__}: {message}"
            line = line_of(error, point.module.partition(".")[0])
            reason += f" ({line})" if line else ""
            raise RegistryError(f"{title_of(point)}: {reason}") from error
        yield point, value


def package_of(frame: FrameType) -> str:
    """The package whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def line_of(error: BaseException, package: str) -> str | None:
    """The last line of a package that an error came from, as file:line."""
    trace = walk_tb(error.__traceback__)
    lines = [f"{f.f_code.co_filename}:{line}" for f, line in trace if package_of(f) == package]
    return lines[-1] if lines else None


def attention_backends() -> list[str]:
    """The names of attention backends, specsot's and those of installed packages."""
    return [*BACKENDS, *installed_names(ATTENTION_GROUP)]


def installed_names(group: str) -> list[str]:
    """The names in a group of entry points."""
    return sorted({point.name for point in entry_points(group=group)})


def drafter_class(kind: str) -> Any:
    """The `Drafter` class of this kind; None if unknown. Raises RegistryError: it is unusable."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    for point, drafter in installed(DRAFTERS_GROUP, kind):
        settings = getattr(drafter, "Settings", None)
        if not (isinstance(settings, type) and issubclass(settings, DrafterSettings)):
            reason = f"{point.value} is not a subclass of Drafter with Settings"
            raise RegistryError(f"{title_of(point)}: {reason}")
        if (word := settings.kind_name()) != kind:
            raise RegistryError(f"{title_of(point)}: the kind of {point.value} is {quoted(word)}")
        return drafter
    return None


def _other(block: Any) -> DrafterSettings:
    """A drafter without a model as `or` names it: its kind, or a block of settings."""
    values = {"kind": block} if isinstance(block, str) else block
    kind = values.get("kind") if isinstance(values, dict) else None
    settings = DRAFTERS.get(kind) if isinstance(kind, str) else None
    if settings is None or settings.has_model or {"or", "rows_per_round", "costs"} & {*values}:
        kinds = ", ".join(kind for kind, block in DRAFTERS.items() if not block.has_model)
        what = "takes drafters without a model ({kinds}) and no `or`, `rows_per_round` or `costs`"
        raise PydanticCustomError("other", what, {"at": "or", "kinds": kinds})
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        why = "unknown key" if wrong["type"] == "extra_forbidden" else wrong["msg"]
        context = {"at": "or", "where": ".".join(map(str, (kind, *wrong["loc"]))), "why": why}
        raise PydanticCustomError("other", "{where}: {why}", context) from None


def _by_kind(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
    """Kinds of installed packages are validated by their own class."""
    if isinstance(value, dict) and isinstance(value.get("or"), list | tuple):
        value = {**value, "or": [_other(block) for block in value["or"]]}
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in DRAFTERS:
        return built_in(value)
    try:
        drafter = drafter_class(kind)
    except RegistryError as error:
        context = {"at": "kind", "kind": kind, "why": str(error)}
        raise PydanticCustomError("drafter", "the drafter '{kind}': {why}", context) from None
    return drafter.Settings.model_validate(value) if drafter else built_in(value)


if TYPE_CHECKING:
    AnyDrafter = DrafterSettings
else:
    AnyDrafter = Annotated[
        SerializeAsAny[Annotated[Union[*DRAFTERS.values()], Field(discriminator="kind")]],
        WrapValidator(_by_kind),
    ]
