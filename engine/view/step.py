"""`--step` and `--break`: a run halts before a transition and shows what it holds, page by page.

Reading values waits for the device; the run's time excludes it.
"""

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
from ...states.machine import START, Event, OpRan, Run, describe
from ...states.manager import BranchStateManager
from ...states.request import Branch
from ..record.recorder import Recorder
from ..record.run_view import DraftNode, DraftTree, Mark, Snapshot, token_text, visible_branches
from ..text_stream import TokenTexts, printable
from .drafts import drafts_legend, tree_lines
from .keys import Keys
from .panels import LIT, color_of, cut, header_line, wrapped
from .tui import LiveView, frame

Visible = npt.NDArray[np.bool_]

# -- what a halted run holds ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BranchText:
    """The text of a branch in two parts; `pending`: of its tokens that have no row yet."""

    name: str
    title: str
    stage: str
    text: str
    pending: str


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """A row of the target's last forward; name: of its owner; node: 0 the root, -1 no tree node."""

    name: str
    node: int
    text: str
    position: int
    slot: int


@dataclass(frozen=True, slots=True)
class ForwardView:
    """The rows of a forward without padding, and the slots that each attends to.

    visible_NK: for each row and each of `slots`; the last `fresh` slots are the forward's own.
    """

    state: str
    number: int
    rows: tuple[ForwardRow, ...]
    slots: tuple[int, ...]
    visible_NK: Visible
    fresh: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A halted run. offered: trees that are not verified yet; forward: the last one."""

    texts: tuple[BranchText, ...]
    offered: tuple[DraftTree, ...]
    forward: ForwardView | None


class Inspector:
    """Retains the last forward of a run; listens to its recorder."""

    def __init__(self, recorder: Recorder, run: Run) -> None:
        self.recorder = recorder
        self.run = run
        self._texts = TokenTexts(recorder.decode)
        self._forward: ForwardView | None = None
        recorder.listeners.append(self)

    def __call__(self, event: Event) -> None:
        board = self.run.board
        if isinstance(event, OpRan) and "attention" in event.results and "rows" in board:
            start = perf_counter_ns()
            self._forward = self._read(event.state, board)
            self.recorder.exclude(perf_counter_ns() - start)

    def inspect(self) -> Inspection:
        """The present texts, offered trees and last forward."""
        board = self.run.board
        branches = visible_branches(board["branches"].requests)
        texts = tuple(self._branch_text(branch) for branch in branches)
        return Inspection(texts, tuple(self._offered(board)), self._forward)

    def _branch_text(self, branch: Branch) -> BranchText:
        decode = self.recorder.decode
        whole = decode(branch.tokens)
        text = decode(branch.tokens[: branch.num_cached_tokens])
        if branch.ended or not whole.startswith(text):
            text = whole
        return BranchText(
            name=branch.name,
            title=branch.title,
            stage=str(branch.stage),
            text=text,
            pending=whole[len(text) :],
        )

    def _offered(self, board: Mapping[str, Any]) -> Iterator[DraftTree]:
        """The trees of the proposal on the blackboard."""
        proposal = board.get("proposal")
        if proposal is None:
            return
        names = ("tokens_SN", "parents_SN", "valid_SN")
        columns = [getattr(proposal, name).tolist() for name in names]
        for branch, *drafts in zip(board["branches"].active, *columns, strict=False):
            place = {-1: 0}
            nodes = [DraftNode(self._text(branch.tokens[-1]), -1, Mark.ROOT)]
            for at, (token, parent, valid) in enumerate(zip(*drafts, strict=True)):
                if valid:
                    place[at] = len(nodes)
                    nodes.append(DraftNode(self._text(token), place[parent], Mark.OFFERED))
            request, _, name = branch.name.rpartition("/")
            yield DraftTree(
                request=request,
                name=name,
                round=0,
                position=branch.length,
                nodes=tuple(nodes),
                drafted=len(nodes) - 1,
                accepted=0,
            )

    def _text(self, token: int) -> str:
        return token_text(token, self._texts)

    def _read(self, state: str, board: Mapping[str, Any]) -> ForwardView:
        rows = board["rows"]
        proposal = board.get("proposal")
        valid = [] if proposal is None else proposal.valid_SN.tolist()
        owners = dict(_row_owners(rows, board["batch"], valid, board["branches"]))
        tokens = rows.tokens_BQ.reshape(-1).tolist()
        positions = rows.positions_BQ.reshape(-1).tolist()
        slots_N = rows.slots_BQ.reshape(-1).tolist()
        visible = _visible_slots(board["attention"], len(slots_N))
        order = sorted(owners)
        fresh = sorted({slots_N[row] for row in order})
        attended = {slot for row in order for slot in visible.get(row, ())}
        slots = [*sorted(attended - set(fresh)), *fresh]
        place = {slot: at for at, slot in enumerate(slots)}
        visible_NK = np.zeros((len(order), len(slots)), np.bool_)
        for at, row in enumerate(order):
            columns = [place[slot] for slot in visible.get(row, ()) if slot in place]
            visible_NK[at, columns] = True
        views = (
            ForwardRow(
                name=owners[row][0],
                node=owners[row][1],
                text=self._text(tokens[row]),
                position=positions[row],
                slot=slots_N[row],
            )
            for row in order
        )
        return ForwardView(
            state=state,
            number=self.recorder.meter.forwards + 1,
            rows=tuple(views),
            slots=tuple(slots),
            visible_NK=visible_NK,
            fresh=len(fresh),
        )


def _row_owners(
    rows: Any, batch: Any, valid: list[list[bool]], table: Any
) -> Iterator[tuple[int, tuple[str, int]]]:
    """(row, (name of its owner, node)) of the rows that are not padding."""
    for branch, nodes, valid_N in zip(batch.ran, rows.nodes_ST.tolist(), valid, strict=False):
        for node in range(len(valid_N), 0, -1):  # a node without a row has the row of its root
            if valid_N[node - 1]:
                yield nodes[node], (branch.name, node)
        yield nodes[0], (branch.name, 0)
    names = {b.owner: b.name for request in table.requests for b in request.all_branches()}
    names |= {request.prefix_owner: f"{request.key}/prefix" for request in table.requests}
    for span, placed in zip(batch.spans, batch.placed.spans, strict=True):
        for row in np.asarray(placed.flat_Cn).reshape(-1).tolist():
            yield row, (names.get(span.owner, "?"), -1)


def _visible_slots(attention: Any, count: int) -> dict[int, list[int]]:
    """The slots that each of `count` rows of a forward attends to."""
    visible: dict[int, set[int]] = {}
    for group in attention.groups:
        keys = group.keys
        slots_GK = keys.slots_GK if isinstance(keys, SlotRun) else keys.cpu().numpy()
        mask_GqK = group.mask_GqK.cpu().numpy()
        for rows_q, slots_K, mask_qK in zip(group.host_rows_Gq, slots_GK, mask_GqK, strict=False):
            for row, mask_K in zip(rows_q.tolist(), mask_qK, strict=True):
                if row < count:
                    visible.setdefault(row, set()).update(slots_K[mask_K].tolist())
    return {row: sorted(slots) for row, slots in visible.items()}


# -- pages ----------------------------------------------------------------------------------------

PAGES = ("board", "text", "tree", "rows")
# of the slots of a cell, the share that a row attends to
ALL = "█"
SOME = "▒"
NONE = "·"
MAX_FRESH_CELLS = 48  # for a forward's own slots
TOKEN_WIDTH = 14  # cells
MAX_NAME_WIDTH = 14  # cells
MAX_ROWS = 400  # of a forward
MAX_VALUE_LENGTH = 160  # characters of a blackboard value


class Page(NamedTuple):
    """A page and its name."""

    name: str
    lines: list[Text]


def pages(board: str, inspection: Inspection, trees: Sequence[DraftTree], width: int) -> list[Page]:
    """Blackboard, texts, trees, and rows with their positions and visible slots.

    Args:
        board: the blackboard in lines. trees: of the last rounds.
    """
    lines = [Text(printable(line, ""), no_wrap=True) for line in board.split("\n")]
    return [
        Page("board", lines),
        Page("text", list(_text_lines(inspection, width))),
        Page("tree", list(_tree_lines(inspection, trees, width))),
        Page("rows", list(_row_lines(inspection.forward, width))),
    ]


def open_ways(program: Program, run: Run) -> Iterator[tuple[str, str, bool]]:
    """(target, guard or '', whether the guard holds) of every transition of the current state.

    The first open one is the one that `advance` takes.
    """
    if run.state == START:
        yield program.graph.initial, "", True
    for edge in program.graph.edges_from(run.state):
        guard = program.guards[edge.when] if edge.when is not None else None
        is_open = guard is None or bool(guard.load()(*[run.board[key] for key in guard.reads]))
        yield edge.to, edge.when or "", is_open


def picture(program: Program, run: Run) -> str:
    """The state, its transitions, the blackboard's keys and shapes."""
    lines = [f"step {run.steps}  state {run.state}"]
    arrow = "=>"  # of the first open transition, which is the next one
    for target, guard, is_open in open_ways(program, run):
        mark = arrow if is_open else " x"
        arrow = " >" if is_open else arrow
        lines.append(f"  {mark} {target}{f'  when {guard}' if guard else ''}")
    width = max(map(len, run.board))
    lines += [f"     {key.ljust(width)}  {_short(value)}" for key, value in run.board.items()]
    return "\n".join(lines)


