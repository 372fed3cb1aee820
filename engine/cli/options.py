"""From the fields of `RunOptions` to the parameters of commands, as typer reads them."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..prepare.options import OPTIONS, OptionText, RunOptions, flag_of

KINDS = get_type_hints(RunOptions)
DEFAULTS = {field.name: field.default for field in fields(RunOptions)}
MANY = {"sets": list[str], "documents": list[Path]}  # may be repeated


def option(name: str, text: OptionText | None = None) -> Any:
    """What typer needs to know of an option; text: instead of its own."""
    text = text or OPTIONS[name]
    variable = name.upper() if text.argument else flag_of(name)[2:].replace("-", "_").upper()
    known: Any = {"help": text.help, "metavar": text.metavar}
    known["envvar"] = f"SPECSOT_{variable}" if text.mirrored else None
    if text.argument:
        return typer.Argument(show_default=False, **known)
    return typer.Option(*text.flags or (flag_of(name),), **known)


Json = Annotated[bool, option("as_json")]
Sets = Annotated[list[str] | None, option("sets")]


def takes(*names: str, **texts: OptionText) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take these options of a run; it is called with them before its own parameters.

    texts: options that mean something of its own to this command.
    """
    offered = texts | {name: OPTIONS[name] for name in names}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            given = {name: values.pop(name) for name in offered}
            given |= {name: tuple(given[name] or ()) for name in MANY.keys() & given}
            function(RunOptions(**given), **values)

        plain = signature(function)
        own = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in plain.parameters.values()][1:]
        more = [_parameter(name, text) for name, text in offered.items()]
        command.__signature__ = plain.replace(parameters=own + more)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str, text: OptionText) -> Parameter:
    default = None if name in MANY else DEFAULTS[name]
    kind: Any = MANY.get(name, KINDS[name])
    kind = kind | None if default is None else kind
    annotation = Annotated[kind, option(name, text)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
