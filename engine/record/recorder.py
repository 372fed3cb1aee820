"""The sink of a run: counts, writes the trace, and makes pictures for whoever looks.

It reads host integers only. Pictures are made on the run's own thread, and only when a viewer has
asked for one since the last event; a viewer never touches the run.
"""

from collections import deque
from collections.abc import Mapping
from time import perf_counter_ns
from typing import Any

from ...states.machine import Run
from ...states.round import RoundSummary, VerifiedTree
from ...states.trace import Event, Moved, OpRan, Sink
from ..text_stream import Decode, Pieces, TextStream
from .metrics import Meter, figures
from .run_view import Move, Snapshot, branch_view, draft_tree, pool_view, request_view
from .trace import Happened, Record, Write, step_record, trace_record

LAST = 64  # moves, and branches with their last rounds, that are kept for viewers
BATCH = 256  # trace records that are written together


class Recorder:
    """Takes every event of one run; without `write` there is no trace.

    Attributes:
        wanted: set by a viewer; the next event then leaves a new `snapshot`.
        listeners: are called with each event when it has been counted.
    """

    def __init__(self, decode: Decode, write: Write | None = None) -> None:
        self.decode = decode
        self.write = write
        self.meter = Meter()
        self.wanted = False
        self.snapshot: Snapshot | None = None
        self.state = "start"
        self.before = ""
        self.listeners: list[Sink] = []
        self.moves: deque[Move] = deque(maxlen=LAST)
        self.began = perf_counter_ns()
        self._run: Run | None = None
        self._committed = 0
        self._streams: dict[int, TextStream] = {}
        self._pieces = Pieces(decode)
        self._trees: dict[str, tuple[int, VerifiedTree]] = {}
        self._tokens: set[int] = set()
        self._pending: list[tuple[int, Happened, int]] = []

    def attach(self, run: Run) -> None:
        """Say which run the events come from; call it before the first advance."""
        self._run = run
        self.began = perf_counter_ns()
        self.look()

    def __call__(self, event: Event) -> None:
        at = self.now
        if self.write is not None:
            self._keep(at, event)
        if isinstance(event, Moved):
            self._moved(event, at)
        else:
            self.meter.op_ran(event)
            if "step" in event.results and self._run is not None:
                self._planned(at, self._run.board)
            if "committed" in event.results and self._run is not None:
                self._forward_done(self._run.board, at)
        for listener in self.listeners:
            listener(event)
        if self.wanted:
            self.serve()

    def _planned(self, at: int, board: Mapping[str, Any]) -> None:
        """What a step decided; who starts is told by name."""
        self.meter.preempted += len(board["step"].preempted)
        if self.write is not None:
            step = board["step"]
            branches = board["branches"]
            begin = branches.beginning(step)
            first = [request.first for request in begin if request.first is not None]
            starts = [*branches.starting(step), *begin, *first]
            chunks = {request.key: count for request, count in branches.reading(step)}
            self._keep(at, step_record(step, [one.name for one in starts], chunks))

    def _forward_done(self, board: Mapping[str, Any], at: int) -> None:
        summary: RoundSummary = board["committed"]
        if not summary.rows:  # nobody could start, so nothing was computed
            return
        self._committed += sum(summary.committed)
        self.meter.forward_done(summary, at)
        for tree in summary.trees:
            if self.write is not None:
                self._tokens.update((*tree.tokens[1:], tree.root, tree.final))
            self._trees.pop(tree.branch, None)  # the latest stands last
            self._trees[tree.branch] = (self.meter.forwards, tree)
        for name in list(self._trees)[:-LAST]:
            del self._trees[name]
        for request in board["branches"].requests:
            root = request.root
            marks = self.meter.marks.get(request.key)
            if root is not None and root.ended and marks and marks.outline is None:
                marks.outline = at
        self._keep(at, summary, self.meter.forwards)

    def _moved(self, event: Moved, at: int) -> None:
        self.meter.moved(event, at)
        move = Move(event.source, event.target, event.guard, event.nanos / 1e6, self._committed)
        self.moves.append(move)
        self.state = event.target
        self.before = event.source
        self._committed = 0

    def tell(self, record: Record) -> None:
        """A trace record of somebody else's, in its place among the events."""
        self._keep(self.now, record)

    def _keep(self, at: int, happened: Happened, number: int = 0) -> None:
        if self.write is not None:
            kept = happened.described() if isinstance(happened, OpRan) else happened
            self._pending.append((at, kept, number or self._committed))
            if len(self._pending) >= BATCH:
                self.flush()

    def flush(self) -> None:
        """Write what is still kept; encoding many records at once costs a fraction of each."""
        if self.write is not None:
            for at, happened, number in self._pending:
                self.write(trace_record(at, happened, number))
        self._pending.clear()

    def figures(self, board: Mapping[str, Any]) -> dict[str, Any]:
        """metrics.json, as far as the run got."""
        return figures(self.meter, board)

    def close(self) -> None:
        """End the trace: the text of every token that it tells of, so that it can be read alone."""
        if self.write is not None and self._run is not None:
            for request in self._run.board["branches"].requests:
                for branch in request.all_branches():
                    self._tokens.update(branch.tokens)
            told = sorted(token for token in self._tokens if token >= 0)
            self.tell({"kind": "texts", "texts": {str(one): self._pieces(one) for one in told}})
        self.flush()

    def waited(self, nanos: int) -> None:
        """Somebody let the run wait; that is no time of its own."""
        self.began += nanos
        if self._run is not None and self._run.moved_at:
            self._run.moved_at += nanos

    @property
    def now(self) -> int:
        """Nanoseconds since the run began, without what it has waited."""
        return perf_counter_ns() - self.began

    def serve(self) -> None:
        """A new picture, if somebody has asked for one; only on the run's own thread."""
        if self.wanted:
            self.wanted = False
            self.look()

    def look(self) -> None:
        """Make a new picture; only on the run's own thread."""
        if self._run is None or not self._run.board:
            return
        board = self._run.board
        meter = Meter()
        meter.add(self.meter)
        requests = board["branches"].requests
        # An outline's root branch is shown only until its branches are there.
        shown = [b for request in requests for b in request.branches or request.all_branches()]
        self.snapshot = Snapshot(
            self.state,
            self.before,
            tuple(self.moves),
            tuple(branch_view(branch, self._text(branch)) for branch in shown),
            pool_view(board),
            meter,
            self.now / 1e9,
            self.meter.blends[-1] if self.meter.blends else None,
            tuple(map(request_view, requests)),
            tuple(draft_tree(*of, self._pieces) for of in self._trees.values()),
        )

    def _text(self, branch: Any) -> str:
        stream = self._streams.setdefault(branch.owner, TextStream(self.decode))
        return stream.update(branch.tokens, final=branch.ended)
