"""`--step` and `--break`: halt before a transition and show where the run is and what it holds."""

from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.text import Text

from ...ops.kv.pool import KVCache
from ...states.graph.program import Program
from ...states.machine import START, Run
from ...states.manager import BranchStateManager
from ...states.trace import describe
from ..record.inspection import Inspector
from ..record.recorder import Recorder
from ..record.snapshot import Snapshot
from .keys import Keys
from .step_pages import Page, pages
from .tui import LiveView, frame
from .tui_parts import LIT, header_line

HELP = "[Enter] one step, [c] to the end, [q] quit > "
HELP_BREAKS = "[Enter] one step, [c] to the next halt, [q] quit > "
PAGES = ("board", "text", "tree", "rows")
LOOK = 0.1  # seconds between two looks at whether somebody wants to stop the run
LINES = 100  # columns of pages in plain output


def open_ways(program: Program, run: Run) -> Iterator[tuple[str, str, bool]]:
    """(target, guard or '', whether it is open now) of every transition out of the current state.

    The first open one is the one that `advance` takes.
    """
    if run.state == START:
        yield program.graph.initial, "", True
    for edge in program.graph.edges_from(run.state):
        guard = program.guards[edge.when] if edge.when is not None else None
        is_open = guard is None or bool(guard.load()(*[run.board[key] for key in guard.reads]))
        yield edge.to, edge.when or "", is_open


def picture(program: Program, run: Run) -> str:
    """The state, the ways out of it, the blackboard's keys and shapes."""
    lines = [f"step {run.steps}  state {run.state}"]
    arrow = "=>"  # of the first open way, which will be taken
    for target, guard, is_open in open_ways(program, run):
        mark = arrow if is_open else " x"
        arrow = " >" if is_open else arrow
        lines.append(f"  {mark} {target}{f'  when {guard}' if guard else ''}")
    width = max(map(len, run.board))
    lines += [f"     {key.ljust(width)}  {_short(value)}" for key, value in run.board.items()]
    return "\n".join(lines)


