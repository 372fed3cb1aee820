"""Ways through a graph: reachability, dead ends, values on every path, cycles that progress."""

from collections.abc import Callable, Iterable, Iterator

from ...ops.registry import OpEntry, OpTable
from .graph import Edge, Graph
from .program import OpStep
from .source import Problem, Source
from .yaml12 import Path

Steps = dict[str, tuple[OpStep, ...]]
Ways = dict[str, list[str]]  # state -> states one transition away


def check_shape(graph: Graph, src: Source) -> Iterator[Problem]:
    """Every state can be reached and left, and from everywhere there is a way to the end."""
    ways = _ways(graph.transitions)
    finals = [name for name, state in graph.states.items() if state.final]
    seen = _closure([graph.initial], ways)
    ending = _closure(finals, _reverse(ways))
    yield from _never_taken(graph, src)
    for name, state in graph.states.items():
        here, out = ("states", name), graph.edges_from(name)
        if state.final and out:
            yield src.problem(here, "final, but a transition leaves it", key=True)
        elif not state.final and not out:
            yield src.problem(here, "not final, but no transition leaves it", key=True)
        elif not state.final and name not in ending and seen.intersection(finals):
            yield src.problem(here, "no final state can be reached from here", key=True)
        if out and out[-1].when is not None and all(e.when is not None for e in out):
            last = max(i for i, e in enumerate(graph.transitions) if e is out[-1])
            yield src.problem(
                _place(src, last), f"the last way out of {name!r} must have no `when`"
            )
        if name not in seen:
            yield src.problem(here, "cannot be reached", key=True)
    if not seen.intersection(finals):
        which = f"none of {', '.join(finals)} can be reached" if finals else "no state is final"
        yield src.problem(("states",), f"{which}: a run would never end", key=True)


def _never_taken(graph: Graph, src: Source) -> Iterator[Problem]:
    closed: dict[str, int] = {}
    used: dict[tuple[str, str], int] = {}
    for i, edge in enumerate(graph.transitions):
        if edge.from_ in closed:
            message = f"never taken: {src.where(_place(src, closed[edge.from_]))} has no guard"
            yield src.problem(_place(src, i), message)
        elif edge.when is None:
            closed[edge.from_] = i
        elif (edge.from_, edge.when) in used:
            same = src.where(_place(src, used[edge.from_, edge.when]))
            yield src.problem(_place(src, i), f"never taken: {same} has the same guard")
        else:
            used[edge.from_, edge.when] = i


def _place(src: Source, i: int) -> Path:
    """An edge; of several that the file has in one line, the state that it leaves."""
    at = ("transitions", i, "from")
    return at if at in src.origins else at[:2]


def _ways(edges: Iterable[Edge]) -> Ways:
    ways: Ways = {}
    for edge in edges:
        ways.setdefault(edge.from_, []).append(edge.to)
    return ways


def _reverse(ways: Ways) -> Ways:
    back: Ways = {}
    for source, targets in ways.items():
        for target in targets:
            back.setdefault(target, []).append(source)
    return back


def _closure(first: Iterable[str], ways: Ways) -> set[str]:
    seen: set[str] = set()
    todo = list(first)
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += ways.get(name, [])
    return seen


def check_dataflow(
    graph: Graph, src: Source, table: OpTable, steps: Steps, given: frozenset[str]
) -> Iterator[Problem]:
    """What an op or a guard reads must be on the board on *every* path that leads to it.

    Forward fixpoint: a key is there at a state's entry if it is there at the end of every state
    that leads to it. An op's drops are gone before its results are there.
    """
    known = given.union(*(s.entry.declared.writes for ops in steps.values() for s in ops))
    for name, have in _fixpoint(graph, steps, given).items():
        for i, step in enumerate(steps[name]):
            at = ("states", name, "ops", i)
            yield from _unset(src, at, step.entry, have, known)
            have = _after(step, have.union(step.entry.reads))  # one missing key, one problem
        for i, edge in enumerate(graph.transitions):
            if edge.from_ == name and edge.when is not None:
                here = ("transitions", i, "when")
                yield from _unset(src, here, table.guards[edge.when], have, known)


def _unset(
    src: Source, at: Path, entry: OpEntry, have: frozenset[str], known: frozenset[str]
) -> Iterator[Problem]:
    for key in entry.reads:
        if key not in have:
            why = "unset on some path here" if key in known else "which no op of this graph writes"
            yield src.problem(at, f"{entry.name!r} reads {key!r}, {why}")


def _after(step: OpStep, have: frozenset[str]) -> frozenset[str]:
    return have.difference(step.entry.declared.drops).union(step.entry.declared.writes)


def _fixpoint(graph: Graph, steps: Steps, given: frozenset[str]) -> dict[str, frozenset[str]]:
    everything = given.union(*(s.entry.declared.writes for ops in steps.values() for s in ops))
    at_entry = dict.fromkeys(graph.states, everything) | {graph.initial: given}
    todo = list(graph.states)
    ways = _ways(graph.transitions)
    while todo:
        name = todo.pop()
        have = at_entry[name]
        for step in steps[name]:
            have = _after(step, have)
        for target in ways.get(name, []):
            if not at_entry[target] <= have:
                at_entry[target] &= have
                todo.append(target)
    return at_entry


def check_progress(graph: Graph, src: Source, steps: Steps) -> Iterator[Problem]:
    """Every cycle passes an op that commits something, or the run could go round for ever."""
    idle = {n for n, ops in steps.items() if not any(s.entry.declared.commits for s in ops)}
    ways = {
        name: [t for t in targets if t in idle]
        for name, targets in _ways(graph.transitions).items()
        if name in idle
    }
    told: set[str] = set()
    for i, edge in enumerate(graph.transitions):
        if edge.from_ in idle and edge.to in idle and not told & {edge.from_, edge.to}:
            path = _path(edge.to, edge.from_, ways)
            if path:
                told.update(path)
                cycle = " > ".join((edge.from_, *path))
                message = f"the cycle {cycle} commits no token: a run could stay in it for ever"
                yield src.problem(_place(src, i), message)


def _path(first: str, last: str, ways: Ways) -> list[str]:
    """A shortest path from `first` to `last`, both ends named; empty if there is none."""
    came: dict[str, str | None] = {first: None}
    todo = [first]
    for name in todo:
        if name == last:
            return _walk_back(name, came.get)
        for target in ways.get(name, []):
            if target not in came:
                came[target] = name
                todo.append(target)
    return []


def _walk_back(name: str | None, came: Callable[[str], str | None]) -> list[str]:
    path: list[str] = []
    while name is not None:
        path.append(name)
        name = came(name)
    return path[::-1]
