"""`--step` and `--break`: a run halts before a transition and shows its values, page by page."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ...ops.attention.metadata import SlotRun
from ...ops.kv.pool import KVCache
from ...states.graph.graph import Program
from ...states.machine import START, Event, OpRan, Run, describe
from ...states.manager import BranchStateManager
from ...states.round import VerifiedTree
from ...states.yaml.source import number_of
from ..record.recorder import Recorder
from ..record.run_view import DraftTree, draft_tree, visible_branches
from ..shell import printable
from .drafts import drafts_legend, tree_lines, without_outlines
from .keys import SCROLL, Key, Pages
from .panels import color_named, cut, wrapped
from .tui import LiveView

Visible = npt.NDArray[np.bool_]
Page = list[Text]
PAGES = {  # the first is the live view itself
    "picture": "the run as the live view shows it",
    "board": "the transitions that are open, and the values on the blackboard",
    "text": "the whole text of each branch",
    "tree": "the drafts that are offered, or those of the last rounds",
    "rows": "what each row of the last forward attends to",
}
STEP_KEYS = (
    Key("Enter", "step", "take one step; so does Space"),
    Key("c", "run", "run to the next pause, or to the end"),
    Key("q", "quit", "end the run and save what is finished"),
    Key("0-4 Tab", "", "turn to a page"),
    SCROLL,
)
# of the slots of a cell, the share that a row attends to
ALL = "█"
SOME = "▒"
NONE = "·"
MAX_FRESH_CELLS = 48  # for a forward's own slots
TOKEN_WIDTH = 14  # cells
MAX_NAME_WIDTH = 14  # cells
MAX_ROWS = 400  # of a forward
MAX_VALUE_LENGTH = 160  # characters of a blackboard value
POLL_SECONDS = 0.1  # between two checks of the stop signal
PLAIN_WIDTH = 100  # columns of pages in plain output


class ForwardRow(NamedTuple):
    """A row of the target's last forward; name: of its owner; node: 0 the root, -1 no tree node;
    visible_K: to which slots of the forward it attends."""

    name: str
    node: int
    text: str
    position: int
    slot: int
    visible_K: Visible


class ForwardView(NamedTuple):
    """The rows of a forward without padding, and the slots that they attend to; the last `fresh`
    slots are the forward's own."""

    state: str
    number: int
    rows: Sequence[ForwardRow]
    slots: Sequence[int]
    fresh: int


