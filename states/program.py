"""A graph that passed every check, with each op resolved to a function and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ops.registry import Entry
from .graph import Graph
from .source import Source


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a state: the variant that its kinds select, and its settings.

    at: `file:line` of the op in the graph.
    """

    state: str
    entry: Entry
    settings: Mapping[str, Any]
    at: str


@dataclass(frozen=True, slots=True)
class Program:
    """What a machine runs.

    given: the blackboard keys that must be there before the first op.
    """

    graph: Graph
    source: Source
    steps: Mapping[str, tuple[Step, ...]]
    guards: Mapping[str, Entry]
    given: frozenset[str]
