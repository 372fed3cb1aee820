"""Shell completion: graphs, their settings and values, runs, profiles and codes.

Completion loads no model and imports no torch. Each function imports its dependencies when it is
called. An error yields no completions and no message.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

Offer = tuple[str, str]  # a completion and its description
Completion = Callable[[typer.Context, str], list[Offer]]

ACTION = "_SPECSOT_COMPLETE"
WORDS = "COMP_WORDS"
WORD = "COMP_CWORD"
BEFORE = "_SPECSOT_BEFORE"  # the part of a word that bash splits off
BREAKS = re.compile("[=@:]+")


def is_completing() -> bool:
    """Whether a shell asks for completions."""
    return ACTION in os.environ


def command_line() -> list[str]:
    """The words to complete after the program; typer's context lacks an unfinished option."""
    return os.environ.get(WORDS, os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]


def join_words(environ: MutableMapping[str, str]) -> None:
    """Join the words that bash splits at `=`, `@` and `:`, such as `--set drafter.kind=no`.

    Bash replaces only the part of the last word that follows the last separator.
    """
    if environ.get(ACTION) != "complete_bash":
        return
    words = environ.get(WORDS, "").split("\n")
    at = int(environ.get(WORD, "0"))
    joined: list[str] = []
    for place, word in enumerate([*words, ""][: at + 1]):
        inside = place > 0 and BREAKS.fullmatch(words[place - 1])
        if joined and (BREAKS.fullmatch(word) or inside):
            joined[-1] += word
        else:
            joined.append(word)
    ends = [0, *(separator.end() for separator in BREAKS.finditer(joined[-1]))]
    environ[BEFORE] = joined[-1][: ends[-1]]
    joined[-1] = joined[-1][ends[-1] :]
    environ[WORDS] = "\n".join(joined)
    environ[WORD] = str(len(joined) - 1)


def _completion(offers: Callable[[str, typer.Context], Iterable[Offer]]) -> Completion:
    """Of the offers those that start with the incomplete word; none after an error."""

    def complete(ctx: typer.Context, incomplete: str) -> list[Offer]:
        before = os.environ.get(BEFORE, "")
        whole = before + incomplete
        try:
            fitting = [offer for offer in offers(whole, ctx) if offer[0].startswith(whole)]
        except Exception:  # a broken specsot.yaml, a folder that does not exist
            return []
        return [(text.removeprefix(before), description) for text, description in fitting]

    return complete


def _sides(incomplete: str) -> Iterator[Offer]:
    """Shipped graphs, YAML files and folders; after GRAPH@ settings of that graph."""
    from ..prepare.files import graph_names, is_graph

    name, at, changes = incomplete.partition("@")
    if at and is_graph(name):
        head, comma, last = changes.rpartition(",")
        for text, description in _settings(name, changes.split(",")[:-1], last):
            yield f"{name}@{head}{comma}{text}", description
        return
    yield from ((graph_name, "shipped") for graph_name in graph_names())
    yield from _files(incomplete, (".yaml", ".yml"))


def _files(incomplete: str, endings: tuple[str, ...]) -> Iterator[Offer]:
    head = incomplete[: incomplete.rfind("/") + 1]
    folder = Path(head)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and not path.name.startswith("."):
            yield f"{head}{path.name}/", "folder"
        elif path.suffix in endings:
            yield f"{head}{path.name}", "file"


@_completion
def graph_names_of(incomplete: str, _: typer.Context) -> Iterable[Offer]:
    return _sides(incomplete)


@_completion
def benched_of(incomplete: str, _: typer.Context) -> Iterator[Offer]:
    """Shipped experiments and peers, then graphs."""
    from ..bench.experiment import PEERS, experiment_names

    yield from ((name, "experiment") for name in experiment_names())
    yield from ((name, "transformers") for name in PEERS)
    yield from _sides(incomplete)


@_completion
def peers_of(incomplete: str, _: typer.Context) -> Iterator[Offer]:
    """Several sides, the last of which is completed."""
    from ..bench.experiment import PEERS
    from ..prepare.files import graph_names

    head, comma, _last = incomplete.rpartition(",")
    yield from ((f"{head}{comma}{name}", "transformers") for name in PEERS)
    yield from ((f"{head}{comma}{name}", "shipped") for name in graph_names())


@_completion
def settings_of(incomplete: str, _: typer.Context) -> Iterable[Offer]:
    """`path=value` for the graph that the command line names, else for the default one."""
    words = command_line()
    sets = [words[at] for at in range(1, len(words) - 1) if words[at - 1] == "--set"]
    return _settings(_named_graph(), sets, incomplete)


