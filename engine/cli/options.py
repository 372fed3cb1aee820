"""Parameters of commands, as typer reads them, and their results."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, get_type_hints

from typer import Argument, Option

from ..prepare.options import OPTIONS, OptionText, RunOptions, ServeOptions, options_of
from ..record.run_folder import LATEST
from ..shell import print_json
from .completing import BY_OPTION, sides_of

Function = Callable[..., int | None]  # of a command; returns its exit code
KEYWORD = Parameter.KEYWORD_ONLY
LISTS: dict[Any, Any] = {  # as typer wants them
    Sequence[str]: list[str],
    Sequence[str] | None: list[str],
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


graph_argument = partial(argument, autocompletion=sides_of)


def declared(name: str, text: OptionText, default: Any) -> Any:
    """An option of a dataclass, as typer declares it."""
    flags = text.flags or (f"--{name.replace('_', '-')}",)
    variable = (name if text.argument else flags[0][2:].replace("-", "_")).upper()
    arguments: Any = {name: getattr(text, name) for name in ("help", "metavar", "min", "max")}
    arguments["autocompletion"] = BY_OPTION.get(name)
    arguments["envvar"] = f"SPECSOT_{variable}" if text.mirrored else None
    if text.argument:
        return Argument(default, show_default=False, **arguments)
    return Option(default, *flags, **arguments)


WHICH = "A folder, `latest`, a graph (its newest run), or the beginning or end of a name."
RUN = argument(WHICH, LATEST, metavar="RUN")
RUNS_DIR = declared("runs_dir", options_of(ServeOptions)["runs_dir"], Path("runs"))
JSON = declared("as_json", OPTIONS["as_json"], False)
SETS = declared("sets", OPTIONS["sets"], None)


def show_result(as_json: bool, lines: Iterable[str], **parts: Any) -> None:
    if as_json:
        print_json(**parts)
        return
    for line in lines:
        print(line)


def parameters_of(kind: Any, offered: Mapping[str, OptionText] | None = None) -> list[Parameter]:
    """A keyword for each option of a dataclass, or for those that are offered."""
    hints = get_type_hints(kind)
    defaults = {field.name: field.default for field in fields(kind)}
    parameters = []
    for name, text in (options_of(kind) if offered is None else offered).items():
        default = {MISSING: ..., (): None}.get(defaults[name], defaults[name])
        hint = LISTS.get(hints[name], hints[name]) | None
        value = declared(name, text, default)
        parameters.append(Parameter(name, KEYWORD, default=value, annotation=hint))
    return parameters


def takes(*names: str, **helps: str) -> Callable[[Function], Function]:
    """Let a command take these options of a run; it is called with them before its own parameters,
    of which a dataclass offers its options. helps: of options that differ in this command."""
    own: Any = {name: {"help": help, "argument": False} for name, help in helps.items()}
    offered = {name: replace(OPTIONS[name], **own.get(name, {})) for name in (*helps, *names)}

    def decorate(function: Function) -> Function:
        first, *rest = signature(function).parameters.values()
        blocks = {p.name: parameters_of(p.annotation) for p in rest if is_dataclass(p.annotation)}
        blocks[first.name] = parameters_of(RunOptions, offered)

        @wraps(function)
        def command(**values: Any) -> int | None:
            for name, block in blocks.items():
                given = {each.name: values.pop(each.name) for each in block}
                given = {key: value for key, value in given.items() if value not in (None, [])}
                values[name] = function.__annotations__[name](**given)
            values[first.name] = replace(values[first.name], argv=tuple(sys.argv))
            return function(**values)

        keywords = [p for each in (*rest, first) for p in blocks.get(each.name, [each])]
        keywords = [each.replace(kind=KEYWORD) for each in keywords]
        command.__signature__ = Signature(keywords)  # type: ignore[attr-defined]
        return command

    return decorate
