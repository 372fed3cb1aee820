"""Shell completion: graphs and their settings. typer keeps the offers that start with the word. It
loads no model and no torch: a function imports its dependencies when it is called."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

Offer = tuple[str, str]  # a completion and its description


def command_line() -> list[str]:
    """The words to complete after the program; typer's context lacks an unfinished option."""
    words = os.environ.get("_TYPER_COMPLETE_ARGS", "") or os.environ.get("COMP_WORDS", "")
    return words.split()[1:]


def sides_of(incomplete: str) -> Iterator[Offer]:
    """Shipped graphs, YAML files and folders; after GRAPH@ settings of that graph."""
    from ..prepare.files import graph_names, is_graph

    name, at, changes = incomplete.partition("@")
    if at and is_graph(name):
        head, comma, _ = changes.rpartition(",")
        settings = _settings(name, head.split(","))
        yield from ((f"{name}@{head}{comma}{text}", doc) for text, doc in settings)
        return
    yield from ((graph_name, "shipped") for graph_name in graph_names())
    head = incomplete[: incomplete.rfind("/") + 1]
    for path in sorted(Path(head).iterdir()) if Path(head).is_dir() else ():
        if path.is_dir() and not path.name.startswith("."):
            yield f"{head}{path.name}/", "folder"
        elif path.suffix in (".yaml", ".yml"):
            yield f"{head}{path.name}", "file"


def settings_of() -> Iterator[Offer]:
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


BY_OPTION = {"graph": sides_of, "refs": sides_of, "sets": settings_of, "vary": settings_of}
