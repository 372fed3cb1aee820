"""From a parsed file to a `Program`: schema, checks stage by stage, ops resolved."""

from collections.abc import Iterable
from pathlib import Path

from ...ops.registry import OpTable, Room, read_table
from ..yaml.source import GraphError, Problem, Source
from .block_checks import check_blocks, check_schedule
from .board import CLUSTER_KEYS, RUN_KEYS
from .checks import MISSING, check_names, check_sizes, find_setting, with_named_functions
from .flow import check_dataflow, check_progress, check_shape
from .graph import Graph
from .overrides import Change, override
from .plugins import with_installed
from .program import OpStep, Program
from .schema import validate


def rooms() -> tuple[Room, ...]:
    """Where ops and guards are declared: the packages `ops` and `states`."""
    here = Path(__file__).parents[1]
    root = __name__.split(".")[0]
    return ((f"{root}.ops", here.parent / "ops"), (f"{root}.states", here))


def op_table() -> OpTable:
    """Every op and guard of this package and of installed ones, read without importing them."""
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
        given: blackboard keys that a run starts with; by default those of its kind of machine.
        sets: changes, see `overrides.override`.

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
        read = {key for own in steps.values() for step in own for key in step.entry.reads}
        given = CLUSTER_KEYS if "cluster" in read else RUN_KEYS
    _report(check_dataflow(graph, source, table, steps, given))
    _report(check_progress(graph, source, steps))
    guards = {e.when: table.guards[e.when] for e in graph.transitions if e.when is not None}
    return Program(graph, source, steps, guards, given)


def _report(*checks: Iterable[Problem]) -> None:
    if problems := [problem for check in checks for problem in check]:
        raise GraphError(problems)


def _resolve(graph: Graph, source: Source, table: OpTable) -> dict[str, tuple[OpStep, ...]]:
    """The ops of every state, with their settings."""
    steps: dict[str, tuple[OpStep, ...]] = dict.fromkeys(graph.states, ())
    for at, call, entry in graph.calls(table):
        assert entry is not None, "check_names lets only known ops through"
        values = {s.name: find_setting(graph, call, s.name) for s in entry.settings}
        settings = {k: v for k, v in values.items() if v is not MISSING}
        state = str(at[1])
        steps[state] += (OpStep(state, entry, settings, source.at(at)),)
    return steps
