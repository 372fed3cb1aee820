"""`specsot cache add | list | drop`: folders of cached chunks."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ...states.text.documents import CHUNK_TOKENS
from ..chunks.files import ChunkFiles, ChunkInfo
from ..errors import UsageError
from ..prepare.options import OptionText, RunOptions
from ..shell import complain, print_json
from .options import Json, argument, option, takes

KEY_DIGITS = 12  # of a key in a table
MIN_KEY_DIGITS = 4  # of a key on the command line

cache = typer.Typer(help="Cached chunks of documents: add, list, drop.", no_args_is_help=True)

MODELS = ("profile", "model", "drafter_model", "device", "dtype", "weights", "threads", "sets")
GRAPH = OptionText("The graph whose models read them [specsot.yaml's].")
CacheDir = Annotated[Path, option("The folder of cached chunks.", envvar="SPECSOT_CACHE_DIR")]
MAX_BYTES = option("Beyond these, those used longest ago go.", min=1, envvar="SPECSOT_CACHE_BYTES")
CHUNK = option("Most tokens of a chunk.", min=1)


@cache.command()
@takes(*MODELS, "as_json", graph=GRAPH)
def add(
    options: RunOptions,
    files: Annotated[list[Path], argument("Texts, or .jsonl of (title, text).", metavar="FILE...")],
    cache_dir: CacheDir = Path("chunks"),
    max_bytes: Annotated[int, MAX_BYTES] = 8 << 30,
    chunk_tokens: Annotated[int, CHUNK] = CHUNK_TOKENS,
) -> None:
    """Prefill documents, each chunk alone, and keep their K, V and drafter features."""
    from ..run.api import add_documents

    chunks = [*add_documents(files, options, cache_dir, max_bytes, chunk_tokens)]
    if options.as_json:
        print_json(chunks=[{**_plain(info), "made": is_new} for info, is_new in chunks])
    else:
        for info, is_new in chunks:
            print(f"{'made ' if is_new else 'there'}  {_line(info)}")


@cache.command("list")
def list_chunks(cache_dir: CacheDir = Path("chunks"), as_json: Json = False) -> None:
    """The cached chunks, those used last at the end."""
    chunks, problems = ChunkFiles(cache_dir).list()
    for problem in problems:
        complain(f"warning: {problem}; it is ignored")
    if as_json:
        print_json(chunks=[_plain(info) for info in chunks], problems=problems)
        return
    for info in chunks:
        print(_line(info))
    print(f"{len(chunks)} chunks, {sum(info.bytes for info in chunks)} bytes")


@cache.command()
def drop(
    keys: Annotated[
        list[str] | None, argument("Keys, or how they begin.", metavar="KEY...")
    ] = None,
    all_of_them: Annotated[bool, option("Drop every chunk.", "--all")] = False,
    cache_dir: CacheDir = Path("chunks"),
    as_json: Json = False,
) -> None:
    """Drop cached chunks, damaged ones too."""
    if bool(keys) == all_of_them:
        raise UsageError("give KEYs of `specsot cache list`, or --all")
    files = ChunkFiles(cache_dir)
    cached = files.digests()
    digests = cached if all_of_them else [_digest(key, cached) for key in keys or ()]
    dropped = [digest for digest in dict.fromkeys(digests) if files.drop(digest)]
    if as_json:
        print_json(dropped=dropped)
    else:
        print(f"{len(dropped)} chunks dropped")


def _digest(key: str, digests: list[str]) -> str:
    """The digest that starts with `key`; raises UsageError unless it is unique."""
    matches = [digest for digest in digests if digest.startswith(key.lower())]
    if len(key) < MIN_KEY_DIGITS or len(matches) != 1:
        some = f"{len(matches)} chunks have" if matches else "no chunk has"
        least = (
            f"; at least {MIN_KEY_DIGITS} digits are needed" if len(key) < MIN_KEY_DIGITS else ""
        )
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