def _short(value: object) -> str:
    """One line about a value; of the manager and the pools, how full they are."""
    if isinstance(value, BranchStateManager):
        waiting = sum(b.waits for r in value.requests for b in r.branches)
        text = f"{len(value.requests)} requests, {len(value.active)} active, {waiting} waiting"
    elif isinstance(value, KVCache):
        text = f"{describe(value.data)}, {value.current_length}/{value.capacity} slots in use"
    else:
        text = describe(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[: MAX_VALUE_LENGTH - 3]}..."


def _text_lines(inspection: Inspection, width: int) -> Iterator[Text]:
    yield Text("⟨ ⟩ has no row in the cache yet", style="dim")
    for branch in inspection.texts:
        title = printable(f"{branch.name}  {branch.title}", "")
        style = f"bold {_color(branch.name)}"
        yield Text.assemble((title, style), (f"  {branch.stage}", "dim"), no_wrap=True)
        text = branch.text
        if branch.pending:
            text = f"{printable(text)}⟨{printable(branch.pending)}⟩"
        for paragraph in printable(text).split("\n"):
            for line in wrapped(paragraph.split(), max(width - 2, 8)):
                yield Text(f"  {line}", no_wrap=True)


def _tree_lines(inspection: Inspection, trees: Sequence[DraftTree], width: int) -> Iterator[Text]:
    parted = {b.name.rpartition("/")[0] for b in inspection.texts if "outline" not in b.name}
    current = [tree for tree in trees if tree.name != "outline" or tree.request not in parted]
    shown = inspection.offered or current
    if inspection.offered:
        yield Text("+ offered, not verified yet", style="dim")
    else:
        words = f"last rounds  {drafts_legend(99)}" if shown else "no drafts so far"
        yield Text(words, style="dim")
    for tree in shown:
        name = printable(f"{tree.request}/{tree.name}", "")
        counts = f"{tree.accepted}/{tree.drafted}"
        if inspection.offered:
            counts = f"{tree.drafted} drafts"
        where = f"  {counts}, root at position {tree.position}"
        yield Text.assemble((name, f"bold {_color(name)}"), (where, "dim"), no_wrap=True)
        for line in tree_lines(tree, max(width - 2, 12), 99):
            yield Text("  ", no_wrap=True).append_text(line)


