"""Shell completion: graphs, setting paths, experiments, runs, profiles, models and codes.

It loads no model and no torch: a function imports its dependencies when it is called."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

Offer = tuple[str, str]  # a completion and its description
Completion = Callable[[typer.Context, str], list[Offer]]


def command_line() -> list[str]:
    """The words to complete after the program; typer's context lacks an unfinished option."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS", "") or os.environ.get("COMP_WORDS", "")
    return words.split()[1:]


def _completion(offers: Callable[[str, typer.Context], Iterable[Offer]]) -> Completion:
    """Of the offers those that start with the incomplete word; none after an error."""

    def complete(ctx: typer.Context, incomplete: str) -> list[Offer]:
        try:
            return [offer for offer in offers(incomplete, ctx) if offer[0].startswith(incomplete)]
        except Exception:  # a broken specsot.yaml, a folder that does not exist
            return []

    return complete


def _sides(incomplete: str) -> Iterator[Offer]:
    """Shipped graphs, YAML files and folders; after GRAPH@ settings of that graph."""
    from ..prepare.files import graph_names, is_graph

    name, at, changes = incomplete.partition("@")
    if at and is_graph(name):
        head, comma, _ = changes.rpartition(",")
        settings = _settings(name, head.split(","))
        yield from ((f"{name}@{head}{comma}{text}", doc) for text, doc in settings)
        return
    yield from ((graph_name, "shipped") for graph_name in graph_names())
    yield from _files(incomplete, (".yaml", ".yml"))


def _files(incomplete: str, endings: tuple[str, ...]) -> Iterator[Offer]:
    head = incomplete[: incomplete.rfind("/") + 1]
    for path in sorted(Path(head).iterdir()) if Path(head).is_dir() else ():
        if path.is_dir() and not path.name.startswith("."):
            yield f"{head}{path.name}/", "folder"
        elif path.suffix in endings:
            yield f"{head}{path.name}", "file"


@_completion
def graph_names_of(incomplete: str, _: typer.Context) -> Iterable[Offer]:
    return _sides(incomplete)


@_completion
def benched_of(incomplete: str, _: typer.Context) -> Iterator[Offer]:
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
def settings_of(*_: object) -> Iterable[Offer]:
    """Settings of the first graph that the command line names, else of the default one."""
    from ..prepare.files import is_graph
    from ..prepare.job import read_settings

    words = command_line()
    sets = [words[at] for at in range(1, len(words) - 1) if words[at - 1] == "--set"]
    graph = next((name for word in words[1:] if is_graph(name := word.partition("@")[0])), None)
    return _settings(graph or read_settings(Path())[0].graph, sets)


def _settings(graph: str, sets: Iterable[str]) -> Iterator[Offer]:
    """Every setting with its present value; of the changes `sets` only those of kinds matter."""
    from ...states.graph.graph import SETTING_BLOCKS, TOP_SETTINGS
    from ...states.graph.load import override, validate
    from ..prepare.files import open_source

    source = open_source(graph)
    override(source, [change for change in sets if ".kind=" in change])
    whole = validate(source)
    for block in (*SETTING_BLOCKS, ""):
        spec = getattr(whole, block) if block else whole
        for name, text in type(spec).descriptions().items() if spec is not None else ():
            if block or name in TOP_SETTINGS:
                value = getattr(spec, name)
                value = str(value).lower() if isinstance(value, bool) else value
                plain = isinstance(value, int | float | str)  # the shell takes it as it is
                yield f"{block}.{name}={value if plain else ''}".removeprefix("."), text


@_completion
def runs_of(_: str, ctx: typer.Context) -> Iterator[Offer]:
    """Names of kept runs, the newest first."""
    from ..record.run_folder import LATEST, saved_runs

    yield LATEST, "the newest run"
    folder = Path(ctx.params.get("runs_dir") or "runs")
    yield from ((saved_run.path.name, "") for saved_run in reversed(saved_runs(folder)))


@_completion
def profiles_of(*_: object) -> Iterable[Offer]:
    return _profiles().items()


@_completion
def targets_of(incomplete: str, _: typer.Context) -> Iterator[Offer]:
    """The embedded model, the profiles' targets, and folders."""
    yield "embedded", "comes with the package"
    yield from ((target, name) for name, target in _profiles().items())
    yield from _files(incomplete, (".gguf",))


def _profiles() -> dict[str, str]:
    from ..prepare.job import read_settings

    settings, _ = read_settings(Path())
    return {name: profile.model for name, profile in settings.profiles.items()}


@_completion
def codes_of(*_: object) -> Iterator[Offer]:
    from .explained import explanations

    return ((code, page.title) for code, page in explanations().items())


BY_OPTION: dict[str, Completion] = {
    "graph": graph_names_of,
    "sets": settings_of,
    "profile": profiles_of,
    "model": targets_of,
    "drafter_model": targets_of,
}
