"""The sink of a run: counts, writes the trace, and makes pictures for whoever looks.

It reads host integers only. Pictures are made on the run's own thread, and only when a viewer has
asked for one since the last event; a viewer never touches the run.
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from ...states.machine import Run
from ...states.requests.branch import Stage
from ...states.requests.summary import RoundSummary
from ...states.trace import Event, Moved, OpRan
from .metrics import Meter
from .snapshot import LiveFigures, Move, Snapshot, StateView, branch_view, pool_view, shown_branches
from .text_stream import Decode, TextStream
from .trace_records import Happened, trace_record

LAST = 64  # moves that are kept for viewers
BATCH = 256  # trace records that are written together

Write = Callable[[dict[str, Any]], None]


class Recorder:
    """Takes every event of one run.

    Args:
        decode: token ids to text.
        write: takes one trace record; None for no trace.
        states: the graph's states in file order.

    Attributes:
        wanted: set by a viewer; the next event then leaves a new `snapshot`.
    """

    def __init__(
        self,
        decode: Decode,
        write: Write | None = None,
        states: tuple[str, ...] = (),
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.decode, self.write, self.clock = decode, write, clock
        self.meter = Meter()
        self.states = states
        self.wanted = False
        self.snapshot: Snapshot | None = None
        self.state, self.before = "start", ""
        self.moves: deque[Move] = deque(maxlen=LAST)
        self.began = clock()
        self._run: Run | None = None
        self._committed = 0
        self._streams: dict[int, TextStream] = {}
        self._kept: list[tuple[int, Happened, int]] = []

    def attach(self, run: Run) -> None:
        """Say which run the events come from; call it before the first advance."""
        self._run, self.began = run, self.clock()
        self.look()

    def __call__(self, event: Event) -> None:
        at = self.now
        self._keep(at, event)
        if isinstance(event, OpRan):
            self._op_ran(event, at)
        else:
            self._moved(event, at)
        if self.wanted:
            self.wanted = False
            self.look()

    def _op_ran(self, event: OpRan, at: int) -> None:
        self.meter.op_ran(event)
        if "committed" in event.shapes and self._run is not None:
            self._forward_done(self._run.board["committed"], at)

    def _forward_done(self, summary: RoundSummary, at: int) -> None:
        if not summary.rows:  # nobody could start, so nothing was computed
            return
        self._committed += sum(summary.committed)
        self.meter.forward_done(summary, at)
        self._mark_outlines(at)
        self._keep(at, summary, self.meter.forwards)

    def _mark_outlines(self, at: int) -> None:
        assert self._run is not None
        for request in self._run.board["branches"].requests:
            root, marks = request.root, self.meter.marks.get(request.key)
            if root is not None and root.stage is Stage.DONE and marks and marks.outline is None:
                marks.outline = at

    def _moved(self, event: Moved, at: int) -> None:
        self.meter.moved(event, at)
        move = Move(event.source, event.target, event.guard, event.nanos / 1e6, self._committed)
        self.moves.append(move)
        self.state, self.before = event.target, event.source
        self._committed = 0

    def tell(self, record: dict[str, Any]) -> None:
        """A trace record of somebody else's, in its place among the events."""
        self._keep(self.now, record)

    def _keep(self, at: int, happened: Happened, number: int = 0) -> None:
        if self.write is not None:
            self._kept.append((at, happened, number or self._committed))
            if len(self._kept) >= BATCH:
                self.flush()

    def flush(self) -> None:
        """Write what is still kept; encoding many records at once costs a fraction of each."""
        if self.write is not None:
            for at, happened, number in self._kept:
                self.write(trace_record(at, happened, number))
        self._kept.clear()

    @property
    def now(self) -> int:
        """Nanoseconds since the run began."""
        return self.clock() - self.began

    def look(self) -> None:
        """Make a new picture; only on the run's own thread."""
        if self._run is None or not self._run.board:
            return
        board, meter = self._run.board, self.meter
        shown = shown_branches(board["branches"].requests)
        self.snapshot = Snapshot(
            self.state,
            self.before,
            tuple(StateView(n, meter.visits[n], meter.nanos[n] / 1e6) for n in self.states),
            tuple(self.moves),
            tuple(branch_view(branch, self._text(branch)) for branch in shown),
            pool_view(board),
            LiveFigures(
                meter.tokens,
                meter.rounds,
                meter.per_forward,
                meter.tau_step,
                meter.acceptance_rate,
                dict(meter.lengths),
            ),
            self.now / 1e9,
            meter.blends[-1] if meter.blends else None,
        )

    def _text(self, branch: Any) -> str:
        stream = self._streams.setdefault(branch.owner, TextStream(self.decode))
        return stream.update(branch.tokens, final=branch.stage is Stage.DONE)