class Inspector:
    """Reads a halted run; listens to its recorder. forward: the last one, None before it."""

    def __init__(self, program: Program, recorder: Recorder, run: Run) -> None:
        self.program = program
        self.recorder = recorder
        self.run = run
        self.forward: ForwardView | None = None
        recorder.listeners.append(self)

    def __call__(self, event: Event) -> None:
        board = self.run.board
        if isinstance(event, OpRan) and "attention" in event.results and "rows" in board:
            start = perf_counter_ns()
            self.forward = self._read(event.state, board)
            self.recorder.exclude(perf_counter_ns() - start)

    def pages(self, width: int) -> dict[str, Page]:
        """Blackboard, texts, trees, and rows with their positions and visible slots."""
        self.recorder.take_snapshot()
        lines = printable(picture(self.program, self.run), "\n").split("\n")
        board = (Text(line, no_wrap=True) for line in lines)
        texts = ((), board, self._text_lines(width), self._tree_lines(width))
        pages = map(list, (*texts, _row_lines(self.forward, width)))
        return dict(zip(PAGES, pages, strict=True))

    def offered(self) -> Iterator[DraftTree]:
        """The trees of the proposal on the blackboard, which are not verified yet."""
        board = self.run.board
        proposal = board.get("proposal")
        if proposal is None:
            return
        tokens_SN = proposal.tokens_SN.where(proposal.valid_SN, -1).tolist()
        parents_SN = (proposal.parents_SN + 1).tolist()
        rows = zip(board["branches"].active, tokens_SN, parents_SN, strict=False)
        for branch, tokens, parents in rows:
            nodes: Any = {"tokens": (-1, *tokens), "parents": (0, *parents), "path": ()}
            place = (branch.name, branch.length, branch.tokens[-1])
            tree = VerifiedTree(*place, **nodes, final=-1, num_committed=0)
            yield draft_tree(0, tree, self.recorder.text_of)

    def _read(self, state: str, board: Mapping[str, Any]) -> ForwardView:
        rows = board["rows"]
        tokens = rows.tokens_BQ.reshape(-1).tolist()
        positions = rows.positions_BQ.reshape(-1).tolist()
        slots_N = rows.slots_BQ.reshape(-1).tolist()
        owners = dict(sorted(_row_owners(board)))
        visible = {row: set[int]() for row in owners}
        for group in board["attention"].groups:
            keys = group.keys
            slots_GK = keys.slots_GK if isinstance(keys, SlotRun) else keys.cpu().numpy()
            masks = zip(group.host_rows_Gq, slots_GK, group.mask_GqK.cpu().numpy(), strict=False)
            for rows_q, slots_K, mask_qK in masks:
                for row, mask_K in zip(rows_q.tolist(), mask_qK, strict=True):
                    if row in visible:
                        visible[row].update(slots_K[mask_K].tolist())
        fresh = sorted({slots_N[row] for row in visible})
        slots = [*sorted(set().union(*visible.values()) - set(fresh)), *fresh]
        views = []
        for n, (name, node) in owners.items():
            place: Any = {"position": positions[n], "slot": slots_N[n]}
            place["visible_K"] = np.isin(slots, list(visible[n]))
            text = self.recorder.text_of(tokens[n]) or f"<{tokens[n]}>"
            views.append(ForwardRow(name, node, text, **place))
        return ForwardView(state, self.recorder.meter.forwards + 1, views, slots, fresh=len(fresh))

    def _text_lines(self, width: int) -> Iterator[Text]:
        """The texts of the branches; the part without a cached row in angle brackets."""
        yield Text("⟨ ⟩ has no row in the cache yet", style="dim")
        decode = self.recorder.decode
        for branch in visible_branches(self.run.board["branches"].requests):
            title = printable(f"{branch.name}  {branch.title}", "")
            style = f"bold {color_named(branch.name)}"
            yield Text.assemble((title, style), (f"  {branch.stage}", "dim"), no_wrap=True)
            whole = decode(branch.tokens)
            cached = decode(branch.tokens[: branch.num_cached_tokens])
            text = printable(whole)
            if not branch.ended and whole.startswith(cached) and whole != cached:
                text = f"{printable(cached)}⟨{printable(whole[len(cached) :])}⟩"
            for paragraph in text.split("\n"):
                for line in wrapped(paragraph.split(), max(width - 2, 8)):
                    yield Text(f"  {line}", no_wrap=True)

    def _tree_lines(self, width: int) -> Iterator[Text]:
        """The offered trees, or those of the last rounds."""
        shown = list(self.offered())
        if offered := bool(shown):
            yield Text("+ offered, not verified yet", style="dim")
        else:
            snap = self.recorder.snapshot
            shown = [] if snap is None else without_outlines(snap.trees, snap.branches)
            words = f"last rounds  {drafts_legend(99)}" if shown else "no drafts so far"
            yield Text(words, style="dim")
        for tree in shown:
            name = printable(f"{tree.request}/{tree.name}", "")
            counts = f"{tree.drafted} drafts" if offered else f"{tree.accepted}/{tree.drafted}"
            where = f"  {counts}, root at position {tree.position}"
            yield Text.assemble((name, f"bold {color_named(name)}"), (where, "dim"), no_wrap=True)
            for line in tree_lines(tree, max(width - 2, 12), 99):
                yield Text("  ", no_wrap=True).append_text(line)


def _row_owners(board: Mapping[str, Any]) -> Iterator[tuple[int, tuple[str, int]]]:
    """(row, (name of its owner, node)) of the rows that are not padding."""
    batch = board["batch"]
    proposal = board.get("proposal")
    valid_SN = [] if proposal is None else proposal.valid_SN.tolist()
    nodes_ST = board["rows"].nodes_ST.tolist()
    for branch, nodes, valid_N in zip(batch.ran, nodes_ST, valid_SN, strict=False):
        for node in range(len(valid_N), 0, -1):  # a node without a row has the row of its root
            if valid_N[node - 1]:
                yield nodes[node], (branch.name, node)
        yield nodes[0], (branch.name, 0)
    requests = board["branches"].requests
    names = {b.owner: b.name for request in requests for b in request.all_branches()}
    names |= {request.prefix_owner: f"{request.key}/prefix" for request in requests}
    for span, placed in zip(batch.spans, batch.placed.spans, strict=True):
        for row in np.asarray(placed.flat_Cn).reshape(-1).tolist():
            yield row, (names.get(span.owner, "?"), -1)


