"""From a parsed file to a `Program`: `extends`, `--set`, renamed keys, schema, checks."""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from ...ops.registry import OpTable, Place, RegistryError, read_table
from ..yaml.source import (
    MAX_PROBLEMS,
    GraphError,
    KeyPath,
    Problem,
    ProblemCode,
    RenamedKeyWarning,
    Source,
    hint,
    quoted,
)
from ..yaml.spec import check_mapping, keys_of, kind_of, model_at, problem_of
from .checks import checked_program
from .graph import EXTENDS, KINDS, LAYOUTS, MACHINE, RENAMED_KEYS, VERSION, Graph, Program
from .plugins import DRAFTERS_GROUP, PLUG_INS, drafter_class, installed_names, with_installed

OPTION = "--set"
OUTLINE_DRAFTER: KeyPath = ("skeleton", "drafter")
RENAMED_BLOCKS = [*dict.fromkeys((block,) for block, _ in RENAMED_KEYS), OUTLINE_DRAFTER]
_KIND_PATHS = tuple((block, "kind") for block in KINDS)


class Change(NamedTuple):
    """A new value at a path; option: the option or file that sets it, for messages."""

    path: KeyPath
    value: Any
    option: str


def load_program(source: Source, table: OpTable, sets: Iterable[str | Change] = ()) -> Program:
    """Apply `sets` to a source (`override`), validate it, check it stage by stage, resolve its ops.
    Raises GraphError: every problem of the first stage that found any."""
    override(source, sets, table)
    return checked_program(validate(source), source, table)


DIRECTOR = "engine.workers.director"  # the machine of a run on workers


def rooms() -> tuple[Place, ...]:
    """The modules that declare ops and guards: those of `ops` and `states`, and the director."""
    package = Path(__file__).parents[2]
    root = __name__.split(".")[0]
    director = (f"{root}.{DIRECTOR}", package.joinpath(*DIRECTOR.split(".")).with_suffix(".py"))
    return ((f"{root}.ops", package / "ops"), (f"{root}.states", package / "states"), director)


def op_table() -> OpTable:
    """Every op and guard, of specsot and of installed packages, without importing them."""
    return with_installed(read_table(rooms()))


def base_of(source: Source) -> str | None:
    """The name under `extends`, if any; raises GraphError: no name, or states of the file's own."""
    if not isinstance(source.data, dict) or EXTENDS not in source.data:
        return None
    name = source.data[EXTENDS]
    why = "a graph that extends another replaces blocks only; states belong in machine files"
    code = ProblemCode.EXTENDS
    problems = [source.problem((k,), why, code, key=True) for k in MACHINE if k in source.data]
    if not isinstance(name, str) or not name:
        message = f"must be the name of a graph or the path of a file, not {kind_of(name)}"
        problems.append(source.problem((EXTENDS,), message, code))
    if problems:
        raise GraphError(problems)
    return str(name)


def extend(own: Source, base: Source) -> Source:
    """The keys of a file and the missing ones of its base, with their positions. Whole blocks are
    replaced: missing settings of a block of `own` get the schema's defaults. Raises GraphError: the
    base is not a mapping, or needs a later version."""
    _check_version(base)
    whole = copy.copy(own)
    rest = base.data.keys() - own.data.keys()
    whole.data = {k: v for k, v in {**base.data, **own.data}.items() if k != EXTENDS}
    whole.marks = {p: mark for p, mark in base.marks.items() if p and p[0] in rest} | own.marks
    return whole


def validate(source: Source) -> Graph:
    """Build the graph. Raises GraphError: every problem of the schema, in file order."""
    _check_version(source)
    data, source.origins = _flat_edges(source.data)
    problems = list(_nulls(source, data, ()))
    try:
        graph = Graph.model_validate(data)
    except ValidationError as error:
        nulls = {problem.where for problem in problems}
        errors = error.errors(include_url=False)[: 10 * MAX_PROBLEMS]
        rest = (_schema_problem(source, e) for e in errors)
        problems += [p for p in rest if p.where not in nulls]
    if problems:
        raise GraphError(problems)
    return graph


def _check_version(source: Source) -> None:
    """Raise GraphError if the file is not a mapping, or needs a later version of specsot."""
    check_mapping(source, "graph")
    version = source.data.get("version")
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        needs = f"the graph needs format {quoted(version)}, this specsot reads {VERSION}"
        message = f"{needs}: upgrade specsot"
        raise GraphError([source.problem(("version",), message, ProblemCode.VERSION)])


