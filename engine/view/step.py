"""Stepping through a run: its halts and what it holds at them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType
from rich.layout import Layout
from rich.panel import Panel
from rich.text import Text

from ...ops.kv.pool import KVCache
from ...ops.kv.slots import SlotRun
from ...states.graph.program import Program
from ...states.machine import START, Run
from ...states.manager import BranchStateManager
from ...states.trace import Event, OpRan, describe
from ..record.recorder import Recorder
from ..record.run_view import DraftNode, DraftTree, Mark, Snapshot, shown
from ..text_stream import Pieces, printable
from .drafts import drafts_legend, tree_lines
from .keys import Keys
from .panels import LIT, color_of, cut, header_line, wrapped
from .tui import LiveView, frame

Sights = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BranchText:
    """All that a branch has written, and the text of its tokens that have no row yet."""

    name: str
    title: str
    stage: str
    text: str
    pending: str


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """A row of the target's last forward: whose, which node of a tree (0 the root, -1 none)."""

    name: str
    node: int
    text: str
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class ForwardView:
    """The rows of a forward that stand for something, and the slots that each attends to.

    sees_NK: for each row and each of `slots`, those that any row sees; the last `fresh` of them are
    the forward's own.
    """

    state: str
    number: int
    rows: tuple[ForwardRow, ...]
    slots: tuple[int, ...]
    sees_NK: Sights
    fresh: int


@dataclass(frozen=True, slots=True)
class RunLook:
    """A halted run. offered: trees that are not verified yet; forward: the last one."""

    texts: tuple[BranchText, ...]
    offered: tuple[DraftTree, ...]
    forward: ForwardView | None


class Inspector:
    """Remembers the last forward of a run; listens to its recorder."""

    def __init__(self, recorder: Recorder, run: Run) -> None:
        self.recorder = recorder
        self.run = run
        self._pieces = Pieces(recorder.decode)
        self._forward: ForwardView | None = None
        recorder.listeners.append(self)

    def __call__(self, event: Event) -> None:
        board = self.run.board
        if isinstance(event, OpRan) and "attention" in event.results and "rows" in board:
            began = perf_counter_ns()
            self._forward = self._read(event.state, board)
            self.recorder.waited(perf_counter_ns() - began)

    def look(self) -> RunLook:
        """What there is now."""
        board = self.run.board
        requests = board["branches"].requests
        branches = [b for one in requests for b in one.branches or one.all_branches()]
        texts = tuple(self._text(branch) for branch in branches)
        return RunLook(texts, tuple(self._offered(board)), self._forward)

    def _text(self, branch: Any) -> BranchText:
        decode = self.recorder.decode
        kept = branch.tokens[: branch.kept]
        whole = decode(branch.tokens)
        text = decode(kept)
        text = text if whole.startswith(text) else whole
        if branch.ended:
            text = whole
        facts = (branch.name, branch.title, str(branch.stage))
        return BranchText(*facts, text, whole[len(text) :])

    def _offered(self, board: Mapping[str, Any]) -> Iterator[DraftTree]:
        """The proposal on the blackboard."""
        proposal = board.get("proposal")
        if proposal is None:
            return
        names = ("tokens_SN", "parents_SN", "valid_SN")
        columns = [getattr(proposal, name).tolist() for name in names]
        for branch, *drafts in zip(board["branches"].active, *columns, strict=False):
            root = DraftNode(self._piece(branch.tokens[-1]), -1, Mark.ROOT)
            place = {-1: 0}
            nodes = [root]
            for at, (token, parent, valid) in enumerate(zip(*drafts, strict=True)):
                if valid:
                    place[at] = len(nodes)
                    nodes.append(DraftNode(self._piece(token), place[parent], Mark.OFFERED))
            request, _, name = branch.name.rpartition("/")
            count = len(nodes) - 1
            yield DraftTree(request, name, 0, branch.length, tuple(nodes), count, 0)

    def _piece(self, token: int) -> str:
        return shown(token, self._pieces)

    def _read(self, state: str, board: Mapping[str, Any]) -> ForwardView:
        rows = board["rows"]
        batch = board["batch"]
        valid = [] if board.get("proposal") is None else board["proposal"].valid_SN.tolist()
        whose = dict(_whose(rows, batch, valid, board["branches"]))
        flat = {n: getattr(rows, n).reshape(-1).tolist() for n in ("tokens_BQ", "positions_BQ")}
        slots_N = rows.slots_BQ.reshape(-1).tolist()
        sees = _sights(board["attention"], len(slots_N))
        order = sorted(whose)
        fresh = sorted({slots_N[row] for row in order})
        seen = {slot for row in order for slot in sees.get(row, ())}
        slots = [*sorted(seen - set(fresh)), *fresh]
        place = {slot: at for at, slot in enumerate(slots)}
        sees_NK = np.zeros((len(order), len(slots)), np.bool_)
        for at, row in enumerate(order):
            sees_NK[at, [place[slot] for slot in sees.get(row, ()) if slot in place]] = True
        views = (
            ForwardRow(
                *whose[row],
                self._piece(flat["tokens_BQ"][row]),
                flat["positions_BQ"][row],
                slots_N[row],
            )
            for row in order
        )
        number = self.recorder.meter.forwards + 1
        return ForwardView(state, number, tuple(views), tuple(slots), sees_NK, len(fresh))


