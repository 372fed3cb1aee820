"""From a parsed file to a `Program`: changes, schema, checks stage by stage, resolved ops.

Changes are `extends: NAME`, `--set path=value`, and the new names of renamed keys.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...ops.registry import OpTable, Place, RegistryError, read_table
from ..yaml.source import (
    GraphError,
    KeyPath,
    Problem,
    ProblemCode,
    RenamedKeyWarning,
    Source,
    quoted,
)
from .checks import (
    MISSING,
    check_blocks,
    check_dataflow,
    check_names,
    check_progress,
    check_schedule,
    check_shape,
    check_sizes,
    find_setting,
    with_named_functions,
)
from .graph import EXTENDS, KINDS, MACHINE, RENAMED_KEYS, Graph
from .plugins import with_installed
from .program import CLUSTER_KEYS, RUN_KEYS, OpStep, Program
from .schema import OUTLINE_DRAFTER, check_mapping, check_version, kind_of, model_at, validate

OPTION = "--set"
RENAMED_BLOCKS: tuple[KeyPath, ...] = (
    ("layout",),
    ("drafter",),
    ("skeleton",),
    OUTLINE_DRAFTER,
    ("scheduler",),
    ("limits",),
)


class Change(NamedTuple):
    """A new value at a path; option: the option or file that sets it, for messages."""

    path: KeyPath
    value: Any
    option: str


def base_of(source: Source) -> str | None:
    """The name under `extends`; None without one.

    Raises:
        GraphError: `extends` is not a name, or the file has states of its own.
    """
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
    """The keys of a file and the missing ones of its base, each with its position.

    Whole blocks are replaced: settings missing from a block of `own` get the schema's defaults.

    Raises:
        GraphError: the base is not a mapping, or needs a later version.
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


def override(source: Source, sets: Iterable[str | Change], table: OpTable | None = None) -> None:
    """Apply changes, or `path=value` texts, to a source; positions of untouched values stay.

    `drafter.kind=K` and `layout.kind=K` replace the whole block, so that K's defaults hold; they
    apply before all others. Of several values for one path the last wins. The schema checks paths
    and values, and its problems point at the option. Old names of keys are replaced, with a
    `RenamedKeyWarning`; those of ops' settings only if their `table` is given.

    Raises:
        GraphError: a text without `=`, a path through something that is not a mapping or list, a
            value that is not YAML, or a key under both its old and its new name.
    """
    changes = [parse_change(text) if isinstance(text, str) else text for text in sets]
    changes.sort(key=lambda change: change.path not in _KIND_PATHS)  # stable: kinds first
    renamed = [*_rename_keys(source)]
    for path, value, option in changes:
        if path in _KIND_PATHS:
            path = path[:1]
            value = {"kind": value}
        new_path = _new_path(path, source.data)
        _put(source, new_path, value, option)
        renamed += [_renaming(option, path, new_path)] if new_path != path else []
        renamed += _rename_keys(source) if path in RENAMED_BLOCKS else []
    renamed += _rename_in_ops(source, table)
    if renamed:
        warnings.warn("\n".join(renamed), RenamedKeyWarning, stacklevel=2)


def _rename_keys(source: Source) -> Iterator[str]:
    """Give the keys of blocks their new names; yields a sentence for each that had an old one.

    Raises:
        GraphError: a block has both the old and the new key.
    """
    for block in RENAMED_BLOCKS:
        settings: Any = source.data
        for part in block:
            settings = settings.get(part) if isinstance(settings, dict) else None
        for key in list(settings) if isinstance(settings, dict) else ():
            path = (*block, key)
            new_path = _new_path(path, source.data)
            if new_path != path:
                yield _rename(source, settings, path, new_path)


def _rename_in_ops(source: Source, table: OpTable | None) -> Iterator[str]:
    """The same for settings of ops under `with`, and for values `$block.key`."""
    states = source.data.get("states") if isinstance(source.data, dict) else None
    for name, state in states.items() if isinstance(states, dict) else ():
        ops = state.get("ops") if isinstance(state, dict) else None
        for i, call in enumerate(ops if isinstance(ops, list) else ()):
            settings = call.get("with") if isinstance(call, dict) else None
            if not isinstance(settings, dict):
                continue
            entries = table.ops.get(str(call.get("op")), ()) if table else ()
            known = {setting.name for entry in entries for setting in entry.settings}
            for key, value in list(settings.items()):
                at = ("states", name, "ops", i, "with", key)
                if isinstance(value, str) and value.startswith("$"):
                    path = tuple(value[1:].split("."))
                    new_path = _new_path(path, source.data)
                    settings[key] = f"${'.'.join(map(str, new_path))}"
                    if new_path != path:
                        yield _renaming(_where(source, at), path, new_path)
                new_keys = {new for (_, old), new in RENAMED_KEYS.items() if old == key} & known
                if key not in known and new_keys:
                    yield _rename(source, settings, at, (*at[:-1], new_keys.pop()))


