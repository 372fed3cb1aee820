"""A graph that passed every check, with each op resolved to a function and its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...ops.registry import OpEntry
from ..yaml.source import Source
from .graph import Graph


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
        """The same with these settings wherever this op takes them; None if it stands nowhere.

        The graph stays as it is: such settings are no part of what a run is repeated from.
        """

        def takes(step: OpStep) -> bool:
            names = {setting.name for setting in step.entry.settings}
            return step.entry.name == op and settings.keys() <= names

        def changed(step: OpStep) -> OpStep:
            return replace(step, settings={**step.settings, **settings}) if takes(step) else step

        if not any(takes(step) for own in self.steps.values() for step in own):
            return None

        steps = {state: tuple(map(changed, own)) for state, own in self.steps.items()}
        return replace(self, steps=steps)
