"""Commands whose options are the fields of dataclasses."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_origin, get_type_hints

from ..shell import user_errors


def flat_options(action: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for every `Annotated` field of the dataclasses that `action` takes.

    A user's mistake ends the command with one line and its exit code.
    """
    hints = get_type_hints(action)
    del hints["return"]
    options = {name: list(_options(kind)) for name, kind in hints.items()}

    def command(**values: Any) -> None:
        with user_errors():
            action(
                **{
                    name: kind(**{option.name: values[option.name] for option in options[name]})
                    for name, kind in hints.items()
                }
            )

    flat = [option for found in options.values() for option in found]
    command.__name__, command.__doc__ = action.__name__, action.__doc__
    command.__annotations__ = {option.name: option.annotation for option in flat}
    command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    return command


def _options(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hints[field.name]) is Annotated:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=hints[field.name],
            )
