"""Panels of the live view: states, trace, branches. Pure functions of the picture and the room."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..record.snapshot import BranchView, Move, Scene, Snapshot
from ..record.text_stream import printable

PALETTE = (
    *("cyan", "magenta", "green", "dodger_blue2"),
    *("orange1", "bright_red", "turquoise2", "violet"),
)
LIT = "bold #00240f on #3ddc84"  # not `black`: bold black is grey on many terminals
MARKS = {
    **{"running": "▶", "waiting": "·", "preempted": "‖"},
    **{"stop": "✓", "length": "✂", "refused": "✗", "failed": "✗"},
}
HALTED = "■"  # neither done nor going on
BRANCH_MARKS = f"▶ runs · waits ‖ preempted ✓ stop ✂ length ✗ refused {HALTED} halted"
STATE_WIDTH = 17
MOST = 6  # lines of one branch
RANKS = {
    "running": 0,
    "preempted": 1,
    "waiting": 1,
}  # what has ended comes last


def color_of(index: int) -> str:
    """The colour of a branch; -1 is the outline."""
    return "white" if index < 0 else PALETTE[index % len(PALETTE)]


# -- the state graph ------------------------------------------------------------------------------


def states_text(scene: Scene, snap: Snapshot, *, times: bool) -> Text:
    """The graph as a column of states: an arrow for the last transition, a mark for next ways."""
    ways = scene.ways.get(snap.state, ())
    arrow = _arrow(scene.states, snap.before, snap.state)
    lines = [
        _state_line(name, snap, arrow.get(name, "  "), name in ways, times) for name in scene.states
    ]
    return Text("\n").join(lines)


def _arrow(states: Sequence[str], source: str, target: str) -> Mapping[str, str]:
    """What stands in front of each state: a bent arrow from the last one to the present one."""
    if target not in states:
        return {}
    if source not in states or source == target:
        return {target: "↻▶" if source == target else "─▶"}
    first, last = sorted((states.index(source), states.index(target)))
    marks = dict.fromkeys(states[first + 1 : last], "│ ")
    down = states.index(source) < states.index(target)
    marks[source] = "╭╴" if down else "╰╴"
    marks[target] = "╰▶" if down else "╭▶"
    return marks


def _state_line(name: str, snap: Snapshot, arrow: str, reachable: bool, times: bool) -> Text:
    lit = name == snap.state
    visits = snap.meter.visits[name]
    style = LIT if lit else "" if visits or reachable else "dim"
    line = Text.assemble(
        (arrow, "bright_green"),
        ("◦" if reachable and not lit else " ", "green"),
        (set_cell_size(name, STATE_WIDTH), style),
        (f"{visits or '·':>4}", "bold" if visits else "dim"),
        no_wrap=True,
    )
    if times:
        each = snap.meter.nanos[name] / 1e6 / max(visits, 1)
        line.append(f"{each:>7.1f} ms" if visits else " " * 10, style="dim")
    return line


# -- the trace ------------------------------------------------------------------------------------


def trace_text(moves: Sequence[Move], width: int, height: int) -> Text:
    """The last transitions, newest at the bottom: from > to, guard, ms in `from`, tokens."""
    return Text("\n").join(_move_line(move, width) for move in moves[-height:])


def _move_line(move: Move, width: int) -> Text:
    tail = f"{move.millis:>6.1f} {f'+{move.committed}' if move.committed else '':>4}"
    guard = f" {move.guard}" if move.guard else ""
    way = ((move.source, "dim"), (" → ", "bright_green"), move.target, (guard, "italic yellow"))
    line = Text.assemble(*way, no_wrap=True)
    line.truncate(max(width - len(tail), 8), overflow="ellipsis", pad=True)
    return line.append(tail[:7], style="dim").append(tail[7:], style="bold cyan")


def last_move(snap: Snapshot, width: int) -> str:
    """The last transition in as many words as there is room for."""
    if not snap.moves:
        return ""
    move = snap.moves[-1]
    cost = f"{move.millis:.1f} ms" + (f" +{move.committed}" if move.committed else "")
    way = f"{move.source} → {move.target}"
    known = [f"{way} {move.guard}  {cost}"] if move.guard else []
    return next((one for one in (*known, f"{way}  {cost}", cost) if len(one) <= width), "")


# -- the branches ---------------------------------------------------------------------------------


def branches_text(branches: Sequence[BranchView], many: bool, width: int, height: int) -> Text:
    """One or more lines per branch, with the end of its text; `many` requests show their key."""
    room = height if len(branches) <= height else max(height - 1, 1)  # a line tells of the others
    ranked = sorted(range(len(branches)), key=lambda i: _rank(branches[i], i))
    shown = [branches[i] for i in sorted(ranked[:room])]
    rows = max(1, min(room // max(len(shown), 1), MOST))
    lines = [line for view in shown for line in _branch_lines(view, many, width, rows)]
    if hidden := len(branches) - len(shown):
        lines.append(Text(f"  … and {hidden} more", style="dim"))
    return Text("\n").join(lines)


def _rank(view: BranchView, index: int) -> tuple[int, int]:
    """Those that run come first, then those that wait, then the latest that ended."""
    if view.stage in RANKS:
        return RANKS[view.stage], index
    return len(RANKS), -index


def _branch_lines(view: BranchView, many: bool, width: int, rows: int) -> list[Text]:
    color = color_of(view.index)
    mark = MARKS.get(view.finish or view.stage, HALTED)
    name = "O" if view.index < 0 else str(view.index + 1)
    label = f"{view.request[:8]}/{name}" if many else name
    title_width = 16 if width < 90 else 24
    head = Text.assemble(
        (f"{mark} ", "bold green" if view.finish == "stop" else color),
        (f"{label:>2} ", f"bold {color}"),
        (cut(printable(view.title, ""), title_width).ljust(title_width), color),
        (f"{view.tokens:>4}/{view.budget:<4} ", "dim"),
        no_wrap=True,
    )
    indent = head.cell_len
    pieces = _tail(view.text, max(width - indent, 8), rows)
    style = "" if view.stage == "running" else "dim"
    lines = [head.append(pieces[0], style=style)]
    lines += [Text(" " * indent + piece, style=style, no_wrap=True) for piece in pieces[1:]]
    return lines


def cut(text: str, width: int) -> str:
    """A text in so many cells at most; what is shortened ends with an ellipsis."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def _tail(text: str, width: int, rows: int) -> list[str]:
    """A text in at most `rows` lines of `width` cells; of a longer one the end, lines full."""
    recent = printable(text[-4 * width * rows :], "\n\t").split()
    words = [set_cell_size(w, width) if cell_len(w) > width else w for w in recent]
    lines = wrapped(words, width)
    if len(lines) <= rows:
        return lines
    backwards = wrapped([word[::-1] for word in reversed(words)], width)[:rows]
    return [line[::-1] for line in reversed(backwards)]


def wrapped(words: Sequence[str], width: int) -> list[str]:
    """Words in lines of so many cells; at least one line."""
    lines = [""]
    for word in words:
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


# -- the title line -------------------------------------------------------------------------------


def header_line(scene: Scene, snap: Snapshot, width: int) -> Text:
    facts = f"  {scene.layout} · {scene.drafter} · {printable(scene.model, '')}"
    facts += f" · {scene.requests} requests" if scene.requests > 1 else ""
    parts = ((" specsot ", LIT), (f" {scene.graph}", "bold"), (facts, "dim"))
    left = Text.assemble(*parts, no_wrap=True)
    right = f"round {snap.meter.rounds}  {snap.seconds:5.1f} s "
    left.truncate(max(width - len(right), 8), overflow="ellipsis", pad=True)
    return left.append(right, style="bold")