def _row_lines(view: ForwardView | None, width: int) -> Iterator[Text]:
    if view is None:
        yield Text("no forward so far", style="dim")
        return
    fresh = view.fresh
    cached = len(view.slots) - fresh
    names = max((cell_len(row.name) for row in view.rows), default=1)
    names = min(names, MAX_NAME_WIDTH)
    head = f"{'of'.ljust(names)} node {'token'.ljust(TOKEN_WIDTH)}  pos  slot  "
    fresh_cells = min(fresh, MAX_FRESH_CELLS, max(width - len(head) - 12, 4))
    cells = max(min(cached, width - len(head) - fresh_cells - 1), 0)
    scale = f"{ALL} all {SOME} some {NONE} none"
    if cells:
        scale += f" · {-(-cached // cells)} and {-(-fresh // fresh_cells)} slots per cell"
    yield Text(
        f"forward {view.number} in {view.state}: {len(view.rows)} rows see {cached} cached slots"
        f" and {fresh} of its own",
        no_wrap=True,
    )
    yield Text(scale, style="dim", no_wrap=True)
    yield Text(f"{head}{'cached'.ljust(cells)[:cells]} own", style="bold", no_wrap=True)
    for row, visible_K in zip(view.rows[:MAX_ROWS], view.visible_NK, strict=False):
        line = _row(row, names)
        line.append(_strip(visible_K[:cached], cells)).append(" ")
        yield line.append(_strip(visible_K[cached:], fresh_cells), style=_color(row.name))
    if hidden := len(view.rows) - MAX_ROWS:
        yield Text(f"… and {hidden} more" if hidden > 0 else "", style="dim")


