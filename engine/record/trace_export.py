"""A run's trace in other formats: a table, and what ui.perfetto.dev opens.

The latter is Chrome's trace event format, JSON: complete events (`ph: X`) with times in
microseconds, counters (`ph: C`), names of tracks (`ph: M`).
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import UsageError
from .kept_runs import KeptRun

# tracks
STATES = 1
OPS = 2
FIRST_BRANCH = 10
COLUMNS = [
    *("kind", "t", "step", "round", "from", "to", "guard", "state", "op", "ns", "branches"),
    *("committed", "accepted", "drafted", "rows", "padding", "kv", "kv_draft"),
]


def records_of(run: KeptRun) -> Iterator[dict[str, Any]]:
    """The lines of trace.jsonl; raises UsageError."""
    for number, line in enumerate(run.text("trace.jsonl").splitlines(), 1):
        try:
            record = json.loads(line)
            yield {"kind": record["kind"], "t": record["t"], **record}
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{run.path / 'trace.jsonl'}:{number}: no record of a trace") from None


def as_csv(records: Iterable[dict[str, Any]]) -> str:
    """A line per record; what a record has several of stands behind each other, apart by spaces."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for record in records:
        table.writerow(_cell(record.get(name)) for name in COLUMNS)
    return out.getvalue()


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


def as_perfetto(records: Iterable[dict[str, Any]], title: str) -> str:
    """States, their ops, and a track for each branch; tokens and slots of the pools as counters."""
    events = [_named(0, "process_name", title), _named(STATES, "thread_name", "states")]
    events.append(_named(OPS, "thread_name", "ops"))
    tracks: dict[str, int] = {}
    before = 0
    for record in records:
        kind = record["kind"]
        t = record["t"]
        if kind == "move" and record["step"] > 1:
            args = {"to": record["to"], "guard": record["guard"], "committed": record["committed"]}
            events.append(_span(STATES, record["from"], t - record["ns"], record["ns"], args))
        elif kind == "op":
            args = {"state": record["state"], "shapes": record["shapes"]}
            events.append(_span(OPS, record["op"], t - record["ns"], record["ns"], args))
        elif kind == "round":
            for at, branch in enumerate(record["branches"]):
                if branch not in tracks:
                    tracks[branch] = FIRST_BRANCH + len(tracks)
                    events.append(_named(tracks[branch], "thread_name", f"branch {branch}"))
                committed = record["committed"][at]
                accepted = record["accepted"][at]
                args = {"round": record["round"], "committed": committed, "accepted": accepted}
                name = "prefill" if accepted < 0 else f"{committed} tokens"
                events.append(_span(tracks[branch], name, before, t - before, args))
            before = t
            for name in ("drafted", "rows", "kv", "kv_draft"):
                value = {name: record[name]}
                events.append({"name": name, "ph": "C", "pid": 1, "ts": t / 1e3, "args": value})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _named(track: int, what: str, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 1, "tid": track, "args": {"name": name}}


def _span(track: int, name: str, start: float, nanos: float, args: Any) -> dict[str, Any]:
    times = {"ts": start / 1e3, "dur": nanos / 1e3}
    return {"name": name, "ph": "X", "pid": 1, "tid": track, **times, "args": args}
