"""A run on a terminal: the live view and the replay player. The live view shares the processor with
the run, so frames that are slow to draw are drawn less often."""

import os
import sys
from bisect import bisect_right
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from queue import Empty, Queue
from threading import Event, Thread
from time import monotonic, thread_time
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from ..record.recorder import Recorder
from ..record.replay import Replay
from ..record.run_view import PoolView, Scene, Snapshot
from ..signals import SCREEN, ending_with
from . import panels
from .drafts import drafts_legend, drafts_text
from .keys import SCROLL, Key, Keys, MaybePages, Pages

FRAMES = 8  # per second, at most
KEY_SECONDS = 0.05  # of a wait for a key, after which the end of the run is noticed
FIGURES_WIDTH = 50  # cells of the last line of the live view that are not for keys
DRAW_SHARE = 0.05  # maximum share of a processor's time for drawing
# sizes in cells from which more is shown
WIDE = 96
TALL = 28
VAST = 130
LARGE = 39
MAX_FINAL_HEIGHT = 31  # of the picture that stays on the screen at the end
NO_HINTS = Text()
TRACE = "trace · ms · tokens"
HISTOGRAM_WIDTH = 18  # inner cells
LIVE_KEYS = (Key("Ctrl-C", "stop", "stop the run and save what is finished"), SCROLL)
NO_KEYS = Text("Ctrl-C stop", style="dim")  # without a keyboard


