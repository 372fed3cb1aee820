"""The live view of a run: at most eight frames a second, in a thread of its own.

A frame is a function of the recorder's last picture; the view never touches the run. It takes a
processor's time from it, though: where frames are slow to draw, there are fewer.
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
    asked_lines,
    branches_text,
    figures_line,
    header_line,
    histogram_bars,
    histogram_line,
    last_move,
    layers_line,
    legend,
    lines_of_question,
    requests_text,
    states_text,
    strip_text,
    trace_text,
)

FRAMES = 8  # per second, at most
SHARE = 0.05  # of a processor's time that drawing may take
# from this size on there is room for more
WIDE = 96
TALL = 28
# and from here on for much more
VAST = 130
LARGE = 40
STILL = 31  # the picture that stays behind is not taller
TRACE = "trace · ms · tokens"
BARS = 18  # inner width of the histogram


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
            began = thread_time()
            self.refresh()
            pause = max(1 / FRAMES, (thread_time() - began) / SHARE)

    def _frame(self) -> RenderableType:
        self.recorder.snapshot_requested = True
        snap = self.recorder.snapshot
        size = self.console.size
        if snap is None:
            return Text("")
        self._fullest = fuller(self._fullest, snap.pool)
        try:
            return self.paint(snap, size.width, size.height)
        except Exception as error:  # a fault of the view must not disturb the run
            return Text(f"the view failed: {type(error).__name__}: {error}")

    def stop(self) -> None:
        if self.is_started:
            self._over.set()
            self._painter.join()
            super().stop()
            self.recorder.take_snapshot()
            self._leave_last_frame()

    def _leave_last_frame(self) -> None:
        """The other screen is gone with the view; one picture stays behind, above the answer."""
        snap = self.recorder.snapshot
        size = self.console.size
        if snap is not None:
            # In the end every row was given back; what is worth seeing is the pool before that.
            snap = replace(snap, pool=fuller(self._fullest, snap.pool))
            height = max(min(size.height, STILL) - 1, 12)
            self.console.print(frame(self.scene, snap, size.width, height), height=height)


def fuller(one: PoolView | None, other: PoolView) -> PoolView:
    """The pool that more slots of were in use; the later one if it is the same."""
    return other if one is None or other.used >= one.used else one


@dataclass(frozen=True, slots=True)
class ScreenPlan:
    """How the lines of a screen are given away, and the columns of its upper part."""

    asked: int
    upper: int
    branches: int
    foot: int
    left: int
    trace: int

    @classmethod
    def of(cls, scene: Scene, snap: Snapshot, width: int, height: int) -> "ScreenPlan":
        """What every part gets; nothing depends on what changes from frame to frame."""
        tall = height >= TALL
        asked = 1
        if tall and len(snap.requests) == 1:
            asked = min(lines_of_question(snap.requests[0].question, width), 1 + height // 20)
        foot = 8 if height >= LARGE else 6 if tall else 3
        upper = states = len(scene.states) + 2
        free = height - foot - asked - 2
        if height >= LARGE:
            upper = max(upper, free * 3 // 5)
        trace = upper - states if upper - states >= 4 else 0
        left = 46 if width >= VAST else 38 if width >= WIDE else 28
        return cls(asked, upper, max(free - upper, 3), foot, left, trace)


def frame(scene: Scene, snap: Snapshot, width: int, height: int) -> RenderableType:
    """One picture of `width` x `height` cells."""
    tall = height >= TALL
    if not tall:  # a run whose requests are known never waits for another one
        scene = replace(scene, states=tuple(name for name in scene.states if name != "idle"))
    room = ScreenPlan.of(scene, snap, width, height)
    layout = Layout()
    layout.split_column(
        Layout(header_line(scene, snap, width), name="header", size=1),
        Layout(asked_lines(snap.requests, width, room.asked), name="asked", size=room.asked),
        _upper(scene, snap, width, room),
        _lower(snap, width, room, tall),
        _foot(snap, width, room.foot, tall),
        Layout(figures_line(snap, width), name="figures", size=1),
    )
    return layout


def _upper(scene: Scene, snap: Snapshot, width: int, room: ScreenPlan) -> Layout:
    """The states, below them the trace if there is room, and the drafts."""
    wide = width >= WIDE
    inner = width - room.left - 4
    lines = room.upper - 2
    states = states_text(scene, snap, times=wide)
    title = f"states · visits{' · ms each' if wide else ''} ◦ open"
    drafts = _panel(
        drafts_text(snap.trees, snap.branches, inner, lines), "drafts", drafts_legend(inner - 2)
    )
    if scene.drafter == "none":  # nothing is drafted
        drafts = _panel(trace_text(snap.moves, inner, lines), TRACE)
    right = Layout(drafts, size=width - room.left)
    if room.trace and scene.drafter != "none":
        trace = trace_text(snap.moves, room.left - 4, room.trace - 2)
        left = Layout(size=room.left)
        left.split_column(
            Layout(_panel(states, title), size=room.upper - room.trace),
            Layout(_panel(trace, TRACE), size=room.trace),
        )
    else:
        left = Layout(_panel(states, title, last_move(snap, room.left - 6)), size=room.left)
    return _row(room.upper, left, right)


def _lower(snap: Snapshot, width: int, room: ScreenPlan, tall: bool) -> Layout:
    """The branches' texts; beside them requests, if they are many and there is room."""
    many = len(snap.requests) > 1
    lines = room.branches - 2
    if not tall:  # no frame around them: that makes room for one more
        texts = branches_text(snap.branches, many, width - 4, lines + 1)
        head = _rule("branches", BRANCH_MARKS, width)
        return Layout(Group(head, Padding(texts, (0, 0, 0, 2))), size=room.branches)
    side = width * 2 // 5 if many and width >= VAST else 0
    inner = width - side - 4
    branches = _panel(branches_text(snap.branches, many, inner, lines), "branches", BRANCH_MARKS)
    if not side:
        return Layout(branches, size=room.branches)
    requests = requests_text(snap.requests, side - 4, lines)
    return _row(
        room.branches,
        Layout(branches, size=width - side),
        Layout(_panel(requests, "requests · parts · tokens"), size=side),
    )


