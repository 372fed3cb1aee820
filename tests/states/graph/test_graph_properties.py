"""Random graphs: the checks agree with trying every path, and no text makes them stumble."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from helpers.toy_graph import load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specsot.engine.prepare.files import graph_names, open_graph
from specsot.engine.prepare.repeat import graph_yaml
from specsot.ops.registry import Declaration, OpEntry, OpTable
from specsot.states.graph.graph import LINEAR_KEYS
from specsot.states.graph.load import load_program, op_table
from specsot.states.yaml.source import GraphError, Source

GIVEN = frozenset({"k0"})
KEYS = ["k0", "k1", "k2", "proposal"]
GUARDS = {"g0": ("k0",), "g1": ("k1",)}

few = st.lists(st.sampled_from(KEYS), max_size=1).map(tuple)
many = st.lists(st.sampled_from(KEYS), max_size=3, unique=True).map(tuple)
dropped = st.lists(st.sampled_from(KEYS[1:]), max_size=1).map(tuple)
an_op = st.tuples(few, many, dropped, st.booleans())


def entry(declared: Declaration, reads: tuple[str, ...]) -> OpEntry:
    return OpEntry(declared, reads, (), "m", "f", "")


@st.composite
def graphs(draw: st.DrawFn) -> tuple[dict[str, Any], OpTable]:
    names = [f"s{i}" for i in range(draw(st.integers(2, 5)))]
    ops: dict[str, OpEntry] = {}
    states: dict[str, Any] = {}
    edges = []
    for index, name in enumerate(names):
        final = index == len(names) - 1 or draw(st.integers(0, 7)) == 0
        calls = [f"{name}.{i}" for i in range(draw(st.integers(0, 2)))]
        for call in calls:
            reads, writes, drops, commits = draw(an_op)
            declared = Declaration(call, writes=writes, drops=drops, commits=commits)
            ops[call] = entry(declared, reads)
        states[name] = {"ops": calls, "final": final}
        if not final:
            for guard in draw(st.lists(st.sampled_from([*GUARDS]), max_size=2, unique=True)):
                edges.append({"from": name, "to": draw(st.sampled_from(names)), "when": guard})
            forward = draw(st.integers(0, 3)) > 0  # or most random graphs have unreachable states
            onward = names[index + 1] if forward else draw(st.sampled_from(names))
            edges.append({"from": name, "to": onward})
    guards = {g: entry(Declaration(g), reads) for g, reads in GUARDS.items()}
    data = {
        "version": 1,
        "name": "random",
        "layout": {"kind": "bim"},
        "drafter": {"kind": "none"},
        "initial": names[0],
        "states": states,
        "transitions": edges,
    }
    return data, OpTable(ops, guards)


def ways(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [edge for edge in data["transitions"] if edge["from"] == name]


def reached(data: dict[str, Any], first: str, avoid: frozenset[str] = frozenset()) -> set[str]:
    """States behind `first` (itself only on a cycle), going through no state of `avoid`."""
    seen: set[str] = set()
    todo = [first]
    while todo:
        for edge in ways(data, todo.pop()):
            if edge["to"] not in seen | avoid:
                seen.add(edge["to"])
                todo.append(edge["to"])
    return seen


def shape_is_good(data: dict[str, Any]) -> bool:
    finals = {n for n, state in data["states"].items() if state["final"]}
    seen = {data["initial"]} | reached(data, data["initial"])
    ends = all(({n} | reached(data, n)) & finals for n in data["states"])
    return seen == set(data["states"]) and ends


def values_are_good(data: dict[str, Any], table: OpTable) -> bool:
    todo = [(data["initial"], GIVEN)]
    seen = set(todo)
    while todo:
        name, board = todo.pop()
        for call in data["states"][name]["ops"]:
            entry = table.ops[call]
            unread = board.difference(entry.reads, entry.declared.drops)
            lost = LINEAR_KEYS.intersection(unread, entry.declared.writes)
            if lost or not board.issuperset(entry.reads):
                return False
            board = board.difference(entry.declared.drops).union(entry.declared.writes)
        for edge in ways(data, name):
            if "when" in edge and not board.issuperset(table.guards[edge["when"]].reads):
                return False
            if (edge["to"], board) not in seen:
                seen.add((edge["to"], board))
                todo.append((edge["to"], board))
    return True


def cycles_are_good(data: dict[str, Any], table: OpTable) -> bool:
    busy = frozenset(
        name
        for name, state in data["states"].items()
        if any(table.ops[call].declared.commits for call in state["ops"])
    )
    return not any(name in reached(data, name, busy) for name in data["states"] if name not in busy)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_a_graph_is_accepted_just_when_no_path_goes_wrong(
    case: tuple[dict[str, Any], OpTable],
) -> None:
    data, table = case
    stages = {
        "reached way on final end": shape_is_good(data),
        "reads writes": shape_is_good(data) and values_are_good(data, table),
        "cycle": values_are_good(data, table) and cycles_are_good(data, table),
    }
    try:
        load(json.dumps(data), table=table, given=GIVEN)
    except GraphError as error:
        first = next(words for words, good in stages.items() if not good)
        for problem in error.problems:
            assert any(word in problem.message for word in first.split()), (first, problem)
    else:
        assert all(stages.values()), stages


@cache
def shipped() -> list[str]:
    machines = (files("specsot") / "graphs" / "machines").iterdir()
    graphs = [graph_yaml(open_graph(name).graph) for name in graph_names()]
    return [*graphs, *(path.read_text(encoding="utf-8") for path in machines)]


ODD = ["null", "true", "-1", "1e999", ".nan", "[]", "{}", "''", "[a, [b]]", "{a: {b: c}}", "$x",
       "$drafter.top_k", "0x10", "012", "on", "2026-01-01", "&a b", "*a", "!t x", "\"\\u2028\"",
       "x: y", "- - -", "🙂", "'", "|", "99999999999999999999"]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(shipped()))
    for _ in range(draw(st.integers(1, 3))):
        lines = text.split("\n")
        row = draw(st.integers(0, len(lines) - 1))
        pieces = lines[row].split(" ")
        column = draw(st.integers(0, len(pieces) - 1))
        match draw(st.integers(0, 4)):
            case 0:
                del lines[row]
            case 1:
                lines.insert(row, draw(st.sampled_from(lines)))
            case 2:
                pieces[column] = draw(st.sampled_from(ODD))
                lines[row] = " ".join(pieces)
            case 3:
                pieces[column] = draw(st.sampled_from(text.split()))
                lines[row] = " ".join(pieces)
            case _:
                lines[row] = lines[row][: draw(st.integers(0, len(lines[row])))]
        text = "\n".join(lines)
    return text


TABLE = op_table()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged())
def test_a_damaged_graph_is_accepted_or_explained(text: str) -> None:
    try:
        program = load_program(Source(text, "g.yaml"), TABLE)
    except GraphError as error:
        assert error.problems
        for problem in error.problems:
            assert 1 <= problem.line <= text.count("\n") + 2 and problem.column >= 1
            assert problem.message and "\n" not in str(problem)
    else:
        assert program.graph.states


values = st.sampled_from(ODD) | st.text(max_size=10) | st.integers().map(str)
paths = st.lists(
    st.sampled_from(["drafter", "kind", "nodes", "1", "layout", "states", "verify", "ops", "0",
                     "transitions", "skeleton", "tools", "limits", "x", "", "doc", "with"]),
    min_size=1, max_size=5,
).map(".".join)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(paths, values), min_size=1, max_size=3))
def test_any_set_is_applied_or_explained(pairs: list[tuple[str, str]]) -> None:
    sets = [f"{path}={value}" for path, value in pairs]
    try:
        load_program(Source(shipped()[0], "g.yaml"), TABLE, sets=sets)
    except GraphError as error:
        assert error.problems and all(p.message for p in error.problems)
