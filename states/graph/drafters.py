"""The registry of drafters, and the field type of the block `drafter` of a graph.

A drafter class is registered by its kind: the table below names those of specsot, the entry points
`specsot.drafters` those of installed packages. The modules are imported by name and need no torch.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from ...ops.registry import RegistryError
from .drafter_settings import DrafterSettings
from .plugins import installed_drafter

BUILT_IN = {
    "none": "none:NoDrafter",
    "eagle3": "eagle:Eagle3Drafter",
    "eagle2": "eagle:Eagle2Drafter",
    "eagle1": "eagle1:Eagle1Drafter",
    "dflash": "dflash:DFlashDrafter",
    "vanilla": "vanilla:VanillaDrafter",
    "ngram": "ngram:NgramDrafter",
}
"""By kind the class in `states/drafters`, as module:class."""


def _built_in(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(f"..drafters.{module}", __package__), name)


_CLASSES = {kind: _built_in(reference) for kind, reference in BUILT_IN.items()}
DRAFTERS: Mapping[str, type[DrafterSettings]] = {
    kind: drafter.Settings for kind, drafter in _CLASSES.items()
}


def drafter_class(kind: str) -> Any:
    """The `Drafter` class of this kind, of specsot or of an installed package; None if unknown.

    Raises:
        RegistryError: a package has it, but it cannot be used.
    """
    return _CLASSES.get(kind) or installed_drafter(kind)


def settings_class(kind: str) -> type[DrafterSettings] | None:
    """The settings of this kind; None if unknown. Raises RegistryError as `drafter_class`."""
    drafter = drafter_class(kind)
    return None if drafter is None else drafter.Settings


def _by_kind(value: Any, built_in: ValidatorFunctionWrapHandler) -> Any:
    """Kinds of installed packages are validated by their own class."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind in DRAFTERS:
        return built_in(value)
    try:
        settings = settings_class(kind)
    except RegistryError as error:
        context = {"at": "kind", "kind": kind, "why": str(error)}
        raise PydanticCustomError("drafter", "the drafter '{kind}': {why}", context) from None
    return settings.model_validate(value) if settings else built_in(value)


if TYPE_CHECKING:
    AnyDrafter = DrafterSettings
else:
    AnyDrafter = Annotated[
        SerializeAsAny[Annotated[Union[*DRAFTERS.values()], Field(discriminator="kind")]],
        WrapValidator(_by_kind),
    ]
