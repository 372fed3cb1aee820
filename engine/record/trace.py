"""The lines of trace.jsonl (keys: docs/cli.md), exported as a table or for ui.perfetto.dev."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any

import numpy as np

from ...states.machine import Event, Moved, OpRan
from ...states.round import RoundSummary, VerifiedTree
from ...states.scheduler import StepPlan
from ..errors import UsageError
from .run_folder import TRACE, SavedRun

Record = dict[str, Any]
Write = Callable[[Record], None]
Recordable = Event | RoundSummary | Record

ROUND_FIELDS = ("branches", "committed", "accepted", "drafted", "rows", "padding")
MAX_TREE_NODES = 512  # of all trees of a round together, in its record


def trace_record(at: int, item: Recordable, number: int) -> Record:
    """At nanoseconds since the start; number: of a move, the tokens committed in its source; of a
    round, its own."""
    match item:
        case OpRan(state, op, nanos):
            values = {"state": state, "op": op, "ns": nanos, "shapes": item.shapes}
            return {"kind": "op", "t": at, **values}
        case Moved(source, target, guard, step, nanos):
            values = {"step": step, "from": source, "to": target, "guard": guard}
            return {"kind": "move", "t": at, **values, "ns": nanos, "committed": number}
        case RoundSummary():
            return {"kind": "round", "t": at, "round": number, **_round(item)}
    return {**item, "t": at}


def _round(summary: RoundSummary) -> Record:
    optional = {
        "choices": [asdict(choice) for choice in summary.choices],
        "explained": [asdict(entry) for entry in summary.explained],
        "trees": list(_tree_records(summary.trees)),
    }
    alignment = summary.alignment
    lengths = None
    if alignment is not None:
        lengths = {"state": type(alignment).__name__, **asdict(alignment)}
    return {
        **{name: getattr(summary, name) for name in ROUND_FIELDS},
        "drafting": summary.work._asdict(),
        "alignment": lengths,
        "gamma": [asdict(record) for record in summary.gamma],
        "blend": None if summary.blend is None else asdict(summary.blend),
        "kv": summary.target_length,
        "kv_draft": summary.draft_length,
        **{name: items for name, items in optional.items() if getattr(summary, name)},
    }


def _tree_records(trees: Sequence[VerifiedTree]) -> Iterator[Record]:
    """Lists without the root and padding at the end, no parents for a chain; trees beyond
    `MAX_TREE_NODES` nodes in all are left out."""
    total = 0
    for tree in trees:
        end = max((n for n, token in enumerate(tree.tokens) if token >= 0 and n), default=0) + 1
        total += end - 1
        if total > MAX_TREE_NODES:
            return
        parents = list(tree.parents[1:end])
        yield {
            "at": tree.position,
            "root": tree.root,
            "tokens": list(tree.tokens[1:end]),
            **({} if parents == list(range(end - 1)) else {"parents": parents}),
            "path": list(tree.path[1:]),
            "final": tree.final,
            **({"forced": True} if tree.forced else {}),
        }


def action_of(step: StepPlan) -> str:
    """The word that a trace has for what is ready in a step."""
    ready = {
        "parse": step.outlines,
        "answer": step.answers,
        "fold": step.folds,
        "fork": step.parallel,
        "round": step.running,
        "open": step.num_starts,
    }
    return next((action for action, items in ready.items() if items), "rest")


def step_record(step: StepPlan, starts: Sequence[str], chunks: Mapping[str, int]) -> Record:
    """The plan of a step: what starts, and why the first waiting item does not."""
    plan = {"step": step.number, "does": action_of(step), "why": step.why}
    starting = {"starts": list(starts), "chunks": dict(chunks)}
    counts = {"running": step.running, "waiting": step.waiting, "held": step.blocked}
    return {"kind": "step", **plan, **starting, **counts, "preempted": list(step.preempted)}


def records_of(run: SavedRun) -> Iterator[Record]:
    for number, line in enumerate(run.text(TRACE).splitlines(), 1):
        try:
            record = json.loads(line)
            yield {"kind": record["kind"], "t": record["t"], **record}
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{run.path / TRACE}:{number}: not a record of a trace") from None


def trees_of(record: Record) -> Iterator[VerifiedTree]:
    """The trees of a round's record; earlier traces have those of `--explain-rounds`, or none."""
    for at, tree in enumerate(record.get("trees", ())):
        yield VerifiedTree(
            branch=record["branches"][at],
            position=tree["at"],
            root=tree["root"],
            tokens=(-1, *tree["tokens"]),
            parents=(0, *tree.get("parents", range(len(tree["tokens"])))),
            path=(0, *tree["path"]),
            final=tree["final"],
            num_committed=record["committed"][at],
            forced=tree.get("forced", False),
        )
    for entry in record.get("explained", ()) if "trees" not in record else ():
        drafts = {draft["node"]: draft for draft in entry["drafts"]}
        nodes = range(1, max(drafts, default=0) + 1)  # without a draft: padding
        yield VerifiedTree(
            branch=entry["branch"],
            position=entry["position"],
            root=entry["root"],
            tokens=(-1, *(drafts[n]["token"] if n in drafts else -1 for n in nodes)),
            parents=(0, *(drafts[n]["parent"] if n in drafts else 0 for n in nodes)),
            path=(0, *(node for node, draft in drafts.items() if draft["accepted"])),
            final=entry["final"],
            num_committed=record["committed"][record["branches"].index(entry["branch"])],
        )