class LiveView(Live):
    """Shows a recorder's run on a terminal while the context is open, and reads its keys. pages:
    what keys change in its pictures."""

    def __init__(self, recorder: Recorder, scene: Scene, console: Console) -> None:
        self.recorder = recorder
        self.scene = scene
        self.pages = Pages(LIVE_KEYS)
        self._keys = Keys(sys.stdin)
        self._unread: Queue[str] = Queue()
        self._fullest: PoolView | None = None
        self._over = Event()
        self._painter = Thread(target=self._paint, name="specsot-view", daemon=True)
        no: Any = dict.fromkeys(("auto_refresh", "redirect_stdout", "redirect_stderr"), False)
        super().__init__(console=console, screen=True, get_renderable=self._frame, **no)

    def start(self, refresh: bool = False) -> None:
        self.recorder.take_snapshot()
        self._keys.__enter__()
        super().start(refresh)
        self._painter.start()

    def read(self, seconds: float) -> str:
        """The next key that changes no page; empty after `seconds` without one."""
        with suppress(Empty):
            return self._unread.get(timeout=seconds)
        return ""

    def _paint(self) -> None:
        due = monotonic() + 1 / FRAMES
        while not self._over.is_set():
            key = self._keys.read(KEY_SECONDS)
            with self._lock:  # not while the run draws a pause
                turned = self.pages.press(key)
            if key and not turned:
                self._unread.put(key)
            if turned or monotonic() >= due:
                start = thread_time()
                self.refresh()
                due = monotonic() + max(1 / FRAMES, (thread_time() - start) / DRAW_SHARE)

    def _frame(self) -> RenderableType:
        self.recorder.snapshot_requested = True
        snap = self.recorder.snapshot
        if snap is None:
            return Text("")
        self._fullest = fuller(self._fullest, snap.pool)
        try:
            if self._keys.available:
                return screen(self.scene, snap, *self.console.size, pages=self.pages)
            return frame(self.scene, snap, *self.console.size, hints=NO_KEYS)
        except Exception as error:  # an error of the view must not disturb the run
            return Text(f"the view failed: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Close the view, and print a last picture on the normal screen, above the answer."""
        if not self.is_started:
            return
        self._over.set()
        self._painter.join()
        super().stop()
        self._keys.__exit__()
        self.recorder.take_snapshot()
        if (snap := self.recorder.snapshot) is not None:
            # At the end all rows are released; the pool is shown as it was at its fullest.
            snap = replace(snap, pool=fuller(self._fullest, snap.pool))
            size = self.console.size
            height = max(min(size.height, MAX_FINAL_HEIGHT) - 1, 12)
            self.console.print(frame(self.scene, snap, size.width, height), height=height)


def fuller(first: PoolView | None, second: PoolView) -> PoolView:
    """The pool with more slots in use; the later one if equal."""
    return second if first is None or second.used >= first.used else first


def screen(
    scene: Scene, snap: Snapshot, width: int, height: int, *, pages: Pages, bar: Text | None = None
) -> Layout:
    """What a view with keys shows: the picture of the run, a page, or the help. bar: the last line;
    otherwise the hints of the keys, unless a run goes on in the picture: after its figures."""
    pages.last = 0
    page = pages.shown()
    bar = bar or (pages.hints(width) if page or pages.note else None)
    if bar is None:
        hints = pages.hints(width - FIGURES_WIDTH)
        return frame(scene, snap, width, height, pages=pages, hints=hints)
    body = Layout(size=max(height - 1, 1))
    if page is None:
        body.update(frame(scene, snap, width, height - 1, pages=pages))
    else:
        title, lines = page
        visible = max(height - 4, 1)
        first = pages.window(len(lines), visible)
        newline = Text("\n", no_wrap=True, overflow="ellipsis")
        shown = newline.join(lines[first : first + visible])
        place = f"lines {first + 1}-{min(first + visible, len(lines))} of {len(lines)}"
        head = panels.header_line(scene, snap, width, pages.note)
        body.split_column(Layout(head, size=1), Layout(panel(shown, title, place)))
    return column(body, Layout(bar, size=1))


def frame(
    scene: Scene,
    snap: Snapshot,
    width: int,
    height: int,
    *,
    pages: MaybePages = None,
    hints: Text = NO_HINTS,
) -> Layout:
    """One picture of `width` x `height` cells; the sizes of its parts do not change from frame to
    frame. pages: whose keys scroll its lists. hints: for the end of its last line."""
    tall = height >= TALL
    if not tall:  # a run with a closed list of requests is never idle
        scene = replace(scene, states=tuple(name for name in scene.states if name != "idle"))
    rows = 1
    if tall and len(snap.requests) == 1:
        rows = min(len(panels.question_lines(snap.requests[0], width)), 1 + height // 20)
    foot = 8 if height >= LARGE else 6 if tall else 3
    free = height - foot - rows - 2
    upper = len(scene.states) + 2
    trace = max(free * 3 // 5 - upper, 0) if height >= LARGE else 0  # lines below the states
    upper += trace
    trace = trace if trace >= 4 else 0
    hints_width = hints.cell_len + 3 if hints else 0
    figures = panels.figures_line(snap, width - hints_width)
    figures.pad_right(width - hints.cell_len - figures.cell_len)
    return column(
        Layout(panels.header_line(scene, snap, width, pages.note if pages else ""), size=1),
        Layout(panels.request_lines(snap.requests, width, rows), size=rows),
        _upper(scene, snap, width, height=upper, trace=trace, pages=pages),
        _lower(snap, width, max(free - upper, 3), tall=tall, pages=pages),
        _foot(snap, width, foot, tall),
        Layout(figures.append_text(hints), size=1),
    )


def column(*parts: Layout) -> Layout:
    layout = Layout()
    layout.split_column(*parts)
    return layout


def _upper(
    scene: Scene, snap: Snapshot, width: int, *, height: int, trace: int, pages: MaybePages
) -> Layout:
    """The states, below them the trace if it fits, and the drafts."""
    wide = width >= WIDE
    side = 46 if width >= VAST else 38 if wide else 28
    inner = width - side - 4
    states = panels.states_text(scene, snap, times=wide)
    title = f"states · visits{' · ms each' if wide else ''} ◦ open"
    if scene.drafter == "none":  # nothing is drafted
        drafts = panel(panels.trace_text(snap.moves, inner, height - 2), TRACE)
    else:
        trees = drafts_text(snap.trees, snap.branches, inner, height - 2, pages=pages)
        drafts = panel(trees, "drafts", drafts_legend(inner - 2))
    left = Layout(size=side)
    if trace and scene.drafter != "none":
        left.split_column(
            Layout(panel(states, title), size=height - trace),
            Layout(panel(panels.trace_text(snap.moves, side - 4, trace - 2), TRACE), size=trace),
        )
    else:
        left.update(panel(states, title, panels.last_move(snap, side - 6)))
    return _row(height, left, Layout(drafts, size=width - side))


def _lower(snap: Snapshot, width: int, height: int, *, tall: bool, pages: Pages | None) -> Layout:
    """The texts of the branches; to the right several requests, if they fit."""
    many = len(snap.requests) > 1
    if not tall:  # a line instead of a frame: one more branch fits
        texts = panels.branches_text(snap.branches, many, width - 4, height - 1, pages=pages)
        start = "── branches "
        end = f" {panels.BRANCH_MARKS} ──"
        rule = "─" * (width - cell_len(start) - cell_len(end))
        head = Text.assemble((start + rule, "grey50"), (end, "grey62"), no_wrap=True)
        return Layout(Group(head, Padding(texts, (0, 0, 0, 2))), size=height)
    side = width * 2 // 5 if many and width >= VAST else 0
    texts = panels.branches_text(snap.branches, many, width - side - 4, height - 2, pages=pages)
    branches = panel(texts, "branches", panels.BRANCH_MARKS)
    if not side:
        return Layout(branches, size=height)
    lines = panels.requests_text(snap.requests, side - 4, height - 2, pages)
    requests = Layout(panel(lines, "requests · parts · tokens"), size=side)
    return _row(height, Layout(branches, size=width - side), requests)


def _foot(snap: Snapshot, width: int, height: int, tall: bool) -> Layout:
    """The slots of the pool, the layers of a blended forward, and the accepted lengths."""
    meter = snap.meter
    inner = width - HISTOGRAM_WIDTH - 8 if tall else width
    layers = [] if snap.blend is None else [panels.layers_line(snap.blend, inner)]
    rows = height - 3 - len(layers) if tall else 1
    strip, step = panels.strip_text(snap.pool, inner, rows)
    key = panels.legend(snap.pool.codes)
    key.append(f" {step} slot{'s' if step > 1 else ''} per cell", style="dim")
    if not tall:
        line = panels.histogram_line(meter.lengths, meter.tau_step)
        return Layout(Group(strip, *(layers or [key]), line), size=height)
    sequence = panel(Group(strip, *layers, key), "sequence")
    bars = panels.histogram_bars(meter.lengths, height - 3, HISTOGRAM_WIDTH)
    lengths = panel(bars, f"accepted · τ {meter.tau_step:.2f}")
    side = HISTOGRAM_WIDTH + 4
    return _row(height, Layout(sequence, size=width - side), Layout(lengths, size=side))


def _row(height: int, *cells: Layout) -> Layout:
    """Cells side by side in one layout: a layout inside another one's body is rendered twice."""
    row = Layout(size=height)
    row.split_row(*cells)
    return row


def panel(body: RenderableType, title: str, key: str = "") -> Panel:
    return Panel(
        body,
        title=title,
        title_align="left",
        subtitle=Text(key, style="grey62") if key else None,
        subtitle_align="right",
        border_style="grey50",
        padding=(0, 1),
    )


# -- the player ----------------------------------------------------------------------------------

MAX_SPEED = 1024.0
MIN_SPEED = 1 / 1024
PLAYER_KEYS = (
    Key("space", "pause", "pause, or play on"),
    Key("←→", "step", "one transition back or forth; so do h, l"),
    Key("q", "quit", "end"),
    SCROLL,
    Key("PgUp/PgDn", "round", "to the round before or after; so do p, n"),
    Key("↑↓", "speed", "twice or half the speed; so do +, -"),
    Key("Home/End", "", "the first or the last transition; so do g, G"),
)
KEY_ALIASES = {  # for keyboards and terminals that lack a key
    **{"l": "right", "h": "left", "+": "up", "-": "down"},
    **{"]": "page down", "[": "page up", "n": "page down", "p": "page up", "g": "home", "G": "end"},
}


class Player:
    """Position and speed of a replay, without a terminal. frame: the shown frame. at: nanoseconds
    of the run. speed: 1 is the speed of the run."""

    def __init__(self, replay: Replay, speed: float = 1.0) -> None:
        self.replay = replay
        self.speed = speed
        self.frame = 0
        self.at = float(replay.times[0])
        self.playing = True
        self.pages = Pages(PLAYER_KEYS)
        kinds = ({record["kind"] for record in replay.records_of(at)} for at in range(len(replay)))
        self._rounds = [at for at, found in enumerate(kinds) if "round" in found]

    def pass_time(self, seconds: float) -> None:
        """Advance by seconds of the viewer's time."""
        if self.playing:
            self.at += seconds * 1e9 * self.speed
            self.frame = max(bisect_right(self.replay.times, self.at) - 1, 0)
            self.playing = self.frame < len(self.replay) - 1

    def press(self, key: str) -> bool:
        """Handle a key; False for quit."""
        key = KEY_ALIASES.get(key, key)
        last = len(self.replay) - 1
        frames = {
            "right": self.frame + 1,
            "left": self.frame - 1,
            "home": 0,
            "end": last,
            "page down": next((at for at in self._rounds if at > self.frame), last),
            "page up": next((at for at in reversed(self._rounds) if at < self.frame), 0),
        }
        if key in frames:
            self._go(frames[key])
        elif key == " ":
            if self.frame == last:
                self._go(0)
            self.playing = not self.playing
        elif key in ("up", "down"):
            self.speed *= 2 if key == "up" else 0.5
            self.speed = min(max(self.speed, MIN_SPEED), MAX_SPEED)
        else:
            return self.pages.press(key) or key != "q"
        return True

    def _go(self, frame: int) -> None:
        self.frame = min(max(frame, 0), len(self.replay) - 1)
        self.at = float(self.replay.times[self.frame])
        self.playing = False

    def bar(self, width: int) -> Text:
        count = len(self.replay)
        mark = "▶" if self.playing else "‖"
        text = Text.assemble(
            (f" {mark} ", panels.LIT),
            (f" {self.speed:g}x", "bold"),
            f"  step {self.frame + 1}/{count}",
            f"  {self.replay.times[self.frame] / 1e9:.2f}/{self.replay.times[-1] / 1e9:.2f} s ",
            no_wrap=True,
        )
        text.append(" · ").append_text(self.pages.hints(width - text.cell_len - 10))
        bar_width = width - text.cell_len - 2
        filled = round(bar_width * self.frame / max(count - 1, 1))
        text.append(" " + "━" * filled, style="green")
        text.append("─" * (bar_width - filled), style="grey37")
        text.truncate(width)
        return text


def leaving_screen(console: Console) -> AbstractContextManager[None]:
    """A signal that ends the process in the block shows the terminal's normal screen again."""
    return ending_with(lambda: os.write(2, SCREEN) if console.is_alt_screen else None)


def play(player: Player, console: Console, keys: Keys) -> None:
    """Play until the quit key, or to the end without a keyboard."""
    with leaving_screen(console), Live(console=console, screen=True, auto_refresh=False) as live:
        last = monotonic()
        painted = None
        pages = player.pages
        while player.playing or keys.available:
            position = (player.frame, player.playing, player.speed, pages.first, pages.help)
            if (position, console.size) != painted:
                snap = player.replay.snapshot(player.frame)
                bar = player.bar(console.width)
                shown = screen(player.replay.scene, snap, *console.size, pages=pages, bar=bar)
                live.update(shown, refresh=True)
                painted = (position, console.size)
            key = keys.read(1 / FRAMES)
            if key and not player.press(key):
                break
            now = monotonic()
            player.pass_time(now - last if not key else 0.0)
            last = now