def _whose(
    rows: Any, batch: Any, valid: list[list[bool]], table: Any
) -> Iterator[tuple[int, tuple[str, int]]]:
    """(row, (whose, node)) of the rows that stand for something."""
    for branch, nodes, good in zip(batch.ran, rows.nodes_ST.tolist(), valid, strict=False):
        for node in range(len(good), 0, -1):  # a node without a row has its root's
            if good[node - 1]:
                yield nodes[node], (branch.name, node)
        yield nodes[0], (branch.name, 0)
    names = {b.owner: b.name for one in table.requests for b in one.all_branches()}
    names |= {one.prefix_owner: f"{one.key}/prefix" for one in table.requests}
    for span, placed in zip(batch.spans, batch.placed.spans, strict=True):
        for row in np.asarray(placed.flat_Cn).reshape(-1).tolist():
            yield row, (names.get(span.owner, "?"), -1)


def _sights(attention: Any, count: int) -> dict[int, list[int]]:
    """The slots that each row of a forward attends to."""
    sees: dict[int, set[int]] = {}
    for group in attention.groups:
        keys = group.keys
        slots_GK = keys.slots_GK if isinstance(keys, SlotRun) else keys.cpu().numpy()
        mask_GqK = group.mask_GqK.cpu().numpy()
        for rows_q, slots_K, mask_qK in zip(group.host_rows_Gq, slots_GK, mask_GqK, strict=False):
            for row, mask_K in zip(rows_q.tolist(), mask_qK, strict=True):
                if row < count:
                    of_row = sees.setdefault(row, set())
                    of_row.update(slots_K[mask_K].tolist())
    return {row: sorted(slots) for row, slots in sees.items()}


# of the slots of a cell, how many a row attends to
ALL = "█"
SOME = "▒"
NONE = "·"
OWN = 48  # a forward's own slots that get a cell each
TEXT = 14  # cells of a token
ROWS = 400  # of a forward that are shown


class Page(NamedTuple):
    """A page and its name."""

    name: str
    lines: list[Text]


def pages(board: str, found: RunLook, trees: Sequence[DraftTree], width: int) -> list[Page]:
    """Blackboard, texts, trees, and rows with their positions and what they see.

    Args:
        board: what the blackboard holds, in lines. trees: of the last rounds.
    """
    lines = [Text(printable(line, ""), no_wrap=True) for line in board.split("\n")]
    return [
        Page("board", lines),
        Page("text", list(_text_lines(found, width))),
        Page("tree", list(_tree_lines(found, trees, width))),
        Page("rows", list(_row_lines(found.forward, width))),
    ]


