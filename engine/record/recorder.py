"""The sink of a run: folds its events into a `RunView`, writes trace.jsonl (keys: docs/cli.md), and
makes snapshots on the run's own thread, if a viewer requested one since the last event."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter_ns
from typing import Any

from ...states.machine import Event, Moved, OpRan, Run, Sink
from ...states.request import Branch, Request
from ...states.round import RoundSummary, VerifiedTree
from ...states.scheduler import StepPlan
from ..events import Decode, TextStream, token_texts
from .metrics import NS, Meter, counted_figures, held_figures
from .run_view import RunView, Snapshot, branch_view, pool_view, request_view, visible_branches

Record = dict[str, Any]
Write = Callable[[Record], None]

ROUND_FIELDS = ("branches", "committed", "accepted", "drafted", "rows", "padding")
MAX_TREE_NODES = 512  # of all trees of a round together, in its record
BATCH_SIZE = 256  # trace records that are written together


class Recorder:
    """Records every event of one run; without `write` it writes no trace. snapshot_requested: the
    next event updates `snapshot`. listeners: called with each event, after `view` has folded it."""

    def __init__(self, decode: Decode, write: Write | None = None) -> None:
        self.decode = decode
        self.write = write
        self.view = RunView()
        self.snapshot_requested = False
        self.snapshot: Snapshot | None = None
        self.listeners: list[Sink] = []
        self.start_time = perf_counter_ns()
        self._run: Run | None = None
        self._streams: dict[int, TextStream] = {}
        self.text_of = token_texts(decode)
        self._tokens: set[int] = set()
        self._pending: list[tuple[int, RoundSummary | Record, int]] = []

    @property
    def meter(self) -> Meter:
        return self.view.meter

    @property
    def now(self) -> int:
        """Nanoseconds since the start of the run, without its pauses."""
        return perf_counter_ns() - self.start_time

    def attach(self, run: Run) -> None:
        """Before the first transition."""
        self._run = run
        self.start_time = perf_counter_ns()

    def __call__(self, event: Event) -> None:
        at = self.now
        if self.write is not None:  # at once: an op's results must not stay alive
            self.record(at, trace_record(at, event, self.view.committed))
        if isinstance(event, Moved):
            self.view.moved(event, at)
        else:
            self.meter.op_ran(event)
            if self._run is not None:
                if "step" in event.results:
                    self._planned(at, self._run.board)
                if "committed" in event.results:
                    self._round_done(at, self._run.board)
        for listener in self.listeners:
            listener(event)
        if self.snapshot_requested:
            self.take_snapshot()

    def _planned(self, at: int, board: Mapping[str, Any]) -> None:
        step: StepPlan = board["step"]
        self.meter.preempted += len(step.preempted)
        if self.write is not None:
            starting: list[Branch | Request] = [*step.starting, *step.requests]
            starting += [r.first_branch for r in step.requests if r.first_branch is not None]
            record = {
                "kind": "step",
                "step": step.number,
                "does": action_of(step),
                "why": step.why,
                "starts": [item.name for item in starting],
                "chunks": {request.key: count for request, count in step.chunks},
                "running": step.running,
                "waiting": step.waiting,
                "held": step.blocked,
                "preempted": list(step.preempted),
            }
            self.record(at, record)

    def _round_done(self, at: int, board: Mapping[str, Any]) -> None:
        summary: RoundSummary = board["committed"]
        if not summary.rows:  # no branch could start, so no forward was computed
            return
        self.view.round_done(summary, at)
        for tree in summary.trees if self.write is not None else ():
            self._tokens.update((*tree.tokens[1:], tree.root, tree.final))
        for request in board["branches"].requests:
            marks = self.meter.marks.get(request.key)
            if request.root is not None and request.root.ended and marks and marks.outline is None:
                marks.outline = at
        self.record(at, summary, self.meter.forwards)

    def record(self, at: int, item: RoundSummary | Record, number: int = 0) -> None:
        if self.write is not None:
            self._pending.append((at, item, number))
            if len(self._pending) >= BATCH_SIZE:
                self.flush()

    def flush(self) -> None:
        """Encoding many records at once costs a fraction of one by one."""
        if self.write is not None:
            for at, item, number in self._pending:
                self.write(trace_record(at, item, number))
        self._pending.clear()

    def close(self) -> None:
        """End the trace with the text of every token in it, so that it is readable by itself."""
        if self.write is not None and self._run is not None:
            for request in self._run.board["branches"].requests:
                for branch in request.all_branches():
                    self._tokens.update(branch.tokens)
            tokens = sorted(token for token in self._tokens if token >= 0)
            texts = {str(token): self.text_of(token) for token in tokens}
            self.record(self.now, {"kind": "texts", "texts": texts})
        self.flush()

    def figures(self, board: Mapping[str, Any]) -> dict[str, Any]:
        """metrics.json: every figure of the run under its documented name."""
        return {**counted_figures(self.meter), **held_figures(self.meter, board)}

    def exclude(self, nanos: int) -> None:
        """A pause does not count as the run's time."""
        self.start_time += nanos
        if self._run is not None and self._run.moved_at:
            self._run.moved_at += nanos

    def take_snapshot(self) -> None:
        """Only on the run's own thread."""
        if self._run is None or not self._run.board:
            return
        self.snapshot_requested = False
        board = self._run.board
        requests = board["branches"].requests
        self.snapshot = self.view.snapshot(
            [branch_view(branch, self._text(branch)) for branch in visible_branches(requests)],
            [request_view(request) for request in requests],
            pool_view(board),
            seconds=self.now / NS,
            text=self.text_of,
        )

    def _text(self, branch: Branch) -> str:
        stream = self._streams.setdefault(branch.owner, TextStream(self.decode))
        stream.feed(*branch.tokens[len(stream.tokens) :], final=branch.ended)
        return stream.text