def _row_lines(view: ForwardView | None, width: int) -> Iterator[Text]:
    """The rows of a forward, and what share of the slots of each cell they attend to."""
    if view is None:
        yield Text("no forward so far", style="dim")
        return
    fresh = view.fresh
    cached = len(view.slots) - fresh
    names = min(max((cell_len(row.name) for row in view.rows), default=1), MAX_NAME_WIDTH)
    head = f"{'of'.ljust(names)} node {'token'.ljust(TOKEN_WIDTH)}  pos  slot  "
    fresh_cells = min(fresh, MAX_FRESH_CELLS, max(width - len(head) - 12, 4))
    cells = max(min(cached, width - len(head) - fresh_cells - 1), 0)
    scale = f"{ALL} all {SOME} some {NONE} none"
    if cells:
        scale += f" · {-(-cached // cells)} and {-(-fresh // fresh_cells)} slots per cell"
    counts = f"{len(view.rows)} rows see {number_of(cached, 'cached slot')} and {fresh} of its own"
    yield Text(f"forward {view.number} in {view.state}: {counts}", no_wrap=True)
    yield Text(scale, style="dim", no_wrap=True)
    yield Text(f"{head}{'cached'.ljust(cells)[:cells]} own", style="bold", no_wrap=True)
    for row in view.rows[:MAX_ROWS]:
        node = "root" if row.node == 0 else str(row.node) if row.node > 0 else "-"
        color = color_named(row.name)
        yield Text.assemble(
            (_fitted(row.name, names), f"bold {color}"),
            (f" {node:>4} ", "dim"),
            _fitted(row.text, TOKEN_WIDTH),
            (f" {row.position:>4} {row.slot:>5}  ", "dim"),
            _strip(row.visible_K[:cached], cells),
            " ",
            (_strip(row.visible_K[cached:], fresh_cells), color),
            no_wrap=True,
        )
    if len(view.rows) > MAX_ROWS:
        yield Text(f"… and {len(view.rows) - MAX_ROWS} more", style="dim")


def _fitted(text: str, width: int) -> str:
    return set_cell_size(cut(printable(text, ""), width), width)


def _strip(visible_K: Visible, cells: int) -> str:
    if not cells or not len(visible_K):
        return ""
    parts = np.array_split(visible_K, cells) if len(visible_K) > cells else visible_K[:, None]
    return "".join(ALL if part.all() else SOME if part.any() else NONE for part in parts)


# -- the next transition and the blackboard -------------------------------------------------------


def open_ways(program: Program, run: Run) -> Iterator[tuple[str, str, bool]]:
    """(target, guard or '', whether the guard holds) of every transition of the current state; the
    first open one is the one that `advance` takes."""
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
    for key, value in run.board.items():
        text = describe(value)
        if isinstance(value, BranchStateManager):
            waiting = sum(b.waits for r in value.requests for b in r.branches)
            text = number_of(len(value.requests), "request")
            text += f", {len(value.active)} active, {waiting} waiting"
        elif isinstance(value, KVCache):
            text = f"{describe(value.data)}, {value.current_length}/{value.capacity} slots in use"
        if len(text) > MAX_VALUE_LENGTH:
            text = f"{text[: MAX_VALUE_LENGTH - 3]}..."
        lines.append(f"     {key.ljust(width)}  {text}")
    return "\n".join(lines)


# -- halts ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Stepper:
    """The pause of a stepped run: it halts before each transition, or before those out of `breaks`.
    free: the run continues to the next of these states, or to its end if there are none."""

    inspector: Inspector
    breaks: frozenset[str] = frozenset()
    free: bool = field(init=False)

    def __post_init__(self) -> None:
        self.free = bool(self.breaks)

    def __call__(self, run: Run) -> bool:
        """Whether the run continues."""
        return (self.free and run.state not in self.breaks) or self.halt(run)

    def halt(self, run: Run) -> bool:
        """Wait for an answer; False ends the run."""
        raise NotImplementedError


@dataclass(kw_only=True)
class PlainStepper(Stepper):
    """A stepper in plain lines: a line of `source` is an answer, or the name of a page to print.
    The end of `source` means continue."""

    source: TextIO
    out: Callable[[str], None]

    def halt(self, run: Run) -> bool:
        self.out(picture(self.inspector.program, run) + "\n")
        end = "the next halt" if self.breaks else "the end"
        while True:
            self.out(f"[Enter] one step, [c] to {end}, [q] quit > ")
            line = self.source.readline()
            answer = line.strip().lower()
            if answer in PAGES:
                page = self.inspector.pages(PLAIN_WIDTH)[answer]
                self.out("".join(f"{text.plain.rstrip()}\n" for text in page))
            elif not line or answer in ("", "c", "q"):
                self.free = not line or answer == "c"
                if not line:
                    self.breaks = frozenset()
                return answer != "q"


@dataclass(kw_only=True)
class LiveStepper(Stepper):
    """A stepper inside the live view, whose keys turn pages and end the pause. stopped: whether a
    stop signal has arrived."""

    view: LiveView
    stopped: Callable[[], bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.view.pages = Pages(STEP_KEYS, PAGES)

    def halt(self, run: Run) -> bool:
        pages = self.view.pages
        ways = open_ways(self.inspector.program, run)
        target = next((name for name, _, is_open in ways if is_open), "?")
        pages.note = f"‖ step {run.steps} {run.state} → {target}"
        pages.texts = self.inspector.pages(self.view.console.size.width - 4)
        pages.first = 0
        try:
            while not self.stopped():
                self.view.refresh()
                key = self.view.read(POLL_SECONDS)
                if key in ("enter", "c", "q", " "):
                    self.free = key == "c"
                    return key != "q"
            return True
        finally:
            pages.note = ""
            pages.texts = {}