def _row(row: ForwardRow, names: int) -> Text:
    node = "root" if row.node == 0 else str(row.node) if row.node > 0 else "-"
    token = set_cell_size(cut(printable(row.text, ""), TOKEN_WIDTH), TOKEN_WIDTH)
    name = set_cell_size(cut(printable(row.name, ""), names), names)
    return Text.assemble(
        (name, f"bold {_color(row.name)}"),
        (f" {node:>4} ", "dim"),
        token,
        (f" {row.position:>4} {row.slot:>5}  ", "dim"),
        no_wrap=True,
    )


def _strip(visible_K: Visible, cells: int) -> str:
    """The visibility of slots in `cells` cells."""
    if not cells or not len(visible_K):
        return ""
    parts = np.array_split(visible_K, cells) if len(visible_K) > cells else visible_K[:, None]
    return "".join(ALL if part.all() else SOME if part.any() else NONE for part in parts)


def _color(name: str) -> str:
    number = name.rpartition("/")[2]
    return color_of(int(number) - 1 if number.isdigit() else -1)


# -- halts ----------------------------------------------------------------------------------------

HELP = "[Enter] one step, [c] to the end, [q] quit > "
HELP_BREAKS = "[Enter] one step, [c] to the next halt, [q] quit > "
POLL_SECONDS = 0.1  # between two checks of the stop signal
PLAIN_WIDTH = 100  # columns of pages in plain output


class Halts:
    """The transitions before which a run halts: all, or those out of some states.

    Attributes:
        free: the run continues to the next of these states, or to its end if there are none.
    """

    def __init__(self, states: Sequence[str]) -> None:
        self.states = frozenset(states)
        self.free = bool(states)

    def at(self, run: Run) -> bool:
        """Whether the run halts now."""
        return not self.free or run.state in self.states


