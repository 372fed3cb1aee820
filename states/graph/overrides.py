"""Changes to a graph's plain data before it is validated: `extends: NAME`, `--set path=value`."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..yaml.codes import ProblemCode
from ..yaml.source import GraphError, Problem, Source, quoted
from ..yaml.yaml12 import Path
from .graph import EXTENDS, KINDS, MACHINE
from .schema import check_mapping, check_version, kind_of

OPTION = "--set"


class Change(NamedTuple):
    """What stands at a path instead; option: who says so, for messages."""

    path: Path
    value: Any
    option: str


def base_of(source: Source) -> str | None:
    """What a file extends; None if it stands alone.

    Raises:
        GraphError: `extends` is no name, or stands beside states.
    """
    if not isinstance(source.data, dict) or EXTENDS not in source.data:
        return None
    name = source.data[EXTENDS]
    why = "a graph that extends another replaces blocks only: states stand in machine files"
    code = ProblemCode.EXTENDS
    problems = [source.problem((k,), why, code, key=True) for k in MACHINE if k in source.data]
    if not isinstance(name, str) or not name:
        message = f"must be the name of a graph or the path of a file, not {kind_of(name)}"
        problems.append(source.problem((EXTENDS,), message, code))
    if problems:
        raise GraphError(problems)
    return str(name)


def extend(own: Source, base: Source) -> Source:
    """The keys of a file, and those of its base that it does not give; each keeps its place.

    Keys are taken as they are: a block of `own` has the defaults of the schema, not the base's.

    Raises:
        GraphError: the base is no mapping, or needs a later version.
    """
    check_mapping(base, "graph")
    check_version(base)
    whole = copy.copy(own)
    rest = base.data.keys() - own.data.keys()
    whole.data = {k: v for k, v in {**base.data, **own.data}.items() if k != EXTENDS}
    whole.files = {key: base.files.get(key, base.file) for key in rest} | own.files
    whole.keys = {p: at for p, at in base.keys.items() if p[0] in rest} | own.keys
    whole.values = {p: at for p, at in base.values.items() if p[:1] and p[0] in rest} | own.values
    return whole


def override(source: Source, sets: Iterable[str | Change]) -> None:
    """Apply changes, or `path=value` texts, to a source; positions of untouched values stay.

    `drafter.kind=K` and `layout.kind=K` replace the whole block, so that K's defaults hold; they
    apply before all others. Of several values for one path the last wins. Whether a path or a
    value means anything is for the schema to say, which then points at the option.

    Raises:
        GraphError: a text without `=`, a path through something that is no mapping or list, or a
            value that is not YAML.
    """
    parsed = [parse_change(one) if isinstance(one, str) else one for one in sets]
    parsed.sort(key=lambda one: one[0] not in _KIND_PATHS)  # stable: kinds first
    for path, value, option in parsed:
        if path in _KIND_PATHS:
            path = path[:1]
            value = {"kind": value}
        _put(source, path, value, option)


_KIND_PATHS = tuple((block, "kind") for block in KINDS)


def parse_change(text: str) -> Change:
    """A text `path=value`; raises GraphError."""
    option = f"{OPTION} {text}"
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        message = "write path=value, e.g. drafter.top_k=8"
        raise GraphError([Problem(option, 0, 0, "option", message, ProblemCode.OPTION)])
    try:
        return Change(tuple(path.split(".")), Source(value, option).data, option)
    except GraphError as error:
        wrong = error.problems[0]
        raise GraphError([Problem(option, 0, 0, path, wrong.message, wrong.code)]) from None


def _put(source: Source, path: Path, value: Any, option: str) -> None:
    if not isinstance(source.data, dict):
        return  # the schema will say that the file is no mapping
    node: Any = source.data
    done: Path = ()
    for i, part in enumerate(map(str, path)):
        key = _key(node, part)
        last = i == len(path) - 1
        if key is None:
            where = ".".join(map(str, path))
            why = _no_way(done, node)
            raise GraphError([Problem(option, 0, 0, where, why, ProblemCode.OPTION)])
        if last or (isinstance(node, dict) and key not in node):
            node[key] = value if last else {}
            _forget(source, (*done, key))
            source.options[(*done, key)] = option
        node = node[key]
        done = (*done, key)


def _key(node: Any, part: str) -> str | int | None:
    """How `part` is spelt as a key of this node; None when nothing can stand there."""
    if isinstance(node, Mapping):
        return int(part) if _number(part) and any(isinstance(k, int) for k in node) else part
    if isinstance(node, list) and _number(part) and int(part) < len(node):
        return int(part)
    return None


def _number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 7


def _forget(source: Source, path: Path) -> None:
    """What stood at and under `path` is gone, with its positions and older options."""
    for table in (source.keys, source.values, source.options):
        for known in [p for p in table if p[: len(path)] == path]:
            del table[known]


def _no_way(done: Path, node: Any) -> str:
    what = f"a list of {len(node)}" if isinstance(node, list) else f"{quoted(node)}, not a mapping"
    return f"{'.'.join(map(str, done))} is {what}"
