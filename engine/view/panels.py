"""Panels of the live view: states, trace, branches, requests, sequence, figures.

Pure functions of a snapshot's parts and of the width and height in cells.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from ...ops.layer_plan import LayerStatus
from ...states.round import BlendSummary
from ..record.run_view import (
    BRANCH,
    FREE,
    OUTLINE,
    PADDING,
    PICKED,
    PREFIX,
    RETAINED,
    REUSED,
    TREE,
    BranchView,
    Codes,
    Move,
    PoolView,
    RequestView,
    Scene,
    Snapshot,
)
from ..text_stream import printable

PALETTE = (
    *("cyan", "magenta", "green", "dodger_blue2"),
    *("orange1", "bright_red", "turquoise2", "violet"),
)
LIT = "bold #00240f on #3ddc84"  # not `black`: bold black is grey on many terminals
STAGE_MARKS = {
    **{"running": "▶", "waiting": "·", "preempted": "‖"},
    **{"stop": "✓", "length": "✂", "refused": "✗", "failed": "✗"},
}
HALTED = "■"  # of a branch that neither ended nor runs
BRANCH_MARKS = f"▶ runs · waits ‖ preempted ✓ stop ✂ length ✗ refused {HALTED} halted"
STATE_WIDTH = 17
MAX_LINES_PER_BRANCH = 6
RANKS = {
    "running": 0,
    "preempted": 1,
    "waiting": 1,
}  # ended branches are last


def color_of(index: int) -> str:
    """The colour of a branch; -1 is the outline."""
    return "white" if index < 0 else PALETTE[index % len(PALETTE)]


# -- the state graph ------------------------------------------------------------------------------


def states_text(scene: Scene, snap: Snapshot, *, times: bool) -> Text:
    """The graph as a column of states: an arrow for the last transition, a mark for open ones."""
    ways = scene.ways.get(snap.state, ())
    arrow = _arrow(scene.states, snap.before, snap.state)
    lines = [
        _state_line(name, snap, arrow.get(name, "  "), name in ways, times) for name in scene.states
    ]
    return Text("\n").join(lines)


def _arrow(states: Sequence[str], source: str, target: str) -> Mapping[str, str]:
    """The characters before each state: a bent arrow from the previous state to the present one."""
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
    parts = ((move.source, "dim"), (" → ", "bright_green"), move.target, (guard, "italic yellow"))
    line = Text.assemble(*parts, no_wrap=True)
    line.truncate(max(width - len(tail), 8), overflow="ellipsis", pad=True)
    return line.append(tail[:7], style="dim").append(tail[7:], style="bold cyan")


def last_move(snap: Snapshot, width: int) -> str:
    """The last transition in as many words as fit."""
    if not snap.moves:
        return ""
    move = snap.moves[-1]
    cost = f"{move.millis:.1f} ms" + (f" +{move.committed}" if move.committed else "")
    states = f"{move.source} → {move.target}"
    texts = [f"{states} {move.guard}  {cost}"] if move.guard else []
    texts += [f"{states}  {cost}", cost]
    return next((text for text in texts if len(text) <= width), "")


# -- the branches ---------------------------------------------------------------------------------


def branches_text(branches: Sequence[BranchView], many: bool, width: int, height: int) -> Text:
    """One or more lines per branch, with the end of its text; `many` requests show their key."""
    # The last line says how many branches are hidden.
    visible = height if len(branches) <= height else max(height - 1, 1)
    ranked = sorted(range(len(branches)), key=lambda i: _rank(branches[i], i))
    shown = [branches[i] for i in sorted(ranked[:visible])]
    rows = max(1, min(visible // max(len(shown), 1), MAX_LINES_PER_BRANCH))
    lines = [line for view in shown for line in _branch_lines(view, many, width, rows)]
    if hidden := len(branches) - len(shown):
        lines.append(Text(f"  … and {hidden} more", style="dim"))
    return Text("\n").join(lines)


def _rank(view: BranchView, index: int) -> tuple[int, int]:
    """Running branches first, then waiting ones, then the latest that ended."""
    if view.stage in RANKS:
        return RANKS[view.stage], index
    return len(RANKS), -index


def _branch_lines(view: BranchView, many: bool, width: int, rows: int) -> list[Text]:
    color = color_of(view.index)
    mark = STAGE_MARKS.get(view.finish or view.stage, HALTED)
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
    """A text in at most `width` cells; a shortened text ends with an ellipsis."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def _tail(text: str, width: int, rows: int) -> list[str]:
    """A text in at most `rows` lines of `width` cells; of a longer text the end, in full lines."""
    recent = printable(text[-4 * width * rows :], "\n\t").split()
    words = [set_cell_size(w, width) if cell_len(w) > width else w for w in recent]
    lines = wrapped(words, width)
    if len(lines) <= rows:
        return lines
    backwards = wrapped([word[::-1] for word in reversed(words)], width)[:rows]
    return [line[::-1] for line in reversed(backwards)]


