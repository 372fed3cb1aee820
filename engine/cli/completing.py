"""Shell completion: graphs, their settings and values, runs, profiles and codes.

Completion loads no model and imports no torch. Each function imports its dependencies when it is
called. An error yields no completions and no message.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

Offer = tuple[str, str]  # a completion and its description
Offering = Callable[[typer.Context, str], Iterable[Offer]]
Completion = Callable[[typer.Context, str], list[Offer]]

BASH = "complete_bash"
WORDS = "COMP_WORDS"
WORD = "COMP_CWORD"
BEFORE = "_SPECSOT_BEFORE"  # the part of a word that bash splits off
BREAKS = re.compile("[=@:]+")


def join_words(environ: MutableMapping[str, str]) -> None:
    """Join the words that bash splits at `=`, `@` and `:`, such as `--set drafter.kind=no`.

    Bash replaces only the part of the last word that follows the last separator.
    """
    if environ.get("_SPECSOT_COMPLETE") != BASH:
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
    environ[WORDS], environ[WORD] = "\n".join(joined), str(len(joined) - 1)


def asked_for(environ: Mapping[str, str]) -> list[str]:
    """The command whose words are completed; the others need not be imported."""
    return [word for word in _words(environ) if not word.startswith("-")][:1]


def _words(environ: Mapping[str, str]) -> list[str]:
    """The command line as it is: an option that still lacks its value stops its parser."""
    return environ.get(WORDS, environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]


def _offers(offering: Offering) -> Completion:
    """Those offers that go on from what is there, and nothing if anything is wrong."""

    @wraps(offering)
    def complete(ctx: typer.Context, incomplete: str) -> list[Offer]:
        before = os.environ.get(BEFORE, "")
        whole = before + incomplete
        try:
            fitting = [offer for offer in offering(ctx, whole) if offer[0].startswith(whole)]
        except Exception:  # a broken specsot.yaml, a folder that is not there
            return []
        return [(text.removeprefix(before), description) for text, description in fitting]

    return complete


@_offers
def graph_names_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Shipped graphs, YAML files and folders; behind GRAPH@ settings of that graph."""
    yield from _sides(incomplete)


def _sides(incomplete: str) -> Iterator[Offer]:
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


@_offers
def benched_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Shipped experiments and peers, then graphs."""
    from ..bench.experiment import PEERS, experiment_names

    yield from ((name, "experiment") for name in experiment_names())
    yield from ((name, "transformers") for name in PEERS)
    yield from _sides(incomplete)


@_offers
def peers_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Several sides, the last of which is completed."""
    from ..bench.experiment import PEERS
    from ..prepare.files import graph_names

    head, comma, _ = incomplete.rpartition(",")
    yield from ((f"{head}{comma}{name}", "transformers") for name in PEERS)
    yield from ((f"{head}{comma}{name}", "shipped") for name in graph_names())


@_offers
def settings_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """`path=value` for the graph that the command line names, else for the default one."""
    words = _words(os.environ)
    sets = [words[at] for at in range(1, len(words) - 1) if words[at - 1] == "--set"]
    yield from _settings(_named_graph(), sets, incomplete)


@_offers
def varied_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
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

    names = (word.partition("@")[0] for word in _words(os.environ)[1:])
    if (graph := next(filter(is_graph, names), None)) is not None:
        return graph
    return read_config(Path(), RunOptions())[0].graph


def _settings(graph: str, sets: Iterable[str], incomplete: str) -> Iterator[Offer]:
    """Every setting with its value as it is; of the one that is named, all that it may be."""
    settings = {path: rest for path, *rest in _fields(graph, sets)}
    path, equals, _ = incomplete.partition("=")
    fitting = [path] if equals else [name for name in settings if name.startswith(path)]
    if len(fitting) == 1:
        (path,) = fitting
        value, field, text = settings[path]
        for choice in _choices(path, field) or (_word(value),):
            yield f"{path}={choice}", text
        return
    for name, (value, _, text) in settings.items():
        yield f"{name}={_word(value)}", text


def _fields(graph: str, sets: Iterable[str]) -> Iterator[tuple[str, Any, Any, str]]:
    """Paths, values, pydantic fields and descriptions of a graph's settings, under `sets`."""
    from ...states.graph.graph import SETTING_BLOCKS, TOP_SETTINGS, Graph
    from ...states.graph.load import override, validate
    from ..prepare.files import open_source

    source = open_source(graph)
    override(source, [change for change in sets if ".kind=" in change])
    whole = validate(source)
    for block in SETTING_BLOCKS:
        spec = getattr(whole, block)
        texts = {} if spec is None else type(spec).descriptions()
        for name, text in texts.items():
            yield f"{block}.{name}", getattr(spec, name), type(spec).model_fields[name], text
    for name in TOP_SETTINGS:
        text = Graph.descriptions()[name]
        yield name, getattr(whole, name), Graph.model_fields[name], text


def _choices(path: str, field: Any) -> list[str]:
    """All that a setting may be, where these are words."""
    from ...states.graph.graph import KINDS
    from ...states.graph.plugins import installed_kinds

    block, _, name = path.partition(".")
    if name == "kind":
        return [*KINDS[block], *(installed_kinds() if block == "drafter" else ())]
    kinds = [field.annotation, *get_args(field.annotation)]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if bool in kinds:
        words += ["true", "false"]
    return [str(word) for word in words]


def _word(value: Any) -> str:
    """A value that the shell takes as it is, else nothing."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float | str) else ""


@_offers
def runs_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Names of kept runs, the newest first, and run folders."""
    from ..record.run_folder import LATEST, saved_runs

    yield LATEST, "the newest run"
    folder = Path(ctx.params.get("runs_dir") or "runs")
    yield from ((saved_run.path.name, "") for saved_run in reversed(saved_runs(folder)))


@_offers
def profiles_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Profiles of specsot.yaml, each with its target."""
    for name, profile in _profiles().items():
        yield name, str(profile.get("model", ""))


@_offers
def targets_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """The embedded model, the profiles' targets, and folders."""
    yield "embedded", "comes with the package"
    yield from ((str(profile.get("model", "")), name) for name, profile in _profiles().items())
    yield from _files(incomplete, (".gguf",))


def _profiles() -> dict[str, dict[str, Any]]:
    from ..prepare.files import SHIPPED, read_source
    from ..prepare.job import CONFIG
    from ..prepare.options import KEY, merged

    user_config = read_source(CONFIG).data if Path(CONFIG).exists() else {}
    both = merged(read_source(str(SHIPPED.parent / CONFIG)).data[KEY], (user_config or {}).get(KEY))
    return {name: profile for name, profile in both.items() if isinstance(profile, dict)}


@_offers
def codes_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
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