def _short(value: object, longest: int = 160) -> str:
    """One line about a value; the book and the pools say how full they are."""
    if isinstance(value, BranchStateManager):
        waiting = sum(b.waits for r in value.requests for b in r.branches)
        text = f"{len(value.requests)} requests, {len(value.active)} active, {waiting} waiting"
    elif isinstance(value, KVCache):
        text = f"{describe(value.data)}, {value.current_length}/{value.capacity} slots in use"
    else:
        text = describe(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


class Halts:
    """Where a run halts: before every transition, or in some states; until somebody lets it go.

    Attributes:
        free: whether it goes on to the next of these states, or to its end if there are none.
    """

    def __init__(self, states: Sequence[str]) -> None:
        self.states = frozenset(states)
        self.free = bool(states)

    def at(self, run: Run) -> bool:
        """Whether it halts now."""
        return not self.free or run.state in self.states


class Stepper:
    """The pause of a stepped run in plain lines.

    A line of `source` is one answer, its end means go on. What a page is called shows it.
    """

    def __init__(
        self,
        program: Program,
        source: TextIO,
        out: Callable[[str], None],
        halts: Halts | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        self.program = program
        self.source = source
        self.out = out
        self.halts = halts or Halts(())
        self.inspector = inspector

    def __call__(self, run: Run) -> bool:
        """Whether the run goes on."""
        if not self.halts.at(run):
            return True
        self.out(picture(self.program, run) + "\n")
        while True:
            self.out(HELP_BREAKS if self.halts.states else HELP)
            line = self.source.readline()
            answer = line.strip().lower()
            if answer in PAGES and self.inspector is not None:
                self._show(answer, run, self.inspector)
            elif not line or answer in ("", "c", "q"):
                self.halts.free = not line or answer == "c"
                if not line:
                    self.halts.states = frozenset()
                return answer != "q"

    def _show(self, name: str, run: Run, inspector: Inspector) -> None:
        recorder = inspector.recorder
        recorder.look()
        trees = recorder.snapshot.trees if recorder.snapshot is not None else ()
        found = pages(picture(self.program, run), inspector.look(), trees, LINES)
        lines = found[PAGES.index(name)].lines
        self.out("".join(f"{line.plain.rstrip()}\n" for line in lines))


class LiveStepper:
    """The pause of a stepped run inside the live view: keys turn pages and let it go on.

    Args:
        stopped: whether somebody wants to stop the run.
    """

    def __init__(
        self,
        program: Program,
        view: LiveView,
        keys: Keys,
        halts: Halts,
        inspector: Inspector,
        stopped: Callable[[], bool],
    ) -> None:
        self.program = program
        self.view = view
        self.keys = keys
        self.halts = halts
        self.inspector = inspector
        self.stopped = stopped
        # 0 is the picture of the run; the first line of a page
        self.page = 0
        self.first = 0
        self._pages: list[Page] = []
        self._where = ""
        view.paint = self.paint

    def __call__(self, run: Run) -> bool:
        """Whether the run goes on."""
        if not self.halts.at(run):
            return True
        recorder: Recorder = self.view.recorder
        recorder.look()
        trees = recorder.snapshot.trees if recorder.snapshot is not None else ()
        width = self.view.console.size.width - 4
        board = picture(self.program, run)
        ways = open_ways(self.program, run)
        target = next((name for name, _, is_open in ways if is_open), "?")
        self._pages = pages(board, self.inspector.look(), trees, width)
        self._where = f"step {run.steps} {run.state} → {target}"
        try:
            return self._wait()
        finally:
            self._where = ""

    def _wait(self) -> bool:
        self.first = 0
        while not self.stopped():
            self.view.refresh()
            key = self.keys.read(LOOK)
            if key in ("enter", "c", "q", " "):
                self.halts.free = key == "c"
                return key != "q"
            self._turn(key)
        return True

    def _turn(self, key: str) -> None:
        """Another page, or other lines of it."""
        count = len(self._pages) + 1
        if key.isdigit() and int(key) < count:
            self.page = int(key)
            self.first = 0
        elif key in ("tab", "right", "left"):
            self.page = (self.page + (-1 if key == "left" else 1)) % count
            self.first = 0
        lines = len(self._pages[self.page - 1].lines) if self.page else 1
        most = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
        moved = {"home": 0, "end": lines - 1}.get(key, self.first + most.get(key, 0))
        self.first = min(max(moved, 0), lines - 1)

    def paint(self, snap: Snapshot, width: int, height: int) -> RenderableType:
        """The picture of the run, or a page, with the line of keys below it."""
        layout = Layout()
        scene = self.view.scene
        body: RenderableType = frame(scene, snap, width, height - 1)
        if self.page and self._where:
            body = self._panel(snap, width, height - 1)
        layout.split_column(Layout(body, size=max(height - 1, 1)), Layout(self._bar(width), size=1))
        return layout

    def _panel(self, snap: Snapshot, width: int, height: int) -> Layout:
        page = self._pages[self.page - 1]
        room = max(height - 3, 1)
        first = min(self.first, max(len(page.lines) - room, 0))
        shown = page.lines[first : first + room]
        for line in shown:
            line.truncate(width - 4, overflow="ellipsis")
        more = f"lines {first + 1}-{first + len(shown)} of {len(page.lines)}"
        panel = Panel(
            Text("\n", no_wrap=True).join(shown),
            title=page.name,
            title_align="left",
            subtitle=more,
            subtitle_align="right",
            border_style="grey50",
            padding=(0, 1),
        )
        layout = Layout()
        head = header_line(self.view.scene, snap, width)
        layout.split_column(Layout(head, size=1), Layout(panel, size=max(height - 1, 3)))
        return layout

    def _bar(self, width: int) -> Text:
        """Where the run has halted, and what keys do."""
        if not self._where:
            return Text(" ▶  running", style="dim", no_wrap=True)
        text = Text.assemble((" ‖ ", LIT), (f" {self._where}", "bold"), no_wrap=True)
        on = "c next halt" if self.halts.states else "c to the end"
        names = [f"{at} {name}" for at, name in enumerate(("picture", *PAGES))]
        names[self.page] = f"[{names[self.page]}]"
        listed = " ".join(names)
        full = f"Enter step · {on} · {listed} · ↑↓ lines · q quit"
        for words in (full, f"Enter · c · {listed} · q"):
            if text.cell_len + len(words) + 3 <= width:
                break
        else:
            words = f"Enter · {on} · 0-{len(PAGES)} pages · ↑↓ · q"
        text.append(f" · {words}", style="dim")
        text.truncate(width, overflow="ellipsis")
        return text
