"""The lines of trace.jsonl (keys: docs/cli.md), exported as a table or for ui.perfetto.dev."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import wraps
from typing import Any

import numpy as np

from ...ops.row_layout import AlignmentState, ContinuousDecodingState
from ...states.round import RoundSummary, VerifiedTree
from ...states.scheduler import StepPlan
from ...states.trace import Event, Moved, OpRan
from ..errors import UsageError
from .run_folder import SavedRun

Record = dict[str, Any]
Write = Callable[[Record], None]
Happened = Event | RoundSummary | Record

COUNTS = ("branches", "committed", "accepted", "drafted", "rows", "padding")  # of a round

NODES = 512  # of all trees of a round together, in its record

OPERATIONS = ("append_", "commit_", "release_", "retire_", "relabel_", "truncate_", "copy_")
OF_ROWS = ("append_", "commit_", "copy_")  # whose first argument has an entry for each row


def trace_record(at: int, happened: Happened, number: int) -> Record:
    """One record.

    Args:
        at: nanoseconds since the run began.
        number: of a move the tokens committed in its source, of a round its own number.
    """
    match happened:
        case OpRan(state, op, nanos):
            about = {"state": state, "op": op, "ns": nanos, "shapes": happened.shapes}
            return {"kind": "op", "t": at, **about}
        case Moved(source, target, guard, step, nanos):
            way = {"step": step, "from": source, "to": target, "guard": guard}
            return {"kind": "move", "t": at, **way, "ns": nanos, "committed": number}
        case RoundSummary():
            return {"kind": "round", "t": at, "round": number, **_round(happened)}
    return {**happened, "t": at}


def step_record(step: StepPlan, starts: Sequence[str], chunks: Mapping[str, int]) -> Record:
    """What a step does and why; who starts, and why the first who waits does not."""
    return {
        "kind": "step",
        "step": step.number,
        "does": str(step.does),
        "why": step.why,
        "starts": list(starts),
        "chunks": dict(chunks),
        "running": step.running,
        "waiting": step.waiting,
        "held": step.held,
        "preempted": list(step.preempted),
    }


def _round(summary: RoundSummary) -> Record:
    explained = {"explained": [asdict(one) for one in summary.explained]}
    return {
        **{name: getattr(summary, name) for name in COUNTS},
        "drafting": summary.work._asdict(),
        **({"choices": [asdict(one) for one in summary.choices]} if summary.choices else {}),
        "alignment": _alignment(summary.alignment),
        "gamma": [asdict(record) for record in summary.gamma],
        "blend": None if summary.blend is None else asdict(summary.blend),
        "kv": summary.target_length,
        "kv_draft": summary.draft_length,
        **(explained if summary.explained else {}),
        **({"trees": list(_trees(summary.trees))} if summary.trees else {}),
    }


def _trees(trees: Sequence[VerifiedTree]) -> Iterator[Record]:
    """Short, since there are some in every round: the root is left out of the lists, padding at the
    end as well, and the parents of a chain. Trees beyond `NODES` nodes in all are not told of."""
    room = NODES
    for tree in trees:
        end = max((n for n, token in enumerate(tree.tokens) if token >= 0 and n), default=0) + 1
        room -= end - 1
        if room < 0:
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


def told_trees(record: Record) -> Iterator[VerifiedTree]:
    """The trees of a round's record; a trace that was made before they were told has those of
    `--explain-rounds`, or none."""
    places = {name: at for at, name in enumerate(record["branches"])}
    for at, one in enumerate(record.get("trees", ())):
        parents = one.get("parents", range(len(one["tokens"])))
        yield VerifiedTree(
            record["branches"][at],
            one["at"],
            one["root"],
            (-1, *one["tokens"]),
            (0, *parents),
            (0, *one["path"]),
            one["final"],
            record["committed"][at],
            one.get("forced", False),
        )
    for one in () if "trees" in record else record.get("explained", ()):
        taken = record["committed"][places[one["branch"]]]
        yield _told_in_full(one, taken)


def _told_in_full(one: Record, taken: int) -> VerifiedTree:
    drafts = one["drafts"]
    count = max((draft["node"] for draft in drafts), default=0) + 1
    tokens = [-1] * count
    parents = [0] * count
    for draft in drafts:
        tokens[draft["node"]] = draft["token"]
        parents[draft["node"]] = draft["parent"]
    path = (0, *(draft["node"] for draft in drafts if draft["accepted"]))
    tree = tuple(tokens), tuple(parents), path
    return VerifiedTree(one["branch"], one["position"], one["root"], *tree, one["final"], taken)


def _alignment(state: AlignmentState | ContinuousDecodingState | None) -> Record | None:
    """The lengths of each tensor row, under the names of the state; None under ``bim``."""
    if state is None:
        return None
    numbers = {f.name: getattr(state, f.name) for f in fields(state) if f.compare}  # no tensors
    return {"state": type(state).__name__, **numbers}


# -- `--trace kv` ---------------------------------------------------------------------------------


def trace_pools(board: Mapping[str, Any], write: Write) -> None:
    """Let both pools of a run write a record of each operation; nothing else changes."""
    for key, name in (("kv", "target"), ("kv_draft", "drafter")):
        if board[key] is not None:
            _trace_pool(board[key], name, write)


def _trace_pool(pool: Any, name: str, write: Write) -> None:
    """Trace one pool (ops.kv.KVCache).

    An operation that another one uses (`retire_` releases rows) has no record of its own. `rows`
    are those that it was about; of what frees rows, how many became free.
    """
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
                moved = sum(pool.ledger.bytes.values())
                counts = operation in OF_ROWS and args
                rows = np.asarray(args[0]).size if counts else abs(length - before)
                record = {"kind": "kv", "pool": name, "op": operation, "rows": rows}
                write({**record, "length": length, "ledger_bytes": moved})
            return result

        return run

    for operation in OPERATIONS:
        setattr(pool, operation, traced(operation))


# tracks
STATES = 1
OPS = 2
FIRST_BRANCH = 10
COLUMNS = [
    *("kind", "t", "step", "round", "from", "to", "guard", "state", "op", "ns", "branches"),
    *("committed", "accepted", "drafted", "rows", "padding", "kv", "kv_draft"),
]


def records_of(run: SavedRun) -> Iterator[dict[str, Any]]:
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