class Stepper:
    """The pause of a stepped run in plain lines.

    A line of `source` is one answer; the end of `source` means continue. The name of a page
    prints it.
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
        """Whether the run continues."""
        if not self.halts.at(run):
            return True
        self.out(picture(self.program, run) + "\n")
        while True:
            self.out(HELP_BREAKS if self.halts.states else HELP)
            line = self.source.readline()
            answer = line.strip().lower()
            if answer in PAGES and self.inspector is not None:
                page = _pages(self.program, run, self.inspector, PLAIN_WIDTH)[PAGES.index(answer)]
                self.out("".join(f"{line.plain.rstrip()}\n" for line in page.lines))
            elif not line or answer in ("", "c", "q"):
                self.halts.free = not line or answer == "c"
                if not line:
                    self.halts.states = frozenset()
                return answer != "q"


def _pages(program: Program, run: Run, inspector: Inspector, width: int) -> list[Page]:
    """The pages of a run at its halt."""
    recorder = inspector.recorder
    recorder.take_snapshot()
    trees = recorder.snapshot.trees if recorder.snapshot is not None else ()
    return pages(picture(program, run), inspector.inspect(), trees, width)


class LiveStepper:
    """The pause of a stepped run inside the live view: keys turn pages and end the pause.

    Args:
        stopped: whether a stop signal has arrived.
    """

    def __init__(
        self,
        program: Program,
        view: LiveView,
        keys: Keys,
        *,
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
        self.page = 0  # 0 is the picture of the run
        self.first = 0  # number of the first visible line of a page
        self._pages: list[Page] = []
        self._where = ""
        view.paint = self.paint

    def __call__(self, run: Run) -> bool:
        """Whether the run continues."""
        if not self.halts.at(run):
            return True
        width = self.view.console.size.width - 4
        self._pages = _pages(self.program, run, self.inspector, width)
        ways = open_ways(self.program, run)
        target = next((name for name, _, is_open in ways if is_open), "?")
        self._where = f"step {run.steps} {run.state} → {target}"
        try:
            return self._wait()
        finally:
            self._where = ""

    def _wait(self) -> bool:
        self.first = 0
        while not self.stopped():
            self.view.refresh()
            key = self.keys.read(POLL_SECONDS)
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
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
        line = {"home": 0, "end": lines - 1}.get(key, self.first + steps.get(key, 0))
        self.first = min(max(line, 0), lines - 1)

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
        visible = max(height - 3, 1)
        first = min(self.first, max(len(page.lines) - visible, 0))
        lines = page.lines[first : first + visible]
        for line in lines:
            line.truncate(width - 4, overflow="ellipsis")
        panel = Panel(
            Text("\n", no_wrap=True).join(lines),
            title=page.name,
            title_align="left",
            subtitle=f"lines {first + 1}-{first + len(lines)} of {len(page.lines)}",
            subtitle_align="right",
            border_style="grey50",
            padding=(0, 1),
        )
        layout = Layout()
        head = header_line(self.view.scene, snap, width)
        layout.split_column(Layout(head, size=1), Layout(panel, size=max(height - 1, 3)))
        return layout

    def _bar(self, width: int) -> Text:
        """The place of the halt, and the keys."""
        if not self._where:
            return Text(" ▶  running", style="dim", no_wrap=True)
        text = Text.assemble((" ‖ ", LIT), (f" {self._where}", "bold"), no_wrap=True)
        more = "c next halt" if self.halts.states else "c to the end"
        names = [f"{at} {name}" for at, name in enumerate(("picture", *PAGES))]
        names[self.page] = f"[{names[self.page]}]"
        listed = " ".join(names)
        full = f"Enter step · {more} · {listed} · ↑↓ lines · q quit"
        for words in (full, f"Enter · c · {listed} · q"):
            if text.cell_len + len(words) + 3 <= width:
                break
        else:
            words = f"Enter · {more} · 0-{len(PAGES)} pages · ↑↓ · q"
        text.append(f" · {words}", style="dim")
        text.truncate(width, overflow="ellipsis")
        return text