def _rename(source: Source, settings: dict[Any, Any], path: KeyPath, new_path: KeyPath) -> str:
    """Rename a key of a mapping without changing the order, and move its positions."""
    key = path[-1]
    new_key = new_path[-1]
    if new_key in settings:
        message = f"given twice: {quoted(key)} is the old name of {quoted(new_key)}"
        raise GraphError([source.problem(path, message, ProblemCode.TWICE, key=True)])
    sentence = _renaming(_where(source, path), path, new_path)
    items = list(settings.items())
    settings.clear()
    settings.update((new_key if name == key else name, value) for name, value in items)
    source.move(path, new_path)
    return sentence


def _new_path(path: KeyPath, data: Any) -> KeyPath:
    """The path with the new name of its key, if the block has the new key and not the old one."""
    block = next((b for b in reversed(RENAMED_BLOCKS) if path[: len(b)] == b and path != b), None)
    if block is None:
        return path
    key = path[len(block)]
    new_key = RENAMED_KEYS.get((str(block[-1]), str(key)))
    if new_key is None:
        return path
    try:
        model = model_at(block, data)
    except RegistryError:  # a drafter that cannot be imported: the schema reports it
        return path
    if model is None or key in model.model_fields or new_key not in model.model_fields:
        return path
    return (*block, new_key, *path[len(block) + 1 :])


def _where(source: Source, path: KeyPath) -> str:
    file, line, column = source.place(path, key=True)
    return f"{file}:{line}:{column}" if line else file


def _renaming(place: str, path: KeyPath, new_path: KeyPath) -> str:
    old, new = (".".join(map(str, p)) for p in (path, new_path))
    return f"{place}: {old} is now called {new}; the old name is read in this release only"


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


def _put(source: Source, path: KeyPath, value: Any, option: str) -> None:
    if not isinstance(source.data, dict):
        return  # the schema reports that the file is not a mapping
    node: Any = source.data
    done: KeyPath = ()
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
    """`part` as a key of this node; None if the node cannot have such a key."""
    if isinstance(node, Mapping):
        return int(part) if _number(part) and any(isinstance(k, int) for k in node) else part
    if isinstance(node, list) and _number(part) and int(part) < len(node):
        return int(part)
    return None


def _number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 7


def _forget(source: Source, path: KeyPath) -> None:
    """Remove the positions and options at and under `path`."""
    for table in (source.keys, source.values, source.options):
        for known in [p for p in table if p[: len(path)] == path]:
            del table[known]


def _no_way(done: KeyPath, node: Any) -> str:
    what = f"a list of {len(node)}" if isinstance(node, list) else f"{quoted(node)}, not a mapping"
    return f"{'.'.join(map(str, done))} is {what}"


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


def load_program(
    source: Source,
    table: OpTable,
    given: frozenset[str] | None = None,
    sets: Iterable[str | Change] = (),
) -> Program:
    """Validate a graph, check it stage by stage, and resolve its ops.

    Args:
        source: the parsed file; `sets` are applied to it.
        given: initial blackboard keys; by default those of a run, or of a cluster if ops read it.
        sets: changes, see `override`.

    Raises:
        GraphError: every problem of the first stage that found any.
    """
    override(source, sets, table)
    graph = validate(source)
    table, unread = with_named_functions(graph, source, table)
    _report(check_schedule(graph, source, table))
    names = check_names(graph, source, table)
    _report(unread, names, check_sizes(graph, source), check_blocks(graph, source, table))
    _report(check_shape(graph, source))
    steps = _resolve(graph, source, table)
    if given is None:
        read = {key for ops in steps.values() for step in ops for key in step.entry.reads}
        given = CLUSTER_KEYS if "cluster" in read else RUN_KEYS
    _report(check_dataflow(graph, source, table, steps, given))
    _report(check_progress(graph, source, steps))
    guards = {e.when: table.guards[e.when] for e in graph.transitions if e.when is not None}
    return Program(graph=graph, source=source, steps=steps, guards=guards, given=given)


def _report(*checks: Iterable[Problem]) -> None:
    if problems := [problem for check in checks for problem in check]:
        raise GraphError(problems)


def _resolve(graph: Graph, source: Source, table: OpTable) -> dict[str, tuple[OpStep, ...]]:
    """Every state's ops with their settings."""
    steps: dict[str, tuple[OpStep, ...]] = dict.fromkeys(graph.states, ())
    for at, call, entry in graph.calls(table):
        assert entry is not None, "check_names has refused unknown ops"
        values = {s.name: find_setting(graph, call, s.name) for s in entry.settings}
        settings = {k: v for k, v in values.items() if v is not MISSING}
        state = str(at[1])
        steps[state] += (OpStep(state, entry, settings, source.at(at)),)
    return steps
