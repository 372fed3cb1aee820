"""The live view of a run: at most eight frames a second, on a clock of its own.

A frame is a function of the recorder's last picture; the view never touches the run.
"""

from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ..record.recorder import Recorder
from ..record.snapshot import PoolView, Scene, Snapshot
from .tui_parts import branches_text, header_line, states_text, trace_text
from .tui_sequence import (
    figures_line,
    histogram_bars,
    histogram_line,
    layers_line,
    legend,
    strip_text,
)

FRAMES = 8  # per second, at most
WIDE, TALL = 96, 28  # from this size on there is room for more
STILL = 31  # the picture that stays behind is not taller
BARS = 18  # inner width of the histogram


class LiveView(Live):
    """Shows a recorder's run on a terminal while the context is open."""

    def __init__(self, recorder: Recorder, scene: Scene, console: Console) -> None:
        self.recorder, self.scene = recorder, scene
        self._fullest: PoolView | None = None
        super().__init__(
            console=console,
            screen=True,
            refresh_per_second=FRAMES,
            get_renderable=self._frame,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def _frame(self) -> RenderableType:
        self.recorder.wanted = True
        snap = self.recorder.snapshot
        size = self.console.size
        if snap is None:
            return Text("")
        self._fullest = fuller(self._fullest, snap.pool)
        try:
            return frame(self.scene, snap, size.width, size.height)
        except Exception as error:  # a fault of the view must not disturb the run
            return Text(f"the view failed: {type(error).__name__}: {error}")

    def stop(self) -> None:
        if self.is_started:
            super().stop()
            self.recorder.look()
            self._leave_last_frame()

    def _leave_last_frame(self) -> None:
        """The other screen is gone with the view; one picture stays behind, above the answer."""
        snap, size = self.recorder.snapshot, self.console.size
        if snap is not None:
            # In the end every row was given back; what is worth seeing is the pool before that.
            snap = replace(snap, pool=fuller(self._fullest, snap.pool))
            height = max(min(size.height, STILL) - 1, 12)
            self.console.print(frame(self.scene, snap, size.width, height), height=height)


def fuller(one: PoolView | None, other: PoolView) -> PoolView:
    """The pool that more slots of were in use; the later one if it is the same."""
    return other if one is None or other.used >= one.used else one


def frame(scene: Scene, snap: Snapshot, width: int, height: int) -> RenderableType:
    """One picture of `width` x `height` cells."""
    wide, tall = width >= WIDE, height >= TALL
    top = len(scene.states) + 2
    foot = 6 if tall else 3
    left = 38 if wide else 28
    middle = max(height - top - foot - 2, 3)
    states = states_text(scene, snap, times=wide)
    trace = trace_text(snap.moves, width - left - 4, top - 2)
    graph = _beside((states, "states", left), (trace, "trace · ms · tokens", width - left))
    branches = branches_text(snap.branches, scene.requests > 1, width - 4, middle - 2)
    layout = Layout()
    layout.split_column(
        Layout(header_line(scene, snap, width), name="header", size=1),
        Layout(graph, name="top", size=top),
        Layout(_panel(branches, "branches"), name="branches", size=middle),
        Layout(_foot(snap, width, foot, tall), name="foot", size=foot),
        Layout(figures_line(snap, width), name="figures", size=1),
    )
    return layout


def _foot(snap: Snapshot, width: int, height: int, tall: bool) -> RenderableType:
    meter = snap.meter
    if not tall:
        strip, step = strip_text(snap.pool, width, 1)
        key = _key(snap, step) if snap.blend is None else layers_line(snap.blend, width)
        return Group(strip, key, histogram_line(meter.lengths, meter.tau_step))
    inner = width - BARS - 4
    layers = [] if snap.blend is None else [layers_line(snap.blend, inner - 4)]
    strip, step = strip_text(snap.pool, inner - 4, height - 3 - len(layers))
    sequence = Group(strip, *layers, _key(snap, step))
    bars = histogram_bars(meter.lengths, height - 3, BARS)
    title = f"accepted · τ {meter.tau_step:.2f}"
    return _beside((sequence, "sequence", inner), (bars, title, BARS + 4))


def _beside(*panels: tuple[RenderableType, str, int]) -> Layout:
    """Bodies with their titles and widths, in one row."""
    row = Layout()
    row.split_row(*(Layout(_panel(body, title), size=size) for body, title, size in panels))
    return row


def _key(snap: Snapshot, step: int) -> Text:
    text = legend(snap.pool.codes)
    return text.append(f" {step} slot{'s' if step > 1 else ''} per cell", style="dim")


def _panel(body: RenderableType, title: str) -> Panel:
    return Panel(body, title=title, title_align="left", border_style="grey50", padding=(0, 1))