def wrapped(words: Sequence[str], width: int) -> list[str]:
    """Words in lines of `width` cells; at least one line."""
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
    line = Text.assemble(*parts, no_wrap=True)
    right = f"round {snap.meter.rounds}  {snap.seconds:5.1f} s "
    line.truncate(max(width - len(right), 8), overflow="ellipsis", pad=True)
    return line.append(right, style="bold")


REQUEST_MARKS = {  # a mark, its style, and its name in the legend
    "done": ("✓", "green", "done"),
    "running": ("▶", "cyan", "in parts"),
    "merging": ("▶", "cyan", "merging"),
    "outlining": ("O", "white", "in outlines"),
    "waiting": ("·", "grey50", "waiting"),
    "preempted": ("‖", "yellow", "preempted"),
    "refused": ("✗", "bold red", "refused"),
}
BAR_WIDTH = 8  # cells of a request's bar
NAME_WIDTH = 6  # cells of a request's name


def request_lines(requests: Sequence[RequestView], width: int, rows: int) -> Text:
    """A question in some lines, or a mark for each of many requests."""
    if len(requests) == 1:
        return _question_text(requests[0].question, width, rows)
    stages = [_request_stage(request) for request in requests]
    counts = {name: stages.count(name) for name in REQUEST_MARKS}
    text = Text.assemble(
        (f" {counts['done']}/{len(requests)} requests done ", "bold"), no_wrap=True
    )
    others = [name for name in REQUEST_MARKS if name != "done" and counts[name]]
    legend = "".join(
        f"  {REQUEST_MARKS[name][0]} {counts[name]} {REQUEST_MARKS[name][2]}" for name in others
    )
    for stage in _around_running(stages, max(width - text.cell_len - len(legend) - 1, 8)):
        mark, style, _ = REQUEST_MARKS[stage]
        text.append(mark, style=style)
    text.append(legend, style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


def lines_of_question(question: str, width: int) -> int:
    """The number of lines of a question."""
    return len(_question_lines(question, width))


def _question_text(question: str, width: int, rows: int) -> Text:
    lines = _question_lines(question, width)
    if len(lines) > rows:
        lines = [*lines[: rows - 1], cut(f"{lines[rows - 1]} {lines[rows]}", width - 4)]
    text = Text(" ? ", style="bold green", no_wrap=True)
    return text.append("\n   ".join(lines), style="not bold default")


def _question_lines(question: str, width: int) -> list[str]:
    return wrapped(printable(question[: 20 * width], "\n\t").split(), max(width - 4, 8))


def _request_stage(view: RequestView) -> str:
    if view.refused:
        return "refused"
    return view.stage if view.stage in REQUEST_MARKS else "waiting"


def _around_running(stages: Sequence[str], count: int) -> Sequence[str]:
    """As many stages as fit, the running ones among them."""
    first = next((at for at, stage in enumerate(stages) if stage != "done"), 0)
    start = max(min(first - count // 4, len(stages) - count), 0)
    return stages[start : start + count]


# -- a line for each ------------------------------------------------------------------------------


def requests_text(requests: Sequence[RequestView], width: int, height: int) -> Text:
    """A line per request, running ones first: mark, name, bar of its parts, tokens, question."""
    ranks = {
        "running": 0,
        "merging": 0,
        "outlining": 0,
        "waiting": 1,
        "preempted": 1,
        "refused": 2,
        "done": 2,
    }

    def rank(at: int) -> tuple[int, int]:
        place = ranks[_request_stage(requests[at])]
        return place, -at if place == 2 else at

    visible = height if len(requests) <= height else max(height - 1, 1)
    chosen = sorted(sorted(range(len(requests)), key=rank)[:visible])
    lines = [_request_line(requests[at], width) for at in chosen]
    if hidden := len(requests) - len(chosen):
        lines.append(Text(f"  … and {hidden} more", style="dim"))
    return Text("\n", no_wrap=True).join(lines)


def _request_line(view: RequestView, width: int) -> Text:
    mark, style, _ = REQUEST_MARKS[_request_stage(view)]
    filled = round(BAR_WIDTH * view.done / view.parts) if view.parts else 0
    parts = f"{view.done}/{view.parts}" if view.parts else ""
    line = Text.assemble(
        (f"{mark} ", style),
        (cut(printable(view.key, ""), NAME_WIDTH).ljust(NAME_WIDTH + 1), f"bold {style}"),
        ("━" * filled, style),
        ("─" * (BAR_WIDTH - filled), "grey37"),
        (f" {parts:>5} {view.tokens:>5} ", "dim"),
        no_wrap=True,
    )
    question = " ".join(printable(view.question[: 4 * width], "\n\t").split())
    return line.append(cut(question, max(width - line.cell_len, 1)))


SHADES = " ▁▂▃▄▅▆▇█"
CELLS = {  # character, style and name; characters differ as well as colours
    PREFIX: ("█", "grey74", "prefix"),
    TREE: ("+", "#202020 on yellow", "tree"),
    OUTLINE: ("O", "#202020 on white", "outline"),
    PADDING: ("-", "grey37", "padding"),
    REUSED: ("▒", "dodger_blue2", "cached"),
    PICKED: ("*", "#202020 on orange1", "picked"),
    RETAINED: ("░", "grey50", "kept"),
    FREE: ("·", "grey37", "free"),
}

# -- the sequence ---------------------------------------------------------------------------------


def strip_text(pool: PoolView, width: int, rows: int) -> tuple[Text, int]:
    """The target's pool as coloured cells, and the number of slots in a cell.

    Only the part in use is drawn, with some of the free slots after it.
    """
    if pool.rows > 1:
        return _batch_text(pool, width, rows)
    cells = width * rows
    extent = int(np.flatnonzero(pool.codes).max(initial=-1)) + 1
    step = max(1, -(-min(extent + extent // 8 + 1, pool.capacity) // cells))
    codes = downsample(pool.codes[: cells * step], step)
    lines = [_cells_text(codes[row * width : (row + 1) * width]) for row in range(rows)]
    return Text("\n", no_wrap=True).join(lines), step


def _batch_text(pool: PoolView, width: int, lines: int) -> tuple[Text, int]:
    """The rows of a batch in use, side by side if they are more than the lines."""
    codes_RC = pool.codes.reshape(pool.rows, -1)
    codes_RC = codes_RC[codes_RC.any(1)]  # FREE is 0
    per_line = max(1, -(-len(codes_RC) // lines))
    each = (width + 1) // per_line - 1
    extent = int(np.flatnonzero(codes_RC.any(0)).max(initial=-1)) + 1
    step = max(1, -(-extent // each))
    text = Text(no_wrap=True)
    for number, codes in enumerate(codes_RC):
        if number:
            text.append("\n" if number % per_line == 0 else " ")
        cells = downsample(codes[: each * step], step)
        text.append_text(_cells_text(np.pad(cells, (0, each - cells.size))))
    return text, step


def downsample(codes: Codes, step: int) -> Codes:
    """One code per `step` slots: the most frequent one, used before free."""
    present = np.unique(codes[codes != FREE])
    if step == 1 or not present.size:
        return codes[::step]
    groups = np.pad(codes, (0, -codes.size % step), constant_values=FREE).reshape(-1, step)
    counts = np.stack([(groups == code).sum(1) for code in present])
    return np.where(counts.any(0), present[counts.argmax(0)], codes.dtype.type(FREE))


def _cells_text(codes: Codes) -> Text:
    """A cell per code; equal neighbours share a style."""
    text = Text(no_wrap=True)
    for run in np.split(codes, np.flatnonzero(np.diff(codes)) + 1):
        if run.size:
            char, style = cell_of(int(run[0]))
            text.append(char * run.size, style=style)
    return text


def cell_of(code: int) -> tuple[str, Style]:
    """Character and style of one cell."""
    index = code - BRANCH
    branch = ("123456789"[index % 9], f"#101010 on {color_of(index)}", "")
    char, style, _ = CELLS.get(code, branch)
    return char, Style.parse(style)


def legend(codes: Codes) -> Text:
    """The meaning of the cells in use, free ones last."""
    text = Text(no_wrap=True)
    for code in sorted(set(np.unique(codes).tolist()), key=lambda code: (code == FREE, code)):
        char, style = cell_of(code)
        text.append(char, style=style)
        text.append(f" {CELLS[code][2]} " if code in CELLS else " ", style="dim")
    return text


# -- cached rows ----------------------------------------------------------------------------------

STATUS_STYLES = {
    LayerStatus.DECODE: "#202020 on grey74",
    LayerStatus.FULL: "#101010 on cyan",
    LayerStatus.CHECK: "#202020 on orange1",
    LayerStatus.AFTER_CHECK: "#ffffff on dodger_blue2",
    LayerStatus.REUSE: "#ffffff on purple",
}


def layers_line(blend: BlendSummary, width: int) -> Text:
    """A cell for each layer of the last blended forward: its status and number of computed rows."""
    text = Text("layers ", style="dim", no_wrap=True)
    counts = "/".join(map(str, blend.picked)) or "0"
    tail = f" cached {blend.reused} · picked {counts} · fresh {blend.suffix}"
    cells = [
        (f"{LayerStatus(status).name[0]}{live}", STATUS_STYLES[LayerStatus(status)])
        for status, live in zip(blend.plan, blend.live, strict=True)
    ]
    if sum(len(cell) + 1 for cell, _ in cells) + 7 > width:  # deep models: the letters alone
        cells = [(cell[0], style) for cell, style in cells]
    for cell, style in cells:
        text.append(cell, style=style)
        text.append(" " if len(cell) > 1 else "")
    if text.cell_len + len(tail) <= width:
        text.append(tail, style="dim")
    text.truncate(width)
    return text


# -- accepted lengths and figures -----------------------------------------------------------------


def histogram_line(lengths: Mapping[int, int], tau: float) -> Text:
    """Accepted lengths in one line."""
    text = Text("accepted length ", style="dim", no_wrap=True)
    most = max(lengths.values(), default=0)
    for length in _span(lengths):
        count = lengths.get(length, 0)
        text.append(f" {length}", style="dim")
        text.append(SHADES[max(1, round(count / most * 8))] if count else " ", style="cyan")
    return text.append(f"  τ {tau:.2f}", style="bold")


def histogram_bars(lengths: Mapping[int, int], height: int, width: int) -> Text:
    """Accepted lengths as columns over their numbers; `height` without the line of numbers."""
    most = max(lengths.values(), default=0)
    span = list(_span(lengths))[: max(width // 3, 1)]
    lines = []
    for row in range(height - 1, -1, -1):
        filled = [lengths.get(n, 0) / most * height - row if most else 0.0 for n in span]
        blocks = (SHADES[max(0, min(8, round(part * 8)))] for part in filled)
        lines.append("".join(f" {block}{block}" for block in blocks))
    text = Text("\n".join(lines), style="cyan", no_wrap=True)
    return text.append("\n" + "".join(f"{n:>3}" for n in span), style="dim")


def _span(lengths: Mapping[int, int]) -> Iterable[int]:
    low = min(lengths, default=1)
    return range(min(low, 1), max(max(lengths, default=0), 4) + 1)


def figures_line(snap: Snapshot, width: int) -> Text:
    """KV use, tokens per second, tokens per forward, preemptions, reused rows, acceptance, bytes;
    figures that do not fit are omitted."""
    pool = snap.pool
    meter = snap.meter
    speed = meter.tokens / snap.seconds if snap.seconds else 0.0
    share = 100 * pool.used / pool.capacity
    parts = [
        ("KV ", f"{pool.used}/{pool.capacity} {share:.0f} %"),
        ("", f"{speed:.0f} tok/s"),
        ("", f"{meter.per_forward:.2f} tok/forward"),
        *((("preempted ", f"{meter.preempted}"),) if meter.preempted else ()),
        *((("reused ", f"{pool.reused}"),) if pool.reused else ()),
        ("", f"{meter.tokens} tokens"),
        ("accept ", f"{100 * meter.acceptance_rate:.0f} %"),
        ("", f"{pool.bytes / 1e6:.1f} MB"),
    ]
    if pool.moved is not None:
        parts.append(("moved ", f"{pool.moved / 1e6:.1f} MB"))
    if pool.draft_capacity:
        parts.append(("draft KV ", f"{pool.draft_used}/{pool.draft_capacity}"))
    text = Text(no_wrap=True)
    for i, (name, value) in enumerate(parts):
        if text.cell_len + len(name) + len(value) + 3 > width:
            break
        text.append(" · " if i else "", style="dim")
        text.append(name, style="dim").append(value, style="bold")
    return text