def _flat_edges(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, KeyPath]]:
    """The data with an edge for each state under `from`, sorted by it, and the edges' places."""
    edges = data.get("transitions")
    if not isinstance(edges, list):
        return dict(data), {}
    states = data.get("states")
    order = list(states) if isinstance(states, dict) else []
    # A state, an edge that leaves it, and the path of the edge in the file or that of the state.
    flat: list[tuple[Any, Any, KeyPath]] = []
    for i, edge in enumerate(edges):
        sources = edge.get("from") if isinstance(edge, dict) else None
        if isinstance(sources, list) and sources:
            flat += [(s, {**edge, "from": s}, (i, "from", j)) for j, s in enumerate(sources)]
        else:
            flat.append((sources, edge, (i,)))
    flat.sort(key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    origins: dict[KeyPath, KeyPath] = {}
    for i, (_, _, at) in enumerate(flat):
        origins["transitions", i] = ("transitions", at[0])
        if at[1:]:
            origins["transitions", i, "from"] = ("transitions", *at)
    return {**data, "transitions": [edge for _, edge, _ in flat]}, origins


def _nulls(source: Source, value: Any, path: KeyPath) -> Iterator[Problem]:
    """No setting of a graph may be null, except settings of ops under `with`."""
    if value is None:
        yield source.problem(path, "must not be null", ProblemCode.NULL)
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            is_of_ops = key == "with" and path[:1] == ("states",)
            if isinstance(inner, dict | list | None) and not is_of_ops:
                yield from _nulls(source, inner, (*path, key))


def value_at(path: KeyPath, data: Any) -> Any:
    """The value at a path of keys; None if there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _model_at(loc: KeyPath, data: Any) -> type[BaseModel] | None:
    block = OUTLINE_DRAFTER if loc[:2] == OUTLINE_DRAFTER else loc[:1]
    if not loc or block[-1] not in KINDS:
        return model_at(Graph, loc)
    kind = value_at((*block, "kind"), data)
    if not isinstance(kind, str):
        return None
    if block == ("layout",):
        return LAYOUTS.get(kind)
    drafter = drafter_class(kind)
    return drafter.Settings if drafter else None


def _schema_problem(source: Source, error: Any) -> Problem:
    """A pydantic error as a problem; that of a kind names the kinds that there are."""
    loc: KeyPath = error["loc"]
    if error["type"] == "union_tag_invalid":
        kind = error["input"]["kind"]
        block = str(source.nearest(loc)[-1])
        names = [*KINDS[block], *(installed_names(DRAFTERS_GROUP) if block == "drafter" else ())]
        known = ", ".join(names)
        message = f"must be one of: {known}"
        if isinstance(kind, str):
            message = f"no {block} {quoted(kind)}{hint(kind, names)}; there are: {known}"
            if kind in PLUG_INS:
                message = f"the drafter {quoted(kind)} is a plug-in: pip install ./{PLUG_INS[kind]}"
        return source.problem((*loc, "kind"), message, ProblemCode.UNKNOWN_KIND)
    if error["type"] == "extra_forbidden":
        key = str(loc[-1])
        parent = source.nearest(loc[:-1])
        block = str(parent[-1]) if len(parent) == 1 or parent == OUTLINE_DRAFTER else ""
        if other := [kind for kind, x in KINDS.get(block, {}).items() if key in x.model_fields]:
            kind = value_at((*parent, "kind"), source.data)
            message = f"{quoted(key)} belongs to the {block} {' or '.join(other)}, this is {kind}"
            return source.problem(loc, message, ProblemCode.OTHER_KIND, key=True)

    def known_keys(path: KeyPath) -> list[str]:
        return [*keys_of(_model_at(path, source.data)), *([] if path else [EXTENDS])]

    return problem_of(source, error, known_keys)


def override(source: Source, sets: Iterable[str | Change], table: OpTable | None = None) -> None:
    """Apply changes, or `path=value` texts, to a source; positions of untouched values stay.

    `drafter.kind=K` and `layout.kind=K` replace the whole block, so that K's defaults hold; they
    apply before all others. Of several values for one path the last wins. The schema checks paths
    and values. Old names of keys are replaced, with a `RenamedKeyWarning`; those of ops' settings
    only if their `table` is given.

    Raises GraphError: a text without `=`, a path through something that is not a mapping or
    list, a value that is not YAML, or a key under both its old and its new name."""
    changes = [parse_change(text) if isinstance(text, str) else text for text in sets]
    changes.sort(key=lambda change: change.path not in _KIND_PATHS)  # stable: kinds first
    renamed: list[str] = []  # a sentence for each old name
    for path, value, option in changes:
        if path in _KIND_PATHS:
            path = path[:1]
            value = {"kind": value}
        _rename_in_blocks(source, renamed)
        if (new_path := _new_path(source, path)) != path:
            renamed.append(_sentence(option, path, new_path))
        _put(source, new_path, value, option)
    _rename_in_blocks(source, renamed)
    _rename_in_ops(source, table, renamed)
    if renamed:
        warnings.warn("\n".join(renamed), RenamedKeyWarning, stacklevel=2)


def _new_path(source: Source, path: KeyPath) -> KeyPath:
    """The path with its key's new name, if its block has that and not the old one."""
    block = next((b for b in reversed(RENAMED_BLOCKS) if path[: len(b)] == b and path != b), ())
    new_key = RENAMED_KEYS.get((str(block[-1]), str(path[len(block)]))) if block else None
    if new_key is not None:
        with suppress(RegistryError):  # a drafter that cannot be imported: the schema reports it
            keys = keys_of(_model_at(block, source.data))
            if path[len(block)] not in keys and new_key in keys:
                return (*block, new_key, *path[len(block) + 1 :])
    return path


def _rename_in_blocks(source: Source, renamed: list[str]) -> None:
    """Replace old names of keys; raises GraphError for a key under both its names."""
    for block in RENAMED_BLOCKS:
        settings = value_at(block, source.data)
        for key in list(settings) if isinstance(settings, dict) else ():
            path = (*block, key)
            if (new_path := _new_path(source, path)) != path:
                renamed.append(_rename(source, settings, path, new_path))


def _rename_in_ops(source: Source, table: OpTable | None, renamed: list[str]) -> None:
    """The same for settings of ops under `with`, and for values `$block.key`."""
    states = value_at(("states",), source.data)
    for name in states if isinstance(states, dict) else ():
        ops = value_at(("states", name, "ops"), source.data)
        for i, call in enumerate(ops if isinstance(ops, list) else ()):
            settings = call.get("with") if isinstance(call, dict) else None
            if not isinstance(settings, dict):
                continue
            entry = table.ops.get(str(call.get("op"))) if table else None
            known = {setting.name for setting in entry.settings} if entry else set()
            for key, value in list(settings.items()):
                at = ("states", name, "ops", i, "with", key)
                if isinstance(value, str) and value.startswith("$"):
                    path: KeyPath = tuple(value[1:].split("."))
                    if (new_path := _new_path(source, path)) != path:
                        renamed.append(_sentence(_place(source, at), path, new_path))
                        settings[key] = f"${'.'.join(map(str, new_path))}"
                new_keys = {new for (_, old), new in RENAMED_KEYS.items() if old == key} & known
                if key not in known and new_keys:
                    renamed.append(_rename(source, settings, at, (*at[:-1], new_keys.pop())))


def _rename(source: Source, settings: dict[Any, Any], path: KeyPath, new_path: KeyPath) -> str:
    new_key = new_path[-1]
    if new_key in settings:
        message = f"given twice: {quoted(path[-1])} is the old name of {quoted(new_key)}"
        raise GraphError([source.problem(path, message, ProblemCode.TWICE, key=True)])
    sentence = _sentence(_place(source, path), path, new_path)
    settings[new_key] = settings.pop(path[-1])
    source.move(path, new_path)
    return sentence


def _place(source: Source, path: KeyPath) -> str:
    file, line, column = source.place(path, key=True)
    return f"{file}:{line}:{column}" if line else file


def _sentence(place: str, path: KeyPath, new_path: KeyPath) -> str:
    names = " is now called ".join(".".join(map(str, p)) for p in (path, new_path))
    return f"{place}: {names}; the old name is read in this release only"


def parse_change(text: str) -> Change:
    """A text `path=value`; raises GraphError."""
    option = f"{OPTION} {text}"
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        message = "write path=value, e.g. drafter.top_k=8"
        raise GraphError([Problem(option, "option", message, ProblemCode.OPTION)])
    try:
        return Change(tuple(path.split(".")), Source(value, option).data, option)
    except GraphError as error:
        wrong = error.problems[0]
        raise GraphError([Problem(option, path, wrong.message, wrong.code)]) from None


def _put(source: Source, path: KeyPath, value: Any, option: str) -> None:
    """Set a value of a source; where it was, it has no position any more."""
    if not isinstance(source.data, dict):
        return  # the schema reports that the file is not a mapping
    node: Any = source.data
    done: KeyPath = ()
    for part in map(str, path):
        number = int(part) if part.isascii() and part.isdigit() and len(part) < 7 else None
        is_list = isinstance(node, list)
        reaches = number in range(len(node)) if is_list else isinstance(node, dict)
        if not reaches:
            what = f"a list of {len(node)}" if is_list else f"{quoted(node)}, not a mapping"
            where, here = (".".join(map(str, p)) for p in (path, done))
            raise GraphError([Problem(option, where, f"{here} is {what}", ProblemCode.OPTION)])
        is_number = number is not None and (is_list or any(isinstance(k, int) for k in node))
        key: Any = number if is_number else part
        done = (*done, key)
        is_last = len(done) == len(path)
        if is_last or (isinstance(node, dict) and key not in node):
            node[key] = value if is_last else {}
            source.replace(done, option)
        node = node[key]