def _foot(snap: Snapshot, width: int, height: int, tall: bool) -> Layout:
    meter = snap.meter
    if not tall:
        strip, step = strip_text(snap.pool, width, 1)
        key = _key(snap, step) if snap.blend is None else layers_line(snap.blend, width)
        lines = Group(strip, key, histogram_line(meter.lengths, meter.tau_step))
        return Layout(lines, size=height)
    inner = width - BARS - 4
    layers = [] if snap.blend is None else [layers_line(snap.blend, inner - 4)]
    strip, step = strip_text(snap.pool, inner - 4, height - 3 - len(layers))
    sequence = Group(strip, *layers, _key(snap, step))
    bars = histogram_bars(meter.lengths, height - 3, BARS)
    title = f"accepted · τ {meter.tau_step:.2f}"
    return _row(
        height,
        Layout(_panel(sequence, "sequence"), size=inner),
        Layout(_panel(bars, title), size=BARS + 4),
    )


def _row(height: int, *cells: Layout) -> Layout:
    """Cells beside each other. Every layout within a layout's body would be rendered once more, so
    all are parts of one."""
    row = Layout(size=height)
    row.split_row(*cells)
    return row


def _key(snap: Snapshot, step: int) -> Text:
    text = legend(snap.pool.codes)
    return text.append(f" {step} slot{'s' if step > 1 else ''} per cell", style="dim")


def _rule(title: str, legend: str, width: int) -> Text:
    """A line with a title on its left and a legend on its right, as a panel begins and ends."""
    left = f"── {title} "
    right = f" {legend} ──"
    return Text.assemble(
        (left, "grey50"),
        ("─" * (width - cell_len(left) - cell_len(right)), "grey50"),
        (right, "grey62"),
        no_wrap=True,
    )


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
