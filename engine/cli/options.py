"""Parameters of commands, as typer reads them, and their results."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

from typer import Argument, Option

from ..prepare.options import OPTIONS, OptionText, RunOptions, flag_of
from ..record.run_folder import LATEST
from ..shell import print_json
from .completing import BY_OPTION, runs_of, sides_of

FIELDS = {field.name: field for field in fields(RunOptions)}
LISTS: dict[Any, Any] = {  # as typer wants them
    Sequence[str]: list[str],
    Sequence[Path]: list[Path],
    Sequence[int] | None: list[int],
}


def option(help: str, *flags: str, default: Any = None, **more: Any) -> Any:
    """An option of a command: the default of its parameter; more: as for typer."""
    return Option(default, *flags, help=help, **more)


def argument(help: str, default: Any = None, **more: Any) -> Any:
    """An argument of a command: the default of its parameter; more: as for typer."""
    return Argument(default, help=help, **more)


def flag(help: str, *flags: str, **more: Any) -> Any:
    return Option(False, *flags, help=help, **more)


def graph_argument(help: str, default: Any = None, **more: Any) -> Any:
    return Argument(default, help=help, autocompletion=sides_of, **more)


def run_option(name: str, text: OptionText | None = None, default: Any = None) -> Any:
    """An option of a run; text: instead of its own."""
    text = text or OPTIONS[name]
    variable = name.upper() if text.argument else flag_of(name)[2:].replace("-", "_").upper()
    arguments: Any = {"metavar": text.metavar, "autocompletion": BY_OPTION.get(name)}
    arguments["envvar"] = f"SPECSOT_{variable}" if text.mirrored else None
    if text.argument:
        return argument(text.help, default, show_default=False, **arguments)
    return option(text.help, *text.flags or (flag_of(name),), default=default, **arguments)


WHICH = "A folder, `latest`, a graph (its newest run), or the beginning or end of a name."
RUN = argument(WHICH, LATEST, metavar="RUN", autocompletion=runs_of)
RUNS_DIR = option(
    "Where run folders are.", "--runs-dir", default=Path("runs"), envvar="SPECSOT_RUNS_DIR"
)
JSON = run_option("as_json", default=False)
SETS = run_option("sets")


def show_result(as_json: bool, lines: Iterable[str], **parts: Any) -> None:
    if as_json:
        print_json(**parts)
        return
    for line in lines:
        print(line)


def parameters_of(kind: type[Any]) -> Iterator[Parameter]:
    """A parameter for each `Annotated` field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        if get_origin(hint := hints[field.name]) is Annotated:
            default = Parameter.empty if field.default is MISSING else field.default
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def takes(*names: str, **texts: OptionText) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take these options of a run; it is called with them before its own parameters,
    of which a dataclass offers an option for each of its fields. texts: options that mean something
    of its own to this command."""
    offered = texts | {name: OPTIONS[name] for name in names}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own_parameters = list(signature(function).parameters.values())[1:]
        blocks: dict[str, Any] = {
            p.name: p.annotation for p in own_parameters if is_dataclass(p.annotation)
        }

        @wraps(function)
        def command(**values: Any) -> None:
            options = {name: values.pop(name) for name in offered}
            changes = {name: value for name, value in options.items() if value is not None}
            for name, kind in blocks.items():
                own = {each.name: values.pop(each.name) for each in parameters_of(kind)}
                values[name] = kind(**own)
            function(RunOptions(argv=tuple(sys.argv), **changes), **values)

        parameters: list[Parameter] = []
        for own in own_parameters:
            block = parameters_of(blocks[own.name]) if own.name in blocks else [own]
            parameters += [each.replace(kind=Parameter.KEYWORD_ONLY) for each in block]
        for name, text in offered.items():
            field = FIELDS[name]  # None is the default unless `RunOptions` has a true one
            kind: Any = LISTS.get(field.type, field.type)
            default = run_option(name, text, field.default or None)
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind | None)
            )
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
