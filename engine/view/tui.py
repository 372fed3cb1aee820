"""A run on a terminal: the live view, the replay player, and single keys. The live view shares the
processor with the run, so frames that are slow to draw are drawn less often."""

import os
import select
import termios
import tty
from bisect import bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from time import monotonic, sleep, thread_time
from typing import Any, Self, TextIO

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
KEY_NAMES = {  # of the sequences that terminals send, CSI and SS3
    **{"\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left"},
    **{"\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left"},
    **{"\x1b[H": "home", "\x1b[F": "end", "\x1bOH": "home", "\x1bOF": "end"},
    **{"\x1b[1~": "home", "\x1b[4~": "end", "\x1b[5~": "page up", "\x1b[6~": "page down"},
    **{"\r": "enter", "\n": "enter", "\t": "tab", "\x03": "q", "\x04": "q"},
}

Paint = Callable[[Snapshot, int, int], RenderableType]


class LiveView(Live):
    """Shows a recorder's run on a terminal while the context is open. paint: makes its pictures."""

    def __init__(self, recorder: Recorder, scene: Scene, console: Console) -> None:
        self.recorder = recorder
        self.scene = scene
        self.paint: Paint = partial(frame, scene)
        self._fullest: PoolView | None = None
        self._over = Event()
        self._painter = Thread(target=self._paint, name="specsot-view", daemon=True)
        no: Any = dict.fromkeys(("auto_refresh", "redirect_stdout", "redirect_stderr"), False)
        super().__init__(console=console, screen=True, get_renderable=self._frame, **no)

    def start(self, refresh: bool = False) -> None:
        self.recorder.take_snapshot()
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
        if snap is None:
            return Text("")
        self._fullest = fuller(self._fullest, snap.pool)
        try:
            return self.paint(snap, *self.console.size)
        except Exception as error:  # an error of the view must not disturb the run
            return Text(f"the view failed: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Close the view, and print a last picture on the normal screen, above the answer."""
        if not self.is_started:
            return
        self._over.set()
        self._painter.join()
        super().stop()
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


def frame(scene: Scene, snap: Snapshot, width: int, height: int) -> Layout:
    """One picture of `width` x `height` cells; the sizes of its parts do not change from frame to
    frame."""
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
    return column(
        Layout(panels.header_line(scene, snap, width), size=1),
        Layout(panels.request_lines(snap.requests, width, rows), size=rows),
        _upper(scene, snap, width, height=upper, trace=trace if trace >= 4 else 0),
        _lower(snap, width, max(free - upper, 3), tall),
        _foot(snap, width, foot, tall),
        Layout(panels.figures_line(snap, width), size=1),
    )


def column(*parts: Layout) -> Layout:
    layout = Layout()
    layout.split_column(*parts)
    return layout


def with_bar(body: RenderableType, bar: Text, height: int) -> Layout:
    return column(Layout(body, size=max(height - 1, 1)), Layout(bar, size=1))


def _upper(scene: Scene, snap: Snapshot, width: int, *, height: int, trace: int) -> Layout:
    """The states, below them the trace if it fits, and the drafts."""
    wide = width >= WIDE
    side = 46 if width >= VAST else 38 if wide else 28
    inner = width - side - 4
    states = panels.states_text(scene, snap, times=wide)
    title = f"states · visits{' · ms each' if wide else ''} ◦ open"
    if scene.drafter == "none":  # nothing is drafted
        drafts = panel(panels.trace_text(snap.moves, inner, height - 2), TRACE)
    else:
        trees = drafts_text(snap.trees, snap.branches, inner, height - 2)
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


def _lower(snap: Snapshot, width: int, height: int, tall: bool) -> Layout:
    """The texts of the branches; to the right several requests, if they fit."""
    many = len(snap.requests) > 1
    if not tall:  # a line instead of a frame: one more branch fits
        texts = panels.branches_text(snap.branches, many, width - 4, height - 1)
        start = "── branches "
        end = f" {panels.BRANCH_MARKS} ──"
        rule = "─" * (width - cell_len(start) - cell_len(end))
        head = Text.assemble((start + rule, "grey50"), (end, "grey62"), no_wrap=True)
        return Layout(Group(head, Padding(texts, (0, 0, 0, 2))), size=height)
    side = width * 2 // 5 if many and width >= VAST else 0
    texts = panels.branches_text(snap.branches, many, width - side - 4, height - 2)
    branches = panel(texts, "branches", panels.BRANCH_MARKS)
    if not side:
        return Layout(branches, size=height)
    lines = panels.requests_text(snap.requests, side - 4, height - 2)
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


# -- the keyboard ---------------------------------------------------------------------------------


class Keys:
    """Reads single keys, without Enter, while the context is open; then restores the terminal.
    available: whether the stream is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.available = False
        self._typed = ""

    def __enter__(self) -> Self:
        with suppress(OSError, ValueError, termios.error):
            self._number = self._stream.fileno()
            self._before = termios.tcgetattr(self._number)  # fails without a terminal
            tty.setcbreak(self._number)
            self.available = True
        return self

    def __exit__(self, *error: object) -> None:
        if self.available:
            termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)
            self.available = False

    def read(self, seconds: float) -> str:
        """The next key, by name or as a character; empty after `seconds` without a key."""
        if not self._typed and not self.available:
            sleep(max(seconds, 0.0))
        elif not self._typed and select.select([self._number], [], [], max(seconds, 0.0))[0]:
            piece = os.read(self._number, 64)
            self._typed = piece.decode("utf-8", "replace") or "q"  # the terminal is closed
        if not self._typed:
            return ""
        sent = next(filter(self._typed.startswith, KEY_NAMES), self._typed[0])
        rest = self._typed[len(sent) :]
        self._typed = "" if sent == "\x1b" else rest  # an unknown sequence
        return KEY_NAMES.get(sent, sent)


# -- the player ----------------------------------------------------------------------------------

MAX_SPEED = 1024.0
MIN_SPEED = 1 / 1024
HELP = ("space pause", "←→ step", "PgUp/PgDn round", "↑↓ speed", "Home/End", "q quit")
KEY_ALIASES = {  # for keyboards and terminals that lack a key
    **{"l": "right", "h": "left", "k": "up", "j": "down", "+": "up", "-": "down"},
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
        return key != "q"

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
        for words in HELP:
            if text.cell_len + len(words) + 12 > width:
                break
            text.append(f" · {words}", style="dim")
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
        while player.playing or keys.available:
            width, height = console.size
            position = (player.frame, player.playing, player.speed, console.size)
            if position != painted:
                snap = player.replay.snapshot(player.frame)
                body = frame(player.replay.scene, snap, width, height - 1)
                live.update(with_bar(body, player.bar(width), height), refresh=True)
                painted = position
            key = keys.read(1 / FRAMES)
            if key and not player.press(key):
                break
            now = monotonic()
            player.pass_time(now - last if not key else 0.0)
            last = now