def trace_record(at: int, item: Event | RoundSummary | Record, number: int) -> Record:
    """At nanoseconds since the start; number: of a round, or the tokens committed before a move."""
    match item:
        case OpRan(state, op, nanos):
            values = {"state": state, "op": op, "ns": nanos, "shapes": item.shapes}
            return {"kind": "op", "t": at, **values}
        case Moved(source, target, guard, step, nanos):
            values = {"step": step, "from": source, "to": target, "guard": guard}
            return {"kind": "move", "t": at, **values, "ns": nanos, "committed": number}
        case RoundSummary():
            alignment = item.alignment
            record = {
                "kind": "round",
                "t": at,
                "round": number,
                **{name: getattr(item, name) for name in ROUND_FIELDS},
                "drafting": item.work._asdict(),
                "alignment": alignment and {"state": type(alignment).__name__, **asdict(alignment)},
                "gamma": [asdict(length) for length in item.gamma],
                "blend": None if item.blend is None else asdict(item.blend),
                "kv": item.target_length,
                "kv_draft": item.draft_length,
            }
            if item.choices:
                record["choices"] = [
                    {name: value for name, value in choice._asdict().items() if value != ""}
                    for choice in item.choices
                ]
            if item.trees:
                record["trees"] = list(_tree_records(item.trees))
            return record
    return {**item, "t": at}


def _tree_records(trees: Sequence[VerifiedTree]) -> Iterator[Record]:
    """Lists without the root and padding at the end, no parents for a chain; trees beyond
    `MAX_TREE_NODES` nodes in all are left out, unless they are explained."""
    total = 0
    for tree in trees:
        end = max((n for n, token in enumerate(tree.tokens) if token >= 0 and n), default=0) + 1
        total += end - 1
        if total > MAX_TREE_NODES and not tree.rule:
            return
        parents = list(tree.parents[1:end])
        explained: Record = {}
        if tree.rule:
            explained = {"rule": tree.rule, "came": tree.came, "finish": tree.finish}
            explained["figures"] = [asdict(one) for one in tree.figures[: end - 1]]
        yield {
            "at": tree.position,
            "root": tree.root,
            "tokens": list(tree.tokens[1:end]),
            **({} if parents == list(range(end - 1)) else {"parents": parents}),
            "path": list(tree.path[1:]),
            "final": tree.final,
            **({"forced": True} if tree.forced else {}),
            **explained,
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