@_completion
def varied_of(incomplete: str, _: typer.Context) -> Iterator[Offer]:
    """The same with several values, the last of which is completed."""
    path, equals, values = incomplete.partition("=")
    head, comma, last = values.rpartition(",")
    for text, description in _settings(_named_graph(), (), f"{path}{equals}{last}"):
        yield text.replace("=", f"={head}{comma}", 1), description


def _named_graph() -> str:
    """The first graph of the command line; specsot.yaml's if there is none yet."""
    from ..prepare.files import is_graph
    from ..prepare.job import read_config
    from ..prepare.options import RunOptions

    names = (word.partition("@")[0] for word in command_line()[1:])
    if (graph := next(filter(is_graph, names), None)) is not None:
        return graph
    return read_config(Path(), RunOptions())[0].graph


def _settings(graph: str, sets: Iterable[str], incomplete: str) -> Iterator[Offer]:
    """Every setting with its present value; all possible values of the setting that is named.

    sets: changes of the graph, of which only those of kinds matter.
    """
    from ...states.graph.graph import SETTING_BLOCKS, TOP_SETTINGS, Graph
    from ...states.graph.load import override, validate
    from ..prepare.files import open_source

    source = open_source(graph)
    override(source, [change for change in sets if ".kind=" in change])
    whole = validate(source)
    settings: dict[str, tuple[Any, Any, str]] = {}
    for block in SETTING_BLOCKS:
        spec = getattr(whole, block)
        for name, text in type(spec).descriptions().items() if spec is not None else ():
            settings[f"{block}.{name}"] = getattr(spec, name), type(spec).model_fields[name], text
    for name in TOP_SETTINGS:
        text = Graph.descriptions()[name]
        settings[name] = getattr(whole, name), Graph.model_fields[name], text
    path, equals, _ = incomplete.partition("=")
    fitting = [path] if equals else [name for name in settings if name.startswith(path)]
    for name in fitting if len(fitting) == 1 else settings:
        value, field, text = settings[name]
        choices = _choices(name, field) if len(fitting) == 1 else []
        for choice in choices or [value]:
            if isinstance(choice, bool):
                choice = str(choice).lower()
            plain = isinstance(choice, int | float | str)  # the shell takes it as it is
            yield f"{name}={choice if plain else ''}", text


def _choices(path: str, field: Any) -> list[Any]:
    """All values of a setting with a few."""
    from ...states.graph.graph import KINDS
    from ...states.graph.plugins import installed_kinds

    block, _, name = path.partition(".")
    if name == "kind":
        return [*KINDS[block], *(installed_kinds() if block == "drafter" else ())]
    kinds = [field.annotation, *get_args(field.annotation)]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return [*words, True, False] if bool in kinds else words


@_completion
def runs_of(_: str, ctx: typer.Context) -> Iterator[Offer]:
    """Names of kept runs, the newest first."""
    from ..record.run_folder import LATEST, saved_runs

    yield LATEST, "the newest run"
    folder = Path(ctx.params.get("runs_dir") or "runs")
    yield from ((saved_run.path.name, "") for saved_run in reversed(saved_runs(folder)))


@_completion
def profiles_of(*_: object) -> Iterable[Offer]:
    """Profiles of specsot.yaml, each with its target."""
    return _profiles().items()


@_completion
def targets_of(incomplete: str, _: typer.Context) -> Iterator[Offer]:
    """The embedded model, the profiles' targets, and folders."""
    yield "embedded", "comes with the package"
    yield from ((target, name) for name, target in _profiles().items())
    yield from _files(incomplete, (".gguf",))


def _profiles() -> dict[str, str]:
    """The target of each profile."""
    from ..prepare.files import SHIPPED, read_source
    from ..prepare.job import CONFIG
    from ..prepare.options import KEY, merged

    user = (read_source(CONFIG).data or {}) if Path(CONFIG).exists() else {}
    both = merged(read_source(str(SHIPPED.parent / CONFIG)).data[KEY], user.get(KEY))
    return {name: str(p.get("model", "")) for name, p in both.items() if isinstance(p, dict)}


@_completion
def codes_of(*_: object) -> Iterator[Offer]:
    """Codes that can be explained."""
    from ..prepare.explained import explanations

    pages = explanations()
    yield from ((str(code), page.title) for code, page in pages.problems.items())
    yield from ((str(code), page.title) for code, page in pages.exits.items())


BY_OPTION: dict[str, Completion] = {
    "graph": graph_names_of,
    "sets": settings_of,
    "profile": profiles_of,
    "model": targets_of,
    "drafter_model": targets_of,
}
