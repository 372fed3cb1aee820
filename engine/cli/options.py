"""From the fields of dataclasses to the parameters of commands, as typer reads them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from typer import Argument, Option

from ..prepare.options import OPTIONS, OptionText, RunOptions, flag_of
from ..shell import user_errors
from .completing import BY_OPTION, runs_of

FIELDS = {field.name: field for field in fields(RunOptions)}
LISTS: dict[Any, Any] = {  # as typer wants them
    Sequence[str]: list[str],
    Sequence[Path]: list[Path],
    Sequence[int] | None: list[int],
}


def option(help: str, *flags: str, **more: Any) -> Any:
    """An option of a command for `Annotated`; more: as for typer."""
    return Option(*flags, help=help, **more)


def argument(help: str, **more: Any) -> Any:
    """An argument of a command for `Annotated`; more: as for typer."""
    return Argument(help=help, **more)


def run_option(name: str, text: OptionText | None = None) -> Any:
    """What typer needs to know of an option; text: instead of its own."""
    text = text or OPTIONS[name]
    variable = name.upper() if text.argument else flag_of(name)[2:].replace("-", "_").upper()
    arguments: Any = {"help": text.help, "metavar": text.metavar}
    arguments["envvar"] = f"SPECSOT_{variable}" if text.mirrored else None
    arguments["autocompletion"] = BY_OPTION.get(name)
    if text.argument:
        return Argument(show_default=False, **arguments)
    return Option(*text.flags or (flag_of(name),), **arguments)


Runs = Annotated[Path, option("Where run folders are.", "--runs-dir", envvar="SPECSOT_RUNS_DIR")]
WHICH = "A folder, `latest`, a graph (its newest run), or the beginning or end of a name."
Which = Annotated[str, argument(WHICH, metavar="RUN", autocompletion=runs_of)]
RUNS_DIR = Path("runs")
Json = Annotated[bool, run_option("as_json")]
Sets = Annotated[list[str] | None, run_option("sets")]


def takes(*names: str, **texts: OptionText) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take these options of a run; it is called with them before its own parameters.

    texts: options that mean something of its own to this command.
    """
    offered = texts | {name: OPTIONS[name] for name in names}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            options = {name: values.pop(name) for name in offered}
            changes = {name: value for name, value in options.items() if value is not None}
            function(RunOptions(**changes), **values)

        own_parameters = list(signature(function).parameters.values())[1:]
        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own_parameters]
        for name, text in offered.items():
            field = FIELDS[name]
            kind: Any = LISTS.get(field.type, field.type)
            parameters.append(
                Parameter(
                    name,
                    Parameter.KEYWORD_ONLY,
                    default=field.default or None,  # None unless `RunOptions` has a true one
                    annotation=Annotated[kind | None, run_option(name, text)],
                )
            )
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def flat_options(action: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for every `Annotated` field of the dataclasses that `action` takes.

    A user's mistake ends the command with one line and its exit code.
    """
    kinds = {name: kind for name, kind in get_type_hints(action).items() if name != "return"}
    options = {name: list(_fields(kind)) for name, kind in kinds.items()}

    @wraps(action)
    def command(**values: Any) -> None:
        with user_errors():
            groups = {
                name: kind(**{one.name: values[one.name] for one in options[name]})
                for name, kind in kinds.items()
            }
            action(**groups)

    parameters = [parameter for group in options.values() for parameter in group]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _fields(kind: Any) -> Iterator[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hint := hints[field.name]) is Annotated:
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
