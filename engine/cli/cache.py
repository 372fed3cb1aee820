"""`specsot cache add | list | drop`: what a folder of cached chunks holds."""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ...states.text.documents import CHUNK_TOKENS
from ..chunks.files import ChunkFiles, ChunkInfo
from ..errors import UsageError
from ..prepare.options import RunOptions
from ..shell import complain, user_errors
from .run import Device, Drafter, Dtype, Json, Model, Sets, Threads, option

SCHEMA = 1
SHOWN = 12  # digits of a key in a table
LEAST = 4  # digits of a key that name it

cache = typer.Typer(help="Cached chunks of documents: add, list, drop.", no_args_is_help=True)

CacheDir = Annotated[Path, option("CACHE_DIR", "The folder of cached chunks.")]
Graph = Annotated[
    str | None, option("GRAPH", "The graph whose models read them [specsot.yaml's].", "--graph")
]
MaxBytes = Annotated[
    int,
    typer.Option(
        min=1, envvar="SPECSOT_CACHE_BYTES", help="Beyond these, those used longest ago go."
    ),
]


@cache.command()
def add(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Texts, or .jsonl of (title, text).")
    ],
    graph: Graph = None,
    model: Model = None,
    drafter_model: Drafter = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    sets: Sets = None,
    cache_dir: CacheDir = Path("chunks"),
    max_bytes: MaxBytes = 8 << 30,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a chunk.")
    ] = CHUNK_TOKENS,
    as_json: Json = False,
) -> None:
    """Prefill documents, each chunk alone, and keep their K, V and drafter features."""
    options = RunOptions(
        graph=graph,
        model=model,
        drafter_model=drafter_model,
        device=device,
        dtype=dtype,
        threads=threads,
        sets=tuple(sets or ()),
    )
    with user_errors():
        from .cache_command import add_documents

        found = add_documents(files, options, cache_dir, max_bytes, chunk_tokens)
    if as_json:
        print(_document(chunks=[{**_plain(one.info), "made": one.made} for one in found]))
        return
    for one in found:
        print(f"{'made ' if one.made else 'there'}  {_line(one.info)}")


@cache.command("list")
def list_chunks(cache_dir: CacheDir = Path("chunks"), as_json: Json = False) -> None:
    """The cached chunks, those used last at the end."""
    with user_errors():
        found, problems = ChunkFiles(cache_dir).list()
    for problem in problems:
        complain(f"warning: {problem}; it is ignored")
    if as_json:
        print(_document(chunks=[_plain(info) for info in found], problems=problems))
        return
    for info in found:
        print(_line(info))
    print(f"{len(found)} chunks, {sum(info.bytes for info in found)} bytes")


@cache.command()
def drop(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY...", help="Keys, or how they begin.")
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Drop every chunk.")] = False,
    cache_dir: CacheDir = Path("chunks"),
    as_json: Json = False,
) -> None:
    """Drop cached chunks, damaged ones too."""
    with user_errors():
        if bool(keys) == all_of_them:
            raise UsageError("give KEYs of `specsot cache list`, or --all")
        files = ChunkFiles(cache_dir)
        there = files.digests()
        wanted = there if all_of_them else [_named(key, there) for key in keys or ()]
        dropped = [digest for digest in dict.fromkeys(wanted) if files.drop(digest)]
    print(_document(dropped=dropped) if as_json else f"{len(dropped)} chunks dropped")


def _named(key: str, there: list[str]) -> str:
    """The one key that begins so; raises UsageError."""
    found = [digest for digest in there if digest.startswith(key.lower())]
    if len(key) < LEAST or len(found) != 1:
        some = f"{len(found)} chunks have" if found else "no chunk has"
        least = f"; at least {LEAST} digits are needed" if len(key) < LEAST else ""
        raise UsageError(f"KEY {key}: {some} a key that begins so{least}")
    return found[0]


def _line(info: ChunkInfo) -> str:
    used = datetime.fromtimestamp(info.used).strftime("%Y-%m-%d %H:%M")
    taps = ",".join(map(str, info.taps)) or "-"
    made_with = f"{info.dtype:9} model {info.model_hash[:SHOWN]}  taps {taps:9}"
    size = f"{info.tokens:6} tokens {info.bytes:11} bytes"
    return f"{info.digest[:SHOWN]}  {size}  {made_with}  {used}  {info.name}"


def _plain(info: ChunkInfo) -> dict[str, Any]:
    plain = {name: getattr(info, name) for name in ChunkInfo.__slots__}
    return {"key": plain.pop("digest"), **plain}


def _document(**parts: Any) -> str:
    return json.dumps({"schema_version": SCHEMA, **parts}, indent=2)
