"""The live view of a run: at most eight frames per second, drawn in a separate thread.

A frame is a function of the recorder's last snapshot; the view never touches the run. It shares
the processor with the run, so frames that are slow to draw are drawn less often.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, Thread
from time import thread_time

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from ..record.recorder import Recorder
from ..record.run_view import PoolView, Scene, Snapshot
from .drafts import drafts_legend, drafts_text
from .panels import (
    BRANCH_MARKS,
    branches_text,
    figures_line,
    header_line,
    histogram_bars,
    histogram_line,
    last_move,
    layers_line,
    legend,
    question_lines,
    request_lines,
    requests_text,
    states_text,
    strip_text,
    trace_text,
)

FRAMES = 8  # per second, at most
DRAW_SHARE = 0.05  # maximum share of a processor's time for drawing
# sizes in cells from which more is shown
WIDE = 96
TALL = 28
VAST = 130
LARGE = 40
MAX_FINAL_HEIGHT = 31  # of the picture that stays on the screen at the end
TRACE = "trace · ms · tokens"
HISTOGRAM_WIDTH = 18  # inner cells


Paint = Callable[[Snapshot, int, int], RenderableType]


class LiveView(Live):
    """Shows a recorder's run on a terminal while the context is open.

    Attributes:
        paint: makes a picture of a snapshot and a size.
    """

    def __init__(self, recorder: Recorder, scene: Scene, console: Console) -> None:
        self.recorder = recorder
        self.scene = scene
        self.paint: Paint = partial(frame, scene)
        self._fullest: PoolView | None = None
        self._over = Event()
        self._painter = Thread(target=self._paint, name="specsot-view", daemon=True)
        super().__init__(
            console=console,
            screen=True,
            auto_refresh=False,
            get_renderable=self._frame,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self, refresh: bool = False) -> None:
        super().start(refresh)
        self._painter.start()

    def _paint(self) -> None:
        pause = 1 / FRAMES
        while not self._over.wait(pause):
            start = thread_time()
            self.refresh()
            pause = max(1 / FRAMES, (thread_time() - start) / DRAW_SHARE)

    def _frame(self) -> RenderableType:
        self.recorder.snapshot_requested = True
        snap = self.recorder.snapshot
        size = self.console.size
        if snap is None:
            return Text("")
        self._fullest = fuller(self._fullest, snap.pool)
        try:
            return self.paint(snap, size.width, size.height)
        except Exception as error:  # an error of the view must not disturb the run
            return Text(f"the view failed: {type(error).__name__}: {error}")

    def stop(self) -> None:
        if self.is_started:
            self._over.set()
            self._painter.join()
            super().stop()
            self.recorder.take_snapshot()
            self._leave_last_frame()

    def _leave_last_frame(self) -> None:
        """Print a last picture on the normal screen, above the answer."""
        snap = self.recorder.snapshot
        size = self.console.size
        if snap is not None:
            # At the end all rows are released; the pool is shown as it was at its fullest.
            snap = replace(snap, pool=fuller(self._fullest, snap.pool))
            height = max(min(size.height, MAX_FINAL_HEIGHT) - 1, 12)
            self.console.print(frame(self.scene, snap, size.width, height), height=height)


def fuller(first: PoolView | None, second: PoolView) -> PoolView:
    """The pool with more slots in use; the later one if equal."""
    return second if first is None or second.used >= first.used else first


@dataclass(frozen=True, slots=True)
class ScreenPlan:
    """The heights of the parts of a screen, and the widths of its upper part; it depends on nothing
    that changes from frame to frame."""

    requests: int
    upper: int
    branches: int
    foot: int
    states_width: int
    trace: int

    @classmethod
    def of(cls, scene: Scene, snap: Snapshot, width: int, height: int) -> "ScreenPlan":
        tall = height >= TALL
        requests = 1
        if tall and len(snap.requests) == 1:
            requests = min(len(question_lines(snap.requests[0], width)), 1 + height // 20)
        foot = 8 if height >= LARGE else 6 if tall else 3
        upper = states = len(scene.states) + 2
        free = height - foot - requests - 2
        if height >= LARGE:
            upper = max(upper, free * 3 // 5)
        return cls(
            requests=requests,
            upper=upper,
            branches=max(free - upper, 3),
            foot=foot,
            states_width=46 if width >= VAST else 38 if width >= WIDE else 28,
            trace=upper - states if upper - states >= 4 else 0,
        )


def frame(scene: Scene, snap: Snapshot, width: int, height: int) -> Layout:
    """One picture of `width` x `height` cells."""
    tall = height >= TALL
    if not tall:  # a run with a closed list of requests is never idle
        scene = replace(scene, states=tuple(name for name in scene.states if name != "idle"))
    plan = ScreenPlan.of(scene, snap, width, height)
    requests = request_lines(snap.requests, width, plan.requests)
    layout = Layout()
    layout.split_column(
        Layout(header_line(scene, snap, width), name="header", size=1),
        Layout(requests, name="requests", size=plan.requests),
        _upper(scene, snap, width, plan),
        _lower(snap, width, plan, tall),
        _foot(snap, width, plan.foot, tall),
        Layout(figures_line(snap, width), name="figures", size=1),
    )
    return layout


def with_bar(body: RenderableType, bar: Text, height: int) -> Layout:
    """A picture with a line below it."""
    layout = Layout()
    layout.split_column(Layout(body, size=max(height - 1, 1)), Layout(bar, size=1))
    return layout


def _upper(scene: Scene, snap: Snapshot, width: int, plan: ScreenPlan) -> Layout:
    """The states, below them the trace if it fits, and the drafts."""
    wide = width >= WIDE
    inner = width - plan.states_width - 4
    lines = plan.upper - 2
    states = states_text(scene, snap, times=wide)
    title = f"states · visits{' · ms each' if wide else ''} ◦ open"
    if scene.drafter == "none":  # nothing is drafted
        drafts = _panel(trace_text(snap.moves, inner, lines), TRACE)
    else:
        trees = drafts_text(snap.trees, snap.branches, inner, lines)
        drafts = _panel(trees, "drafts", drafts_legend(inner - 2))
    states_side = Layout(size=plan.states_width)
    if plan.trace and scene.drafter != "none":
        trace = trace_text(snap.moves, plan.states_width - 4, plan.trace - 2)
        states_side.split_column(
            Layout(_panel(states, title), size=plan.upper - plan.trace),
            Layout(_panel(trace, TRACE), size=plan.trace),
        )
    else:
        states_side.update(_panel(states, title, last_move(snap, plan.states_width - 6)))
    return _row(plan.upper, states_side, Layout(drafts, size=width - plan.states_width))


def _lower(snap: Snapshot, width: int, plan: ScreenPlan, tall: bool) -> Layout:
    """The texts of the branches; to the right several requests, if they fit."""
    many = len(snap.requests) > 1
    lines = plan.branches - 2
    if not tall:  # a line instead of a frame: one more branch fits
        texts = branches_text(snap.branches, many, width - 4, lines + 1)
        start = "── branches "
        end = f" {BRANCH_MARKS} ──"
        rule = "─" * (width - cell_len(start) - cell_len(end))
        head = Text.assemble((start + rule, "grey50"), (end, "grey62"), no_wrap=True)
        return Layout(Group(head, Padding(texts, (0, 0, 0, 2))), size=plan.branches)
    side = width * 2 // 5 if many and width >= VAST else 0
    texts = branches_text(snap.branches, many, width - side - 4, lines)
    branches = _panel(texts, "branches", BRANCH_MARKS)
    if not side:
        return Layout(branches, size=plan.branches)
    requests = _panel(requests_text(snap.requests, side - 4, lines), "requests · parts · tokens")
    return _row(plan.branches, Layout(branches, size=width - side), Layout(requests, size=side))


def _foot(snap: Snapshot, width: int, height: int, tall: bool) -> Layout:
    """The slots of the pool, the layers of a blended forward, and the accepted lengths."""
    meter = snap.meter
    inner = width - HISTOGRAM_WIDTH - 8 if tall else width
    layers = [] if snap.blend is None else [layers_line(snap.blend, inner)]
    rows = height - 3 - len(layers) if tall else 1
    strip, step = strip_text(snap.pool, inner, rows)
    key = legend(snap.pool.codes)
    key.append(f" {step} slot{'s' if step > 1 else ''} per cell", style="dim")
    if not tall:
        lengths = histogram_line(meter.lengths, meter.tau_step)
        return Layout(Group(strip, *(layers or [key]), lengths), size=height)
    sequence = _panel(Group(strip, *layers, key), "sequence")
    bars = histogram_bars(meter.lengths, height - 3, HISTOGRAM_WIDTH)
    lengths_panel = _panel(bars, f"accepted · τ {meter.tau_step:.2f}")
    side = HISTOGRAM_WIDTH + 4
    return _row(height, Layout(sequence, size=width - side), Layout(lengths_panel, size=side))


def _row(height: int, *cells: Layout) -> Layout:
    """Cells side by side, parts of one layout: a layout inside another one's body is rendered
    twice."""
    row = Layout(size=height)
    row.split_row(*cells)
    return row


def _panel(body: RenderableType, title: str, legend: str = "") -> Panel:
    return Panel(
        body,
        title=title,
        title_align="left",
        subtitle=Text(legend, style="grey62") if legend else None,
        subtitle_align="right",
        border_style="grey50",
        padding=(0, 1),
    )