POOL_OPERATIONS = ("append_", "commit_", "release_", "retire_", "relabel_", "truncate_", "copy_")
ROW_OPERATIONS = ("append_", "commit_", "copy_")  # their first argument has an entry for each row


def trace_pools(board: Mapping[str, Any], write: Write) -> None:
    """Make both pools of a run write a record of each operation."""
    for key, name in (("kv", "target"), ("kv_draft", "drafter")):
        if board[key] is not None:
            _trace_pool(board[key], name, write)


def _trace_pool(pool: Any, name: str, write: Write) -> None:
    """An operation inside another one (`retire_` releases rows) has no record of its own. `rows` is
    the number of rows that an operation gets, or the number of rows that it frees."""
    inside: list[str] = []

    def traced(operation: str) -> Callable[..., Any]:
        function = getattr(pool, operation)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = pool.current_length
            inside.append(operation)
            try:
                result = function(*args, **kwargs)
            finally:
                inside.pop()
            if not inside:
                length = pool.current_length
                by_row = operation in ROW_OPERATIONS and args
                rows = np.asarray(args[0]).size if by_row else abs(length - before)
                record = {"kind": "kv", "pool": name, "op": operation, "rows": rows}
                moved = sum(pool.ledger.bytes.values())
                write({**record, "length": length, "ledger_bytes": moved})
            return result

        return run

    for operation in POOL_OPERATIONS:
        setattr(pool, operation, traced(operation))


# tracks of Chrome's trace event format
STATES_TRACK = 1
OPS_TRACK = 2
FIRST_BRANCH_TRACK = 10
COLUMNS = [
    *("kind", "t", "step", "round", "from", "to", "guard", "state", "op", "ns", "branches"),
    *("committed", "accepted", "drafted", "rows", "padding", "kv", "kv_draft"),
]


def as_csv(records: Iterable[Record]) -> str:
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for record in records:
        values = (record.get(name) for name in COLUMNS)
        table.writerow(" ".join(map(str, v)) if isinstance(v, list) else v for v in values)
    return out.getvalue()


def as_perfetto(records: Iterable[Record], title: str) -> str:
    """In Chrome's trace event format: complete events (`ph: X`) of states, ops and branches with
    times in microseconds, counters (`ph: C`), names of tracks (`ph: M`)."""
    events: list[Record] = []

    def add(phase: str, name: str, args: Any, track: int | None = None, **times: float) -> None:
        tid = {} if track is None else {"tid": track}
        events.append({"name": name, "ph": phase, "pid": 1, **tid, **times, "args": args})

    def add_span(track: int, name: str, start: int, end: int, args: Any) -> None:
        add("X", name, args, track, ts=start / 1e3, dur=(end - start) / 1e3)

    add("M", "process_name", {"name": title}, 0)
    add("M", "thread_name", {"name": "states"}, STATES_TRACK)
    add("M", "thread_name", {"name": "ops"}, OPS_TRACK)
    tracks: dict[str, int] = {}
    before = 0
    for record in records:
        kind = record["kind"]
        t = record["t"]
        if kind == "move" and record["step"] > 1:
            args = {name: record[name] for name in ("to", "guard", "committed")}
            add_span(STATES_TRACK, record["from"], t - record["ns"], end=t, args=args)
        elif kind == "op":
            args = {name: record[name] for name in ("state", "shapes")}
            add_span(OPS_TRACK, record["op"], t - record["ns"], end=t, args=args)
        elif kind == "round":
            counts = zip(record["committed"], record["accepted"], strict=True)
            for branch, (committed, accepted) in zip(record["branches"], counts, strict=True):
                if branch not in tracks:
                    tracks[branch] = FIRST_BRANCH_TRACK + len(tracks)
                    add("M", "thread_name", {"name": f"branch {branch}"}, tracks[branch])
                args = {"round": record["round"], "committed": committed, "accepted": accepted}
                name = "prefill" if accepted < 0 else f"{committed} tokens"
                add_span(tracks[branch], name, before, end=t, args=args)
            before = t
            for name in ("drafted", "rows", "kv", "kv_draft"):
                add("C", name, {name: record[name]}, ts=t / 1e3)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"
