"""An outline that a person wrote: a file in the outline's own format, or a JSON or YAML list.

Unlike a model's outline it is read strictly: whatever would be skipped or mended there is an error
with its place here.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..yaml.source import Source, hint
from .outline import (
    MAX_LENGTH,
    MAX_TITLE,
    Outline,
    Point,
    parse_outline,
    render_outline,
    title_problem,
)
from .outline_list import USUAL_LENGTH

MAX_BYTES = 1_000_000
KEYS = ("title", "length", "tool", "deps")

Place = Callable[[int], str]  # number of an outline line -> where it comes from


class OutlineError(ValueError):
    """A file that holds no outline; one `file:line: reason` per problem."""


def load_outline(
    path: str | Path,
    *,
    max_branches: int,
    tools: Sequence[str] | None = None,
    max_length: int = MAX_LENGTH,
) -> Outline:
    """Read an outline file.

    Either the outline format itself (its first line is PLAN or DIRECT) or a list of
    {title, length?, tool?, deps?}, `deps` being numbers of earlier items, counted from 1;
    JSON if the name ends in .json, else YAML.

    Raises:
        OutlineError: the file cannot be read, or anything in it is not as it should be.
    """
    text = _read(Path(path))
    name = str(path)
    if text.lstrip().split("\n", 1)[0].strip() in ("PLAN", "DIRECT"):
        place: Place = partial("{}:{}".format, name)
    else:
        items, place = _items(text, name)
        if problems := [f"{place(i)}: {p}" for i, x in enumerate(items, 2) for p in _wrong(x)]:
            raise OutlineError("\n".join(problems))
        text = render_outline([_point(i, item) for i, item in enumerate(items, 1)])
    outline = parse_outline(text, max_branches=max_branches, tools=tools, max_length=max_length)
    if problems := list(_problems(outline, name, place)):
        raise OutlineError("\n".join(problems))
    return outline


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise OutlineError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise OutlineError(f"{path}: more than {MAX_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OutlineError(f"{path}:{line}: not UTF-8") from None


def _items(text: str, name: str) -> tuple[list[Any], Place]:
    """The items of a list, and where the item stands that becomes a given outline line."""
    try:
        source = None if name.lower().endswith(".json") else Source(text, name)
        data = json.loads(text) if source is None else source.data
    except json.JSONDecodeError as error:
        raise OutlineError(f"{name}:{error.lineno}:{error.colno}: {error.msg}") from None
    except RecursionError:
        raise OutlineError(f"{name}: nested too deeply") from None
    except ValueError as error:  # the YAML reader's own, which names the place
        raise OutlineError(str(error)) from None
    if not isinstance(data, list) or not data:
        raise OutlineError(f"{name}:1: neither PLAN, nor DIRECT, nor a list of points")

    def place(line: int) -> str:
        if source is None:
            return f"{name}: item {line - 1}"
        _, row, column = source.place((line - 2,))
        return f"{name}:{row}:{column}: item {line - 1}"

    return data, place


def _wrong(item: Any) -> Iterator[str]:
    """What is wrong with one item's shape; values out of range are found by the reader."""
    if not isinstance(item, dict):
        yield f"a point is a mapping with the keys {', '.join(KEYS)}"
        return
    for key in item:
        if key not in KEYS:
            yield f"no key {key!r}{hint(str(key), KEYS)}"
    title = item.get("title")
    if not isinstance(title, str):
        yield "title is missing" if title is None else "title is not a text"
    elif problem := title_problem(title):
        yield problem
    elif len(title.strip()) > MAX_TITLE:
        yield f"the title has more than {MAX_TITLE} characters"
    if not _is_count(item.get("length", USUAL_LENGTH)):
        yield "length is not a positive number"
    tool = item.get("tool") or ""
    if not isinstance(tool, str) or "|" in tool or "\n" in tool:
        yield "tool is not a name"
    deps = item.get("deps") or []
    if not isinstance(deps, list) or not all(map(_is_count, deps)):
        yield "deps is not a list of numbers of earlier points"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**9


def _point(number: int, item: dict[str, Any]) -> Point:
    length = item.get("length", USUAL_LENGTH)
    deps = tuple(item.get("deps") or ())
    return Point(number, length, item.get("tool"), deps, item["title"].strip())


def _problems(outline: Outline, name: str, place: Place) -> Iterator[str]:
    """Everything that was skipped or mended, and a missing END."""
    notes = sorted((*outline.skipped, *outline.mended), key=lambda note: note.line)
    for note in notes:
        yield f"{place(note.line)}: {note.reason}"
    if not notes and outline.status not in ("ok", "direct"):
        yield f"{name}: " + ("no END line" if outline.points else "no points")
