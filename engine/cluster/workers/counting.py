"""What workers have counted, on its way to the driver, and all of it together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...record.metrics import Meter, ratio

SAME = ("slot_bytes", "size")  # of a pool: no sums


def counts_of(meter: Meter) -> dict[str, Any]:
    """What forwards have brought, as plain values."""
    values: dict[str, Any] = {
        name: value
        for name in Meter.__slots__
        if isinstance(value := getattr(meter, name), int | Counter) and value
    }
    rounds = {key: dict(lengths) for key, lengths in meter.requests.items()}
    return {name: _plain(value) for name, value in values.items()} | {"requests": rounds}


def _plain(value: int | Counter[Any]) -> Any:
    return dict(value) if isinstance(value, Counter) else value


def meter_of(counts: Sequence[Mapping[str, Any]], own: Meter) -> Meter:
    """What all workers have counted, beside the driver's own moves and moments."""
    whole = Meter()
    whole.add(own)
    whole.marks = own.marks
    for one in counts:
        more = Meter()
        for name, value in one.items():
            if name == "requests":
                for key, lengths in value.items():
                    whole.requests.setdefault(key, Counter()).update(_by_length(lengths))
            elif isinstance(value, Mapping):
                by_length = name in ("lengths", "chosen")
                setattr(more, name, _by_length(value) if by_length else Counter(value))
            else:
                setattr(more, name, value)
        most = max(whole.most_active, more.most_active)
        whole.add(more)
        whole.most_active = most
    return whole


def _by_length(values: Mapping[str, int]) -> Counter[int]:
    return Counter({int(length): count for length, count in values.items()})


def held_by_all(held: Sequence[Mapping[str, Any]], meter: Meter) -> dict[str, Any]:
    """`held_figures` of all workers together."""
    whole: dict[str, Any] = _summed(list(held))
    whole["host_reads"]["per_round"] = ratio(whole["host_reads"]["total"], meter.forwards)
    if (cache := whole["prefix_cache"]) is not None:
        cache["hit_rate"] = ratio(cache["reused"], cache["asked"])
    return whole


def _summed(values: Sequence[Any], name: str = "") -> Any:
    """Sums, part by part; what only some have is theirs."""
    there = [one for one in values if one is not None]
    if not there or not isinstance(there[0], dict):
        return None if not there else there[0] if name in SAME else sum(there)
    keys = dict.fromkeys(key for one in there for key in one)
    return {key: _summed([one.get(key) for one in there], key) for key in keys}
