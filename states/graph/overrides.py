"""`--set path=value`: typed changes to a graph's plain data before it is validated."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..yaml.source import GraphError, Problem, Source, quoted
from ..yaml.yaml12 import Path
from .graph import KINDS

OPTION = "--set"


def override(source: Source, sets: Iterable[str]) -> None:
    """Apply `path=value` texts to a source; positions of untouched values stay.

    `drafter.kind=K` and `layout.kind=K` replace the whole block, so that K's defaults hold; they
    apply before all others. Of several values for one path the last wins. Whether a path or a
    value means anything is for the schema to say, which then points at the option.

    Raises:
        GraphError: a text without `=`, a path through something that is no mapping or list, or a
            value that is not YAML.
    """
    parsed = [_parse(text) for text in sets]
    parsed.sort(key=lambda one: one[0] not in _KIND_PATHS)  # stable: kinds first
    for path, value, option in parsed:
        if path in _KIND_PATHS:
            _put(source, path[:1], {"kind": value}, option)
        else:
            _put(source, path, value, option)


_KIND_PATHS = tuple((block, "kind") for block in KINDS)


def _parse(text: str) -> tuple[Path, Any, str]:
    option = f"{OPTION} {text}"
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise GraphError(
            [Problem(option, 0, 0, "option", "write path=value, e.g. drafter.top_k=8")]
        )
    try:
        return tuple(path.split(".")), Source(value, option).data, option
    except GraphError as error:
        wrong = error.problems[0]
        raise GraphError([Problem(option, 0, 0, path, wrong.message)]) from None


def _put(source: Source, path: Path, value: Any, option: str) -> None:
    if not isinstance(source.data, dict):
        return  # the schema will say that the file is no mapping
    node: Any = source.data
    done: Path = ()
    for part in path[:-1]:
        key = _key(node, str(part))
        if key is None or not _has(node, key):
            if not isinstance(node, dict):
                raise GraphError([Problem(option, 0, 0, _dotted(path), _no_way(done, node))])
            node[part] = {}
            _forget(source, (*done, part))
            source.options[(*done, part)] = option
            key = part
        node, done = node[key], (*done, key)
    key = _key(node, str(path[-1]))
    if key is None:
        raise GraphError([Problem(option, 0, 0, _dotted(path), _no_way(done, node))])
    node[key] = value
    _forget(source, (*done, key))
    source.options[(*done, key)] = option


def _key(node: Any, part: str) -> str | int | None:
    """How `part` is spelt as a key of this node; None when nothing can stand there."""
    if isinstance(node, Mapping):
        return int(part) if _number(part) and any(isinstance(k, int) for k in node) else part
    if isinstance(node, list) and _number(part) and int(part) < len(node):
        return int(part)
    return None


def _number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 7


def _has(node: Any, key: str | int) -> bool:
    return isinstance(node, list) or key in node


def _forget(source: Source, path: Path) -> None:
    """What stood at and under `path` is gone, with its positions and older options."""
    for table in (source.keys, source.values, source.options):
        for known in [p for p in table if p[: len(path)] == path]:
            del table[known]


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _no_way(done: Path, node: Any) -> str:
    what = f"a list of {len(node)}" if isinstance(node, list) else f"{quoted(node)}, not a mapping"
    return f"{_dotted(done)} is {what}"
