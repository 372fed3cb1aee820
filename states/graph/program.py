"""A graph that passed every check, with each op resolved to a function and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...ops.registry import OpEntry
from .graph import Graph
from .source import Source


@dataclass(frozen=True, slots=True)
class OpStep:
    """One op of a state: the variant that its kinds select, and its settings.

    at: `file:line` of the op in the graph.
    """

    state: str
    entry: OpEntry
    settings: Mapping[str, Any]
    at: str


@dataclass(frozen=True, slots=True)
class Program:
    """What a machine runs.

    given: the blackboard keys that must be there before the first op.
    """

    graph: Graph
    source: Source
    steps: Mapping[str, tuple[OpStep, ...]]
    guards: Mapping[str, OpEntry]
    given: frozenset[str]

    def asking(self, op: str, **settings: Any) -> "Program | None":
        """The same with these settings wherever this op stands; None if it stands nowhere.

        The graph stays as it is: such settings are no part of what a run is repeated from.
        """
        if all(step.entry.name != op for own in self.steps.values() for step in own):
            return None

        def changed(step: OpStep) -> OpStep:
            more = settings if step.entry.name == op else {}
            return replace(step, settings={**step.settings, **more})

        steps = {state: tuple(map(changed, own)) for state, own in self.steps.items()}
        return replace(self, steps=steps)
