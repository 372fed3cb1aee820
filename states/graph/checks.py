"""What only a whole graph can tell: names, values that fit each other, ways.

Each check yields every problem it finds; a later stage runs only when the earlier ones found
nothing, so that one typo is one message.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ...ops.registry import OpEntry, OpSetting, OpTable, RegistryError
from ..yaml.codes import ProblemCode
from ..yaml.source import Problem, Source, hint, quoted
from ..yaml.yaml12 import Path
from .drafter_settings import DrafterSettings, largest, nodes_for
from .graph import SETTING_BLOCKS, TOP_SETTINGS, Call, Graph
from .plugins import named_function
from .schema import kind_of

MISSING = object()
OPTIONAL_BLOCKS = [name for name, field in Graph.model_fields.items() if field.default is None]


def with_named_functions(
    graph: Graph, src: Source, table: OpTable
) -> tuple[OpTable, list[Problem]]:
    """The table with all that the graph names as `package.module:function`, and what is not there.

    Later checks take such a name as any other.
    """
    ops = dict(table.ops)
    guards = dict(table.guards)
    problems = []
    for at, kind, name in _named_functions(graph, table):
        try:
            entry = named_function(kind, name)
        except RegistryError as error:
            problems.append(src.problem(at, str(error), ProblemCode.NO_FUNCTION))
            continue
        if kind == "op":
            ops[name] = (entry,)
        else:
            guards[name] = entry
    return OpTable(ops, guards, table.faults), problems


def _named_functions(graph: Graph, table: OpTable) -> Iterator[tuple[Path, str, str]]:
    for at, call, _ in graph.calls(table):
        if ":" in call.op:
            yield (*at, "op"), "op", call.op
    for i, edge in enumerate(graph.transitions):
        if edge.when is not None and ":" in edge.when:
            yield ("transitions", i, "when"), "guard", edge.when


def check_names(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """States, ops, guards, settings and `$refs` must exist; named functions were looked up."""
    states = graph.states
    if graph.initial not in states:
        message = _no("state", graph.initial, states)
        yield src.problem(("initial",), message, ProblemCode.NO_STATE)
    for at, call, entry in graph.calls(table):
        yield from _check_call(graph, src, table, at, call, entry)
    for i, edge in enumerate(graph.transitions):
        for end, name in (("from", edge.from_), ("to", edge.to)):
            if name not in states:
                message = _no("state", name, states)
                yield src.problem(("transitions", i, end), message, ProblemCode.NO_STATE)
        if edge.when is not None and edge.when not in table.guards and ":" not in edge.when:
            message = _no("guard", edge.when, table.guards, table.faults)
            yield src.problem(("transitions", i, "when"), message, ProblemCode.NO_GUARD)
    yield from _check_blocks(graph, src, table)


def _no(what: str, name: str, known: Mapping[str, Any], faults: Iterable[str] = ()) -> str:
    return "; ".join([f"no {what} {quoted(name)}{hint(name, known)}", *faults])


def _check_call(
    graph: Graph, src: Source, table: OpTable, at: Path, call: Call, entry: OpEntry | None
) -> Iterator[Problem]:
    if call.op not in table.ops:
        if ":" not in call.op:
            message = _no("op", call.op, table.ops, table.faults)
            yield src.problem((*at, "op"), message, ProblemCode.NO_OP)
        return
    if entry is None:
        kinds = f"layout {graph.layout.kind!r} with drafter {graph.drafter.kind!r}"
        message = f"op {call.op!r} does not run under {kinds}"
        message = "; ".join([message, *table.faults])
        yield src.problem((*at, "op"), message, ProblemCode.NO_VARIANT)
        return
    settings = {s.name: s for s in entry.settings}
    for key, value in call.with_.items():
        if key not in settings:
            message = f"{call.op!r} has no setting {quoted(key)}{hint(key, settings)}"
            yield src.problem((*at, "with", key), message, ProblemCode.NO_SETTING, key=True)
        elif wrong := _wrong_value(graph, settings[key], value):
            yield src.problem((*at, "with", key), *wrong)
    if any(getattr(graph, block, None) is None for block in entry.declared.needs):
        return  # the block that would give them is missing, which is told by itself
    for name in (s.name for s in entry.settings if s.required and s.name not in call.with_):
        if find_setting(graph, call, name) is MISSING:
            message = f"{call.op!r} needs the setting {name!r}: no block gives it"
            yield src.problem(at, f"{message}, nor does `with`", ProblemCode.NEEDS_SETTING)


def find_setting(graph: Graph, call: Call, name: str) -> Any:
    """A setting's value: from `with`, the blocks, the top of the graph; MISSING if nobody gives it.

    Raises:
        KeyError: a `$ref` that names nothing.
    """
    if name in call.with_:
        value = call.with_[name]
        return graph.refer(value[1:]) if _is_ref(value) else value
    for block in SETTING_BLOCKS:
        spec = getattr(graph, block)
        if spec is not None and name != "kind" and name in type(spec).model_fields:
            return getattr(spec, name)
    return getattr(graph, name) if name in TOP_SETTINGS else MISSING


def _is_ref(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("$")


def _wrong_value(graph: Graph, setting: OpSetting, value: Any) -> tuple[str, ProblemCode] | None:
    if _is_ref(value):
        try:
            value = graph.refer(value[1:])
        except KeyError:
            known = _references(graph)
            message = f"{quoted(value)} names nothing in this graph{hint(value, known)}"
            return message, ProblemCode.NO_REFERENCE
    kinds = {k.strip() for k in setting.kind.split("|")}
    if not kinds <= _KINDS.keys() or any(_KINDS[k][1](value) for k in kinds):
        return None
    wanted = " or ".join(_KINDS[k][0] for k in sorted(kinds))
    message = f"{setting.name!r} must be {wanted}, not {kind_of(value)}"
    return message, ProblemCode.SETTING_VALUE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("an integer", lambda v: isinstance(v, int) and not isinstance(v, bool)),
    "float": ("a number", _is_number),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "str": ("a string", lambda v: isinstance(v, str)),
    "None": ("null", lambda v: v is None),
}


def _references(graph: Graph) -> list[str]:
    blocks = ((b, getattr(graph, b)) for b in SETTING_BLOCKS)
    return [f"${b}.{f}" for b, spec in blocks if spec is not None for f in type(spec).model_fields]


def _check_blocks(graph: Graph, src: Source, table: OpTable) -> Iterator[Problem]:
    """A block that no op needs is a mistake, and so is an op without its block."""
    needed: set[str] = set()
    for at, call, entry in graph.calls(table):
        for block in entry.declared.needs if entry else ():
            needed.add(block)
            if getattr(graph, block, None) is None:
                message = f"{call.op!r} needs the block {block!r} in this graph"
                yield src.problem(at, message, ProblemCode.NEEDS_BLOCK)
    for block in OPTIONAL_BLOCKS:
        users = {e.name for es in table.ops.values() for e in es if block in e.declared.needs}
        if users and block not in needed and getattr(graph, block) is not None:
            message = f"no state runs an op that reads this block: {', '.join(sorted(users))}"
            yield src.problem((block,), message, ProblemCode.UNUSED_BLOCK, key=True)


def check_sizes(graph: Graph, src: Source) -> Iterator[Problem]:
    """Numbers that cannot hold together, whatever the prompt is."""
    drafter = graph.drafter
    layout = graph.layout
    outline = graph.skeleton
    most = largest(drafter.offered)
    limit, shape = drafter.largest_tree
    first = _drafted(drafter, 1, 1)
    if most > limit:
        message = f"{most} nodes are too many: {shape}"
        yield src.problem(("drafter", "nodes"), message, ProblemCode.TREE_SIZE)
    budgets = {("limits", "max_new_tokens"): graph.limits.max_new_tokens}
    if outline is not None:
        budgets[("skeleton", "max_tokens")] = outline.max_tokens
        budgets[("skeleton", "direct_tokens")] = outline.direct_tokens
    for path, budget in budgets.items():
        need = 1 + budget + first + 1  # one prompt token, the answer, one tree with its root
        if need > layout.kv_slots:
            size = f"1 prompt token + {budget} new ones + {first} nodes + 1 = {need} slots"
            message = f"{size}, but layout.kv_slots is {layout.kv_slots}"
            yield src.problem(path, message, ProblemCode.BUDGET)
    side = nodes_for(drafter.offered, layout.max_num_branches)
    rows = 1 if layout.kind == "batching" else layout.max_num_branches  # trees in a row of the pool
    together = 1 if layout.kind == "paged" else rows  # trees that share a round's rows
    drafted = rows // together * _drafted(drafter, layout.max_num_branches, together)
    need = 2 * rows + drafted
    if need > layout.kv_slots:
        apart = drafter.shared is None or drafter.shared >= together * side
        trees = f"{side} nodes each" if apart else f"{drafter.shared} nodes together"
        message = f"{layout.max_num_branches} branches with {trees} need {need} slots"
        message = f"{message}, layout.kv_slots is {layout.kv_slots}"
        yield src.problem(("layout", "max_num_branches"), message, ProblemCode.ROWS)
    if layout.kind != "batching" and layout.block_size > layout.kv_slots:
        message = f"a block of {layout.block_size} slots, but layout.kv_slots is {layout.kv_slots}"
        yield src.problem(("layout", "block_size"), message, ProblemCode.BLOCK_SIZE)


def _drafted(drafter: DrafterSettings, active: int, trees: int) -> int:
    """Most drafted tokens of so many trees when `active` branches are active."""
    most = trees * nodes_for(drafter.offered, active)
    return most if drafter.shared is None else min(most, drafter.shared)
