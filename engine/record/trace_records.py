"""The lines of trace.jsonl; their keys are documented in docs/cli.md."""

from dataclasses import asdict, fields
from typing import Any

from ...ops.kv.align import AlignmentState, ContinuousDecodingState
from ...states.requests.summary import RoundSummary
from ...states.trace import Event, Moved, OpRan

Happened = Event | RoundSummary | dict[str, Any]


def trace_record(at: int, happened: Happened, number: int) -> dict[str, Any]:
    """One record.

    Args:
        at: nanoseconds since the run began.
        number: of a move the tokens committed in its source, of a round its own number.
    """
    if isinstance(happened, OpRan):
        return _op(at, happened)
    if isinstance(happened, Moved):
        return _move(at, happened, number)
    if isinstance(happened, RoundSummary):
        return _round(at, happened, number)
    return {**happened, "t": at}


def _alignment(state: AlignmentState | ContinuousDecodingState | None) -> dict[str, Any] | None:
    """The lengths of each tensor row, under the names of the state; None under ``bim``."""
    if state is None:
        return None
    numbers = {f.name: getattr(state, f.name) for f in fields(state) if f.compare}  # no tensors
    return {"state": type(state).__name__, **numbers}


def _op(at: int, event: OpRan) -> dict[str, Any]:
    return {
        "kind": "op",
        "t": at,
        "state": event.state,
        "op": event.op,
        "ns": event.nanos,
        "shapes": dict(event.shapes),
    }


def _move(at: int, event: Moved, committed: int) -> dict[str, Any]:
    return {
        "kind": "move",
        "t": at,
        "step": event.step,
        "from": event.source,
        "to": event.target,
        "guard": event.guard,
        "ns": event.nanos,
        "committed": committed,
    }


def _round(at: int, summary: RoundSummary, number: int) -> dict[str, Any]:
    explained = {"explained": [asdict(one) for one in summary.explained]}
    return {
        "kind": "round",
        "t": at,
        "round": number,
        "branches": summary.branches,
        "committed": summary.committed,
        "accepted": summary.accepted,
        "drafted": summary.drafted,
        "rows": summary.rows,
        "padding": summary.padding,
        "alignment": _alignment(summary.alignment),
        "gamma": [asdict(record) for record in summary.gamma],
        "blend": None if summary.blend is None else asdict(summary.blend),
        "kv": summary.target_length,
        "kv_draft": summary.draft_length,
        **(explained if summary.explained else {}),
    }
