"""The replay player: a saved run on a terminal at any speed, or as plain lines without one."""

import io
from collections.abc import Callable, Iterator
from time import monotonic

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ..events import printable
from ..record.replay import Replay
from ..record.run_view import draft_tree
from ..record.trace import Record, trees_of
from .drafts import MAX_ROWS, tree_lines
from .panels import LIT
from .tui import FRAMES, Keys, frame, with_bar

MAX_SPEED = 1024.0
MIN_SPEED = 1 / 1024
HELP = ("space pause", "←→ step", "PgUp/PgDn round", "↑↓ speed", "Home/End", "q quit")
KEY_ALIASES = {  # for keyboards and terminals that lack a key
    **{"l": "right", "h": "left", "k": "up", "j": "down", "+": "up", "-": "down"},
    **{"]": "page down", "[": "page up", "n": "page down", "p": "page up", "g": "home", "G": "end"},
}


class Player:
    """Position and speed of a replay, without a terminal.

    Attributes:
        frame: the shown frame. at: nanoseconds of the run. speed: 1 is the speed of the run.
    """

    def __init__(self, replay: Replay, speed: float = 1.0) -> None:
        self.replay = replay
        self.speed = speed
        self.frame = 0
        self.at = float(replay.times[0])
        self.playing = True
        frames = (replay.records_of(at) for at in range(len(replay)))
        kinds = [{record["kind"] for record in records} for records in frames]
        self._rounds = [at for at, found in enumerate(kinds) if "round" in found]

    def pass_time(self, seconds: float) -> None:
        """Advance by seconds of the viewer's time."""
        if self.playing:
            self.at += seconds * 1e9 * self.speed
            self.frame = self.replay.frame_at(self.at)
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
        """The line below the picture: position, speed, keys."""
        count = len(self.replay)
        mark = "▶" if self.playing else "‖"
        end = self.replay.times[-1] / 1e9
        text = Text.assemble(
            (f" {mark} ", LIT),
            (f" {self.speed:g}x", "bold"),
            f"  step {self.frame + 1}/{count}",
            f"  {self.replay.times[self.frame] / 1e9:.2f}/{end:.2f} s ",
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

    def picture(self, width: int, height: int) -> RenderableType:
        """The run's picture with the bar below it."""
        snap = self.replay.snapshot(self.frame)
        body = frame(self.replay.scene, snap, width, height - 1)
        return with_bar(body, self.bar(width), height)


def play(player: Player, console: Console, keys: Keys) -> None:
    """Play until the quit key, or to the end without a keyboard."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        last = monotonic()
        painted = None
        while player.playing or keys.available:
            size = console.size
            position = (player.frame, player.playing, player.speed, size)
            if position != painted:
                live.update(player.picture(size.width, size.height), refresh=True)
                painted = position
            key = keys.read(1 / FRAMES)
            if key and not player.press(key):
                break
            now = monotonic()
            player.pass_time(now - last if not key else 0.0)
            last = now


def still(replay: Replay, number: int, width: int, height: int) -> Console:
    """A console with the picture after one frame, for export as text or SVG."""
    console = Console(
        record=True,
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        _environ={},
    )
    console.print(frame(replay.scene, replay.snapshot(number), width, height), height=height)
    return console


def replay_lines(replay: Replay, width: int = 100) -> Iterator[str]:
    """The transitions and rounds of a run, each draft with its mark, as plain lines."""
    scene = replay.scene
    yield f"{scene.graph} · {scene.layout} · {scene.drafter} · {printable(scene.model, '')}"
    for request in replay.requests:
        yield f"? [{printable(request.key, '')}] {printable(request.question, '')}"
    for record in (record for at in range(len(replay)) for record in replay.records_of(at)):
        if record["kind"] == "move":
            guard = f"  ({record['guard']})" if record["guard"] else ""
            yield f"{record['t'] / 1e9:8.3f} s  {record['from']} → {record['to']}{guard}"
        elif record["kind"] == "round":
            yield from _round_lines(record, replay.text_of, width)


def _round_lines(record: Record, text: Callable[[int], str], width: int) -> Iterator[str]:
    trees = {tree.branch: tree for tree in trees_of(record)}
    longest = max(map(len, record["branches"]), default=0)
    for name, count in zip(record["branches"], record["committed"], strict=True):
        shown = printable(name, "").ljust(longest)
        head = f"            round {record['round']}  {shown} +{count}"
        if name not in trees:
            yield head
            continue
        tree = draft_tree(record["round"], trees[name], text)
        front = head + f"  {tree.accepted}/{tree.drafted}".ljust(8)
        for line in tree_lines(tree, max(width - len(head) - 10, 30), MAX_ROWS):
            yield f"{front}{line.plain}".rstrip()
            front = " " * (len(head) + 8)
