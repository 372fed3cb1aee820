"""Ways through a graph: reachability, dead ends, values on every path, cycles that progress."""

from collections.abc import Callable, Iterable, Iterator

from ...ops.registry import OpEntry, OpTable
from ..yaml.codes import ProblemCode
from ..yaml.source import Problem, Source
from ..yaml.yaml12 import Path
from .board import LINEAR_KEYS
from .graph import Graph
from .program import OpStep

Steps = dict[str, tuple[OpStep, ...]]
Ways = dict[str, list[str]]  # state -> states one transition away
Keys = frozenset[str]  # of the blackboard


def check_shape(graph: Graph, src: Source) -> Iterator[Problem]:
    """Every state can be reached and left, and from everywhere there is a way to the end."""
    ways = _ways((e.from_, e.to) for e in graph.transitions)
    finals = [name for name, state in graph.states.items() if state.final]
    reachable = _reach([graph.initial], ways).keys()
    ending = _reach(finals, _ways((e.to, e.from_) for e in graph.transitions))
    yield from _never_taken(graph, src)
    for name, state in graph.states.items():
        here = ("states", name)
        out = graph.edges_from(name)
        if state.final and out:
            yield src.problem(
                here, "final, but a transition leaves it", ProblemCode.FINAL_LEFT, key=True
            )
        elif not state.final and not out:
            message = "not final, but no transition leaves it"
            yield src.problem(here, message, ProblemCode.DEAD_END, key=True)
        elif not state.final and name not in ending and reachable & finals:
            message = "no final state can be reached from here"
            yield src.problem(here, message, ProblemCode.NO_WAY_OUT, key=True)
        if out and out[-1].when is not None and all(e.when is not None for e in out):
            last = max(i for i, e in enumerate(graph.transitions) if e is out[-1])
            message = f"the last way out of {name!r} must have no `when`"
            yield src.problem(_place(src, last), message, ProblemCode.GUARDED_LAST)
        if name not in reachable:
            yield src.problem(here, "cannot be reached", ProblemCode.UNREACHABLE, key=True)
    if not reachable & finals:
        which = f"none of {', '.join(finals)} can be reached" if finals else "no state is final"
        message = f"{which}: a run would never end"
        yield src.problem(("states",), message, ProblemCode.NO_END, key=True)


def _never_taken(graph: Graph, src: Source) -> Iterator[Problem]:
    unguarded: dict[str, int] = {}  # state -> its transition without a guard
    guards: dict[tuple[str, str], int] = {}
    for i, edge in enumerate(graph.transitions):
        if edge.from_ in unguarded:
            message = f"never taken: {src.where(_place(src, unguarded[edge.from_]))} has no guard"
            yield src.problem(_place(src, i), message, ProblemCode.NEVER_TAKEN)
        elif edge.when is None:
            unguarded[edge.from_] = i
        elif (edge.from_, edge.when) in guards:
            same = src.where(_place(src, guards[edge.from_, edge.when]))
            message = f"never taken: {same} has the same guard"
            yield src.problem(_place(src, i), message, ProblemCode.NEVER_TAKEN)
        else:
            guards[edge.from_, edge.when] = i


def _place(src: Source, i: int) -> Path:
    """An edge; of several that the file has in one line, the state that it leaves."""
    at = ("transitions", i, "from")
    return at if at in src.origins else at[:2]


def _ways(pairs: Iterable[tuple[str, str]]) -> Ways:
    ways: Ways = {}
    for source, target in pairs:
        ways.setdefault(source, []).append(target)
    return ways


def _reach(first: Iterable[str], ways: Ways) -> dict[str, str]:
    """Every state that can be reached from these, and the one before it on a shortest way there."""
    before = dict.fromkeys(first, "")
    todo = list(before)
    for name in todo:
        for target in ways.get(name, []):
            if target not in before:
                before[target] = name
                todo.append(target)
    return before


