"""What the shell offers behind TAB: graphs, their settings and values, runs, profiles, codes.

Nothing here loads a model or imports torch, and whatever goes wrong offers nothing: a person who
presses TAB has asked for no message. What a function needs is imported when it is called.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import wraps
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

Offer = tuple[str, str]  # what completes the word, and what the shell may say beside it
Offering = Callable[[typer.Context, str], Iterable[Offer]]
Completion = Callable[[typer.Context, str], list[Offer]]

BASH = "complete_bash"
WORDS = "COMP_WORDS"
WORD = "COMP_CWORD"
BEFORE = "_SPECSOT_BEFORE"  # the part of a word that bash takes for words of their own
BREAKS = re.compile("[=@:]+")


def join_words(environ: MutableMapping[str, str]) -> None:
    """Undo what bash does to words: `--set drafter.kind=no` are four of them for it.

    Of the last one only what stands behind the last `=`, `@` or `:` is completed and replaced.
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
    ends = [0, *(found.end() for found in BREAKS.finditer(joined[-1]))]
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
    def found(ctx: typer.Context, incomplete: str) -> list[Offer]:
        before = os.environ.get(BEFORE, "")
        whole = before + incomplete
        try:
            fitting = [one for one in offering(ctx, whole) if one[0].startswith(whole)]
        except Exception:  # a broken specsot.yaml, a folder that is not there
            return []
        return [(text.removeprefix(before), told) for text, told in fitting]

    return found


@_offers
def graph_names_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Shipped graphs, YAML files and folders; behind GRAPH@ settings of that graph."""
    yield from _sides(incomplete)


def _sides(incomplete: str) -> Iterator[Offer]:
    from ..prepare.files import graph_names, is_graph

    name, at, own = incomplete.partition("@")
    if at and is_graph(name):
        head, comma, last = own.rpartition(",")
        for text, told in _settings(name, own.split(",")[:-1], last):
            yield f"{name}@{head}{comma}{text}", told
        return
    yield from ((one, "shipped") for one in graph_names())
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

    yield from ((one, "experiment") for one in experiment_names())
    yield from ((one, "transformers") for one in PEERS)
    yield from _sides(incomplete)


@_offers
def peers_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Several sides, the last of which is completed."""
    from ..bench.experiment import PEERS
    from ..prepare.files import graph_names

    head, comma, _ = incomplete.rpartition(",")
    yield from ((f"{head}{comma}{one}", "transformers") for one in PEERS)
    yield from ((f"{head}{comma}{one}", "shipped") for one in graph_names())


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
    for text, told in _settings(_named_graph(), (), f"{path}{equals}{last}"):
        yield text.replace("=", f"={head}{comma}", 1), told


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
    found = {path: (value, field) for path, value, field in _fields(graph, sets)}
    path, equals, _ = incomplete.partition("=")
    fitting = [path] if equals else [name for name in found if name.startswith(path)]
    if len(fitting) == 1:
        (path,) = fitting
        value, field = found[path]
        told = field.description or ""
        yield from ((f"{path}={one}", told) for one in _choices(path, field) or (_word(value),))
        return
    for name, (value, field) in found.items():
        yield f"{name}={_word(value)}", field.description or ""


def _fields(graph: str, sets: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Paths, values and pydantic fields of a graph's settings; its kinds are those of `sets`."""
    from ...states.graph.graph import SETTING_BLOCKS, TOP_SETTINGS, Graph
    from ...states.graph.load import override
    from ...states.graph.schema import validate
    from ..prepare.files import open_source

    source = open_source(graph)
    override(source, [one for one in sets if ".kind=" in one])
    whole = validate(source)
    for block in SETTING_BLOCKS:
        spec = getattr(whole, block)
        for name, field in type(spec).model_fields.items() if spec is not None else ():
            yield f"{block}.{name}", getattr(spec, name), field
    for name in TOP_SETTINGS:
        yield name, getattr(whole, name), Graph.model_fields[name]


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
    yield from ((one.path.name, "") for one in reversed(saved_runs(folder)))


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

    own = read_source(CONFIG).data if Path(CONFIG).exists() else {}
    both = merged(read_source(str(SHIPPED.parent / CONFIG)).data[KEY], (own or {}).get(KEY))
    return {name: one for name, one in both.items() if isinstance(one, dict)}


@_offers
def codes_of(ctx: typer.Context, incomplete: str) -> Iterator[Offer]:
    """Codes that can be explained."""
    from ..prepare.explained import explanations

    known = explanations()
    yield from ((str(code), one.title) for code, one in known.problems.items())
    yield from ((str(code), one.title) for code, one in known.exits.items())


BY_OPTION: dict[str, Completion] = {
    "graph": graph_names_of,
    "sets": settings_of,
    "profile": profiles_of,
    "model": targets_of,
    "drafter_model": targets_of,
}
