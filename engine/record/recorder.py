"""The sink of a run: folds its events into a `RunView`, writes the trace, serves snapshots.

It reads host integers only. Snapshots are made on the run's own thread, and only if a viewer
requested one since the last event; a viewer never touches the run.
"""

from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

from ...states.machine import Event, Moved, OpRan, Run, Sink
from ...states.request import Branch
from ...states.round import RoundSummary
from ..events import Decode, TextStream, TokenTexts
from .metrics import NS, Meter, figures
from .run_view import RunView, Snapshot, branch_view, pool_view, request_view, visible_branches
from .trace import Record, Recordable, Write, step_record, trace_record

BATCH_SIZE = 256  # trace records that are written together


class Recorder:
    """Records every event of one run; without `write` it writes no trace. snapshot_requested: the
    next event updates `snapshot`. listeners: called with each event after it was folded into
    `view`."""

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
        self._texts = TokenTexts(decode)
        self._tokens: set[int] = set()
        self._pending: list[tuple[int, Recordable, int]] = []

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
        self.take_snapshot()

    def __call__(self, event: Event) -> None:
        at = self.now
        if self.write is not None:
            self._record(at, event)
        if isinstance(event, Moved):
            self.view.moved(event, at)
        else:
            self.view.op_ran(event)
            if self._run is not None:
                if "step" in event.results:
                    self._planned(at, self._run.board)
                if "committed" in event.results:
                    self._round_done(at, self._run.board)
        for listener in self.listeners:
            listener(event)
        if self.snapshot_requested:
            self.serve_snapshot()

    def _planned(self, at: int, board: Mapping[str, Any]) -> None:
        step = board["step"]
        starting: list[str] = []
        chunks: dict[str, int] = {}
        if self.write is not None or self.view.preempted:
            table = board["branches"].table
            requests = [table.request_of(owner) for owner in step.requests]
            resumed = [r.first_branch for r in requests if r.first_branch is not None]
            branches = [table.branch_of(owner) for owner in step.starting]
            starting = [item.name for item in (*branches, *requests, *resumed)]
            chunks = {table.request_of(owner).key: count for owner, count in step.chunks}
        self.view.planned(step.preempted, (*starting, *chunks))
        if self.write is not None:
            self._record(at, step_record(step, starting, chunks))

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
        self._record(at, summary, self.meter.forwards)

    def write_record(self, record: Record) -> None:
        self._record(self.now, record)

    def _record(self, at: int, item: Recordable, number: int = 0) -> None:
        if self.write is not None:
            stored = item.described() if isinstance(item, OpRan) else item
            self._pending.append((at, stored, number or self.view.committed))
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
            texts = {str(token): self._texts(token) for token in tokens}
            self.write_record({"kind": "texts", "texts": texts})
        self.flush()

    def figures(self, board: Mapping[str, Any]) -> dict[str, Any]:
        return figures(self.meter, board)

    def exclude(self, nanos: int) -> None:
        """A pause does not count as the run's time."""
        self.start_time += nanos
        if self._run is not None and self._run.moved_at:
            self._run.moved_at += nanos

    def serve_snapshot(self) -> None:
        """Only on the run's own thread."""
        if self.snapshot_requested:
            self.snapshot_requested = False
            self.take_snapshot()

    def take_snapshot(self) -> None:
        """Only on the run's own thread."""
        if self._run is None or not self._run.board:
            return
        board = self._run.board
        requests = board["branches"].requests
        self.snapshot = self.view.snapshot(
            [branch_view(branch, self._text(branch)) for branch in visible_branches(requests)],
            [request_view(request) for request in requests],
            pool_view(board),
            seconds=self.now / NS,
            text=self._texts,
        )

    def _text(self, branch: Branch) -> str:
        stream = self._streams.setdefault(branch.owner, TextStream(self.decode))
        return stream.update(branch.tokens, final=branch.ended)
