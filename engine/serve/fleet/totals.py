"""Counts of several engines as if they were one."""

from collections.abc import Iterable, Mapping
from typing import Any

HELD = ("waiting", "running", "branches", "slots", "peak_slots", "capacity")  # as long as it lives
Counted = Mapping[str, Mapping[str, Any]]  # by graph, and by name


def summed(counts: Iterable[Counted]) -> dict[str, dict[str, Any]]:
    """The sums of all: of numbers, of lists place by place, of mappings key by key."""
    sums: dict[str, dict[str, Any]] = {}
    for one in counts:
        for graph, values in one.items():
            into = sums.setdefault(graph, {})
            for name, value in values.items():
                into[name] = _sum(into[name], value) if name in into else value
    return sums


def ended(counts: Counted) -> dict[str, dict[str, Any]]:
    """What is left of an engine that is gone: what it has done, and nothing that it held."""
    return {
        graph: {name: 0 if name in HELD else value for name, value in values.items()}
        for graph, values in counts.items()
    }


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
    if isinstance(a, list):
        longest = max(len(a), len(b))
        return [sum(one[place] for one in (a, b) if place < len(one)) for place in range(longest)]
    return a + b
