"""Counters of the workers of a run, as JSON values and summed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..record.metrics import Meter, ratio

CONSTANTS = ("slot_bytes", "size")  # of a pool, which are not summed
BY_LENGTH = ("lengths", "chosen")  # counters whose keys are numbers


def counts_of(meter: Meter) -> dict[str, Any]:
    """The counters of a meter that are not zero, as JSON values."""
    values: dict[str, Any] = {}
    for name in Meter.__slots__:
        value = getattr(meter, name)
        if isinstance(value, int | Counter) and value:
            values[name] = dict(value) if isinstance(value, Counter) else value
    values["requests"] = {key: dict(lengths) for key, lengths in meter.requests.items()}
    return values


def meter_of(counts: Sequence[Mapping[str, Any]], director: Meter) -> Meter:
    """The counters of all workers together, and the director's transitions and times."""
    total = Meter()
    total.add(director)
    total.marks = director.marks
    for values in counts:
        meter = Meter()
        for name, value in values.items():
            if name == "requests":
                for key, lengths in value.items():
                    total.requests.setdefault(key, Counter()).update(_by_length(lengths))
            elif isinstance(value, Mapping):
                setattr(meter, name, _by_length(value) if name in BY_LENGTH else Counter(value))
            else:
                setattr(meter, name, value)
        most_active = max(total.most_active, meter.most_active)
        total.add(meter)
        total.most_active = most_active
    return total


def _by_length(values: Mapping[str, int]) -> Counter[int]:
    return Counter({int(length): count for length, count in values.items()})


def summed_memory(memory: Sequence[Mapping[str, Any]], meter: Meter) -> dict[str, Any]:
    """`held_figures` of all engines together."""
    total: dict[str, Any] = _summed(list(memory))
    total["host_reads"]["per_round"] = ratio(total["host_reads"]["total"], meter.forwards)
    if (cache := total["prefix_cache"]) is not None:
        cache["hit_rate"] = ratio(cache["reused"], cache["asked"])
    return total


def _summed(values: Sequence[Any], name: str = "") -> Any:
    """Sums of numbers, mappings key by key."""
    present = [value for value in values if value is not None]
    if not present or not isinstance(present[0], dict):
        return None if not present else present[0] if name in CONSTANTS else sum(present)
    keys = dict.fromkeys(key for value in present for key in value)
    return {key: _summed([value.get(key) for value in present], key) for key in keys}