def _text_lines(found: RunLook, width: int) -> Iterator[Text]:
    yield Text("⟨ ⟩ has no row in the cache yet", style="dim")
    for one in found.texts:
        style = f"bold {_color(one.name)}"
        title = printable(f"{one.name}  {one.title}", "")
        yield Text.assemble((title, style), (f"  {one.stage}", "dim"), no_wrap=True)
        whole = f"{printable(one.text)}⟨{printable(one.pending)}⟩" if one.pending else one.text
        for paragraph in printable(whole).split("\n"):
            for line in wrapped(paragraph.split(), max(width - 2, 8)):
                yield Text(f"  {line}", no_wrap=True)


def _tree_lines(found: RunLook, trees: Sequence[DraftTree], width: int) -> Iterator[Text]:
    parted = {one.name.rpartition("/")[0] for one in found.texts if "outline" not in one.name}
    current = [one for one in trees if one.name != "outline" or one.request not in parted]
    shown = found.offered or current
    if found.offered:
        yield Text("+ offered, not verified yet", style="dim")
    else:
        words = f"last rounds  {drafts_legend(99)}" if shown else "no drafts so far"
        yield Text(words, style="dim")
    for tree in shown:
        name = printable(f"{tree.request}/{tree.name}", "")
        counts = f"{tree.drafted} drafts" if found.offered else f"{tree.accepted}/{tree.drafted}"
        where = f"  {counts}, root at position {tree.position}"
        yield Text.assemble((name, f"bold {_color(name)}"), (where, "dim"), no_wrap=True)
        for line in tree_lines(tree, max(width - 2, 12), 99):
            yield Text("  ", no_wrap=True).append_text(line)


def _row_lines(view: ForwardView | None, width: int) -> Iterator[Text]:
    if view is None:
        yield Text("no forward so far", style="dim")
        return
    cached = len(view.slots) - view.fresh
    own = view.fresh
    names = min(max((cell_len(row.name) for row in view.rows), default=1), 14)
    head = f"{'of'.ljust(names)} node {'token'.ljust(TEXT)}  pos  slot  "
    own_cells = min(own, OWN, max(width - len(head) - 12, 4))
    cells = max(min(cached, width - len(head) - own_cells - 1), 0)
    scale = f"{ALL} all {SOME} some {NONE} none"
    if cells:
        scale += f" · {-(-cached // cells)} and {-(-own // own_cells)} slots per cell"
    yield Text(
        f"forward {view.number} in {view.state}: {len(view.rows)} rows see {cached} cached slots"
        f" and {own} of its own",
        no_wrap=True,
    )
    yield Text(scale, style="dim", no_wrap=True)
    yield Text(f"{head}{'cached'.ljust(cells)[:cells]} own", style="bold", no_wrap=True)
    for row, sees_K in zip(view.rows[:ROWS], view.sees_NK, strict=False):
        line = _row(row, names)
        line.append(_strip(sees_K[:cached], cells)).append(" ")
        yield line.append(_strip(sees_K[cached:], own_cells), style=_color(row.name))
    if hidden := len(view.rows) - ROWS:
        yield Text(f"… and {hidden} more" if hidden > 0 else "", style="dim")


def _row(row: ForwardRow, names: int) -> Text:
    node = "root" if row.node == 0 else str(row.node) if row.node > 0 else "-"
    token = set_cell_size(cut(printable(row.text, ""), TEXT), TEXT)
    name = set_cell_size(cut(printable(row.name, ""), names), names)
    return Text.assemble(
        (name, f"bold {_color(row.name)}"),
        (f" {node:>4} ", "dim"),
        token,
        (f" {row.position:>4} {row.slot:>5}  ", "dim"),
        no_wrap=True,
    )


def _strip(sees_K: np.ndarray, cells: int) -> str:
    """The slots in so many cells."""
    if not cells or not len(sees_K):
        return ""
    parts = np.array_split(sees_K, cells) if len(sees_K) > cells else sees_K[:, None]
    return "".join(ALL if part.all() else SOME if part.any() else NONE for part in parts)


def _color(name: str) -> str:
    number = name.rpartition("/")[2]
    return color_of(int(number) - 1 if number.isdigit() else -1)


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