def check_dataflow(
    graph: Graph, src: Source, table: OpTable, steps: Steps, given: frozenset[str]
) -> Iterator[Problem]:
    """What an op or a guard reads is on the board on *every* path that leads to it.

    And where an op writes a linear key, no earlier value is left on *any* path, unless the op reads
    that value. Both are forward fixpoints; an op's drops are gone before its results are there. No
    op runs a second time on what it has seen.
    """
    anywhere = given.union(*(s.entry.declared.writes for ops in steps.values() for s in ops))
    most = dict.fromkeys(graph.states, anywhere) | {graph.initial: given}
    least = dict.fromkeys(graph.states, Keys()) | {graph.initial: given}
    always = _fixpoint(graph, steps, most, frozenset.intersection)
    sometimes = _fixpoint(graph, steps, least, frozenset.union)
    for name in graph.states:
        keys = always[name]
        possible = sometimes[name]
        for i, step in enumerate(steps[name]):
            at = ("states", name, "ops", i)
            yield from _missing_reads(src, at, step.entry, keys, anywhere)
            lost = [*_lost_values(src, at, step.entry, possible)]
            yield from lost or _done_already(src, at, steps[name][: i + 1])
            keys = _after(step, keys.union(step.entry.reads))  # one missing key, one problem
            possible = _after(step, possible)
        for i, edge in enumerate(graph.transitions):
            if edge.from_ == name and edge.when is not None:
                here = ("transitions", i, "when")
                yield from _missing_reads(src, here, table.guards[edge.when], keys, anywhere)


def _missing_reads(
    src: Source, at: Path, entry: OpEntry, keys: Keys, anywhere: Keys
) -> Iterator[Problem]:
    for key in entry.reads:
        if key not in keys:
            why = (
                "unset on some path here" if key in anywhere else "which no op of this graph writes"
            )
            yield src.problem(at, f"{entry.name!r} reads {key!r}, {why}", ProblemCode.UNSET)


def _lost_values(src: Source, at: Path, entry: OpEntry, possible: Keys) -> Iterator[Problem]:
    unread = possible.difference(entry.reads, entry.declared.drops)
    for key in entry.declared.writes:
        if key in LINEAR_KEYS and key in unread:
            message = f"{entry.name!r} writes {key!r} while an earlier one is still unread"
            yield src.problem(at, message, ProblemCode.UNREAD)


def _done_already(src: Source, at: Path, steps: tuple[OpStep, ...]) -> Iterator[Problem]:
    """The last of a state's steps, if it has run there and nothing can have changed since."""
    *earlier, last = steps
    same = [
        i for i, s in enumerate(earlier) if (s.entry, s.settings) == (last.entry, last.settings)
    ]
    if not same:
        return
    since = earlier[same[-1] :]
    written = {key for step in since for key in step.entry.declared.writes}
    in_place = any(step.entry.name.endswith("_") for step in since[1:])
    if written.isdisjoint(last.entry.reads) and not in_place:
        reason = f"has just run ({since[0].at}): nothing has changed"
        yield src.problem(at, f"{last.entry.name!r} {reason}", ProblemCode.REPEATED)


def _after(step: OpStep, keys: Keys) -> Keys:
    return keys.difference(step.entry.declared.drops).union(step.entry.declared.writes)


def _fixpoint(
    graph: Graph, steps: Steps, at_entry: dict[str, Keys], meet: Callable[[Keys, Keys], Keys]
) -> dict[str, Keys]:
    """The keys at the entry of every state, `meet` joining those that its ways in bring."""
    todo = list(graph.states)
    ways = _ways((e.from_, e.to) for e in graph.transitions)
    while todo:
        name = todo.pop()
        keys = at_entry[name]
        for step in steps[name]:
            keys = _after(step, keys)
        for target in ways.get(name, []):
            joint = meet(at_entry[target], keys)
            if joint != at_entry[target]:
                at_entry[target] = joint
                todo.append(target)
    return at_entry


def check_progress(graph: Graph, src: Source, steps: Steps) -> Iterator[Problem]:
    """Every cycle passes an op that commits something, or the run could go round for ever."""
    idle = {n for n, ops in steps.items() if not any(s.entry.declared.commits for s in ops)}
    edges = {i: e for i, e in enumerate(graph.transitions) if {e.from_, e.to} <= idle}
    ways = _ways((e.from_, e.to) for e in edges.values())
    reported: set[str] = set()
    for i, edge in edges.items():
        if reported & {edge.from_, edge.to}:
            continue
        before = _reach([edge.to], ways)
        if edge.from_ in before:
            path = [edge.from_]
            while before[path[-1]]:
                path.append(before[path[-1]])
            reported.update(path)
            cycle = " > ".join((edge.from_, *reversed(path)))
            message = f"the cycle {cycle} commits no token: a run could stay in it for ever"
            yield src.problem(_place(src, i), message, ProblemCode.IDLE_CYCLE)
