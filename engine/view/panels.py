"""Panels of the live view, as functions of a snapshot's parts and of the size in cells."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from ...ops.layer_plan import LayerStatus
from ...states.machine import Moved
from ...states.round import BlendSummary
from ...states.yaml.source import number_of
from ..record import run_view
from ..record.run_view import BranchView, Codes, PoolView, RequestView, Scene, Snapshot
from ..shell import printable
from .keys import MaybePages, place_line

Item = TypeVar("Item")
PALETTE = ["cyan", "magenta", "green", "dodger_blue2"]
PALETTE += ["orange1", "bright_red", "turquoise2", "violet"]
LIT = "bold #00240f on #3ddc84"  # not `black`: bold black is grey on many terminals
STAGE_MARKS = {
    **{"running": "▶", "waiting": "·", "preempted": "‖"},
    **{"stop": "✓", "length": "✂", "refused": "✗", "failed": "✗"},
}
HALTED = "■"  # of a branch that neither ended nor runs
BRANCH_MARKS = f"▶ runs · waits ‖ preempted ✓ stop ✂ length ✗ refused {HALTED} halted"
STATE_WIDTH = 17
MAX_LINES_PER_BRANCH = 6
ENDED = 2  # rank of what ended; what runs has rank 0


def color_of(index: int) -> str:
    """The colour of a branch; -1 is the outline."""
    return "white" if index < 0 else PALETTE[index % len(PALETTE)]


def color_named(name: str) -> str:
    """The colour of a branch by its name, `request/outline` or `request/1`."""
    number = name.rpartition("/")[2]
    return color_of(int(number) - 1 if number.isdigit() else -1)


def cut(text: str, width: int) -> str:
    """A text in at most `width` cells; a shortened text ends with an ellipsis."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def wrapped(words: Sequence[str], width: int) -> list[str]:
    """Words in lines of `width` cells; at least one line."""
    lines = [""]
    for word in words:
        joined = f"{lines[-1]} {word}".lstrip()
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    return lines


def _shown(
    items: Sequence[Item], ranks: Sequence[int], height: int, *, what: str, pages: MaybePages
) -> tuple[list[Item], list[Text]]:
    """The items that fit into `height` lines, by their ranks, and the line that says how many are
    hidden, if any are. Keys scroll to the others."""
    if len(items) <= height:
        return list(items), []
    visible = max(height - 1, 1)
    first = pages.window(len(items), visible) if pages else 0
    order = sorted(range(len(items)), key=lambda at: ranks[at])[first : first + visible]
    place = place_line(what, range(first, first + visible), len(items), pages)
    return [items[at] for at in order], [Text(f"  {place}", style="dim")]


def states_text(scene: Scene, snap: Snapshot, *, times: bool) -> Text:
    """The graph as a column of states: an arrow for the last transition, a mark for open ones."""
    ways = scene.ways.get(snap.state, ())
    before = snap.moves[-1][0].source if snap.moves else ""
    arrow = _arrow(scene.states, before, snap.state)
    lines = []
    for name in scene.states:
        lit = name == snap.state
        visits = snap.meter.visits[name]
        style = LIT if lit else "" if visits or name in ways else "dim"
        line = Text.assemble(
            (arrow.get(name, "  "), "bright_green"),
            ("◦" if name in ways and not lit else " ", "green"),
            (set_cell_size(name, STATE_WIDTH), style),
            (f"{visits or '·':>4}", "bold" if visits else "dim"),
            no_wrap=True,
        )
        if times:
            each = snap.meter.nanos[name] / 1e6 / max(visits, 1)
            line.append(f"{each:>7.1f} ms" if visits else " " * 10, style="dim")
        lines.append(line)
    return Text("\n").join(lines)


def _arrow(states: Sequence[str], source: str, target: str) -> Mapping[str, str]:
    """The characters before each state: a bent arrow from the previous state to the present one."""
    if target not in states:
        return {}
    if source not in states or source == target:
        return {target: "↻▶" if source == target else "─▶"}
    first, last = sorted((states.index(source), states.index(target)))
    marks = dict.fromkeys(states[first + 1 : last], "│ ")
    down = states[first] == source
    return {**marks, source: "╭╴" if down else "╰╴", target: "╰▶" if down else "╭▶"}


def trace_text(moves: Sequence[tuple[Moved, int]], width: int, height: int) -> Text:
    """The last transitions, newest at the bottom: from > to, guard, ms in `from`, tokens."""
    lines = []
    for move, committed in moves[-height:]:
        millis = f"{move.nanos / 1e6:>6.1f} "
        tokens = f"{f'+{committed}' if committed else '':>4}"
        guard = f" {move.guard}" if move.guard else ""
        line = Text.assemble((move.source, "dim"), (" → ", "bright_green"), move.target)
        line.append(guard, style="italic yellow")
        line.truncate(max(width - len(millis + tokens), 8), overflow="ellipsis", pad=True)
        lines.append(line.append(millis, style="dim").append(tokens, style="bold cyan"))
    return Text("\n", no_wrap=True).join(lines)


def last_move(snap: Snapshot, width: int) -> str:
    if not snap.moves:
        return ""
    move, committed = snap.moves[-1]
    cost = f"{move.nanos / 1e6:.1f} ms" + (f" +{committed}" if committed else "")
    states = f"{move.source} → {move.target}"
    texts = (f"{states} {move.guard or ''}".rstrip() + f"  {cost}", f"{states}  {cost}", cost)
    return next((text for text in texts if len(text) <= width), "")


# -- the branches ---------------------------------------------------------------------------------


def branches_text(
    branches: Sequence[BranchView], many: bool, width: int, height: int, pages: MaybePages = None
) -> Text:
    """Lines per branch, with the end of its text, running branches first; `many`: with the key."""
    ranks = {"running": 0, "preempted": 1, "waiting": 1}
    order = [ranks.get(b.stage, ENDED) for b in branches]
    shown, more = _shown(branches, order, height, what="branches", pages=pages)
    rows = max(1, min((height - len(more)) // max(len(shown), 1), MAX_LINES_PER_BRANCH))
    lines = [line for view in shown for line in _branch_lines(view, many, width, rows)]
    return Text("\n").join([*lines, *more])


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
    indent = " " * head.cell_len
    first, *others = _tail(view.text, max(width - len(indent), 8), rows)
    style = "" if view.stage == "running" else "dim"
    head.append(first, style=style)
    return [head, *(Text(indent + piece, style=style, no_wrap=True) for piece in others)]


def _tail(text: str, width: int, rows: int) -> list[str]:
    recent = printable(text[-4 * width * rows :], "\n\t").split()
    words = [set_cell_size(w, width) if cell_len(w) > width else w for w in recent]
    lines = wrapped(words, width)
    if len(lines) <= rows:
        return lines
    backwards = wrapped([word[::-1] for word in reversed(words)], width)[:rows]
    return [line[::-1] for line in reversed(backwards)]


def header_line(scene: Scene, snap: Snapshot, width: int, note: str = "") -> Text:
    facts = f"  {scene.layout} · {scene.drafter} · {printable(scene.model, '')}"
    facts += f" · {scene.requests} requests" if scene.requests > 1 else ""
    line = Text.assemble((" specsot ", LIT), (f" {scene.graph}", "bold"))
    line.append(note and f"  {note} ·", style="bold yellow").append(facts, style="dim")
    right = f"round {snap.meter.rounds}  {snap.seconds:5.1f} s "
    line.truncate(max(width - len(right) - 1, 7), overflow="ellipsis")
    line.truncate(max(width - len(right), 8), pad=True)
    return line.append(right, style="bold")


# -- requests -------------------------------------------------------------------------------------

REQUEST_MARKS = {  # a mark, its style, its name in the legend, and its rank
    "done": ("✓", "green", "done", ENDED),
    "running": ("▶", "cyan", "in parts", 0),
    "merging": ("▶", "cyan", "merging", 0),
    "outlining": ("O", "white", "in outlines", 0),
    "waiting": ("·", "grey50", "waiting", 1),
    "preempted": ("‖", "yellow", "preempted", 1),
    "refused": ("✗", "bold red", "refused", ENDED),
}
BAR_WIDTH = 8  # cells of a request's bar
NAME_WIDTH = 6  # cells of a request's name


def request_lines(requests: Sequence[RequestView], width: int, rows: int) -> Text:
    """A question in some lines, or a mark for each of many requests."""
    if len(requests) == 1:
        lines = question_lines(requests[0], width)
        if len(lines) > rows:
            lines[rows - 1 :] = [cut(f"{lines[rows - 1]} {lines[rows]}", width - 4)]
        text = Text(" ? ", style="bold green", no_wrap=True)
        return text.append("\n   ".join(lines), style="not bold default")
    stages = [_request_stage(request) for request in requests]
    done = stages.count("done")
    text = Text.assemble((f" {done}/{len(requests)} requests done ", "bold"), no_wrap=True)
    legend = "".join(
        f"  {mark} {stages.count(stage)} {name}"
        for stage, (mark, _, name, _) in REQUEST_MARKS.items()
        if stage != "done" and stage in stages
    )
    # As many marks as fit, those of running requests among them.
    count = max(width - text.cell_len - len(legend) - 1, 8)
    first = next((at for at, stage in enumerate(stages) if stage != "done"), 0)
    start = max(min(first - count // 4, len(stages) - count), 0)
    for stage in stages[start : start + count]:
        mark, style, *_ = REQUEST_MARKS[stage]
        text.append(mark, style=style)
    text.append(legend, style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


def question_lines(request: RequestView, width: int) -> list[str]:
    words = printable(request.question[: 20 * width], "\n\t").split()
    return wrapped(words, max(width - 4, 8))


def _request_stage(view: RequestView) -> str:
    stage = "refused" if view.refused else view.stage
    return stage if stage in REQUEST_MARKS else "waiting"


def requests_text(
    requests: Sequence[RequestView], width: int, height: int, pages: MaybePages = None
) -> Text:
    """A line per request, running ones first: mark, name, bar of its parts, tokens, question."""
    ranks = [REQUEST_MARKS[_request_stage(view)][3] for view in requests]
    shown, more = _shown(requests, ranks, height, what="requests", pages=pages)
    lines = []
    for view in shown:
        mark, style, *_ = REQUEST_MARKS[_request_stage(view)]
        filled = round(BAR_WIDTH * view.done / view.parts) if view.parts else 0
        parts = f"{view.done}/{view.parts}" if view.parts else ""
        line = Text.assemble(
            (f"{mark} ", style),
            (cut(printable(view.key, ""), NAME_WIDTH).ljust(NAME_WIDTH + 1), f"bold {style}"),
            ("━" * filled, style),
            ("─" * (BAR_WIDTH - filled), "grey37"),
            (f" {parts:>5} {view.tokens:>5} ", "dim"),
        )
        question = " ".join(printable(view.question[: 4 * width], "\n\t").split())
        lines.append(line.append(cut(question, max(width - line.cell_len, 1))))
    return Text("\n", no_wrap=True).join([*lines, *more])


# -- the sequence ---------------------------------------------------------------------------------

CELLS = {  # character, style and name; characters differ as well as colours
    run_view.PREFIX: ("█", "grey74", "prefix"),
    run_view.TREE: ("+", "#202020 on yellow", "tree"),
    run_view.OUTLINE: ("O", "#202020 on white", "outline"),
    run_view.PADDING: ("-", "grey37", "padding"),
    run_view.REUSED: ("▒", "dodger_blue2", "cached"),
    run_view.PICKED: ("*", "#202020 on orange1", "picked"),
    run_view.RETAINED: ("░", "grey50", "kept"),
    run_view.FREE: ("·", "grey37", "free"),
}


def strip_text(pool: PoolView, width: int, rows: int) -> tuple[Text, int]:
    """The target's pool as coloured cells, and the number of slots in a cell. Of one sequence the
    part in use is drawn, with some of the free slots after it; of a batch the rows in use, side by
    side if they are more than the lines."""
    text = Text(no_wrap=True)
    codes_RC = pool.codes.reshape(pool.rows, -1)
    codes_RC = codes_RC[codes_RC.any(1)]  # FREE is 0
    extent = int(np.flatnonzero(codes_RC.any(0)).max(initial=-1)) + 1
    per_line = max(1, -(-len(codes_RC) // rows)) if pool.rows > 1 else 1
    each = (width + 1) // per_line - 1
    if pool.rows > 1:
        step = max(1, -(-extent // each))
        lines = list(codes_RC)
    else:
        step = max(1, -(-min(extent + extent // 8 + 1, pool.codes.size) // (width * rows)))
        lines = [pool.codes[each * step * row :] for row in range(rows)]
    for number, codes in enumerate(lines):
        if number:
            text.append("\n" if number % per_line == 0 else " ")
        cells = downsample(codes[: each * step], step)
        if pool.rows > 1:
            cells = np.pad(cells, (0, each - cells.size))
        for run in np.split(cells, np.flatnonzero(np.diff(cells)) + 1):
            if run.size:  # equal neighbours share a style
                char, style = cell_of(int(run[0]))
                text.append(char * run.size, style=style)
    return text, step


def downsample(codes: Codes, step: int) -> Codes:
    """One code per `step` slots: the most frequent one, used before free."""
    present = np.unique(codes[codes != run_view.FREE])
    if step == 1 or not present.size:
        return codes[::step]
    groups = np.pad(codes, (0, -codes.size % step), constant_values=run_view.FREE)
    counts = np.stack([(groups.reshape(-1, step) == code).sum(1) for code in present])
    return np.where(counts.any(0), present[counts.argmax(0)], codes.dtype.type(run_view.FREE))


def cell_of(code: int) -> tuple[str, Style]:
    index = code - run_view.BRANCH
    branch = ("123456789"[index % 9], f"#101010 on {color_of(index)}", "")
    char, style, _ = CELLS.get(code, branch)
    return char, Style.parse(style)


def legend(codes: Codes) -> Text:
    """The meaning of the cells in use, free ones last."""
    text = Text(no_wrap=True)
    used = sorted(set(np.unique(codes).tolist()))
    for code in sorted(used, key=lambda code: code == run_view.FREE):
        char, style = cell_of(code)
        text.append(char, style=style)
        text.append(f" {CELLS[code][2]} " if code in CELLS else " ", style="dim")
    return text


STATUS_STYLES = {
    LayerStatus.DECODE: "#202020 on grey74",
    LayerStatus.FULL: "#101010 on cyan",
    LayerStatus.CHECK: "#202020 on orange1",
    LayerStatus.AFTER_CHECK: "#ffffff on dodger_blue2",
    LayerStatus.REUSE: "#ffffff on purple",
}


def layers_line(blend: BlendSummary, width: int) -> Text:
    """A cell for each layer of the last blended forward: its status, and the number of computed
    rows unless the model is deep."""
    text = Text("layers ", style="dim", no_wrap=True)
    counts = "/".join(map(str, blend.picked)) or "0"
    tail = f" cached {blend.reused} · picked {counts} · fresh {blend.suffix}"
    layers = list(zip(map(LayerStatus, blend.plan), blend.live, strict=True))
    deep = sum(len(str(live)) + 2 for _, live in layers) + 7 > width
    for status, live in layers:
        cell = status.name[0] if deep else f"{status.name[0]}{live}"
        text.append(cell, style=STATUS_STYLES[status]).append("" if deep else " ")
    if text.cell_len + len(tail) <= width:
        text.append(tail, style="dim")
    text.truncate(width)
    return text


# -- accepted lengths and figures -----------------------------------------------------------------

SHADES = " ▁▂▃▄▅▆▇█"


def histogram_line(lengths: Mapping[int, int], tau: float) -> Text:
    text = Text("accepted length ", style="dim", no_wrap=True)
    most = max(lengths.values(), default=0)
    for length in _span(lengths):
        count = lengths.get(length, 0)
        text.append(f" {length}", style="dim")
        text.append(SHADES[max(1, round(count / most * 8))] if count else " ", style="cyan")
    return text.append(f"  τ {tau:.2f}", style="bold")


def histogram_bars(lengths: Mapping[int, int], height: int, width: int) -> Text:
    """Accepted lengths as columns over their numbers; `height` without the line of numbers."""
    most = max(lengths.values(), default=1)
    span = _span(lengths)[: max(width // 3, 1)]
    text = Text(style="cyan", no_wrap=True)
    for row in range(height - 1, -1, -1):
        filled = (lengths.get(n, 0) / most * height - row for n in span)
        blocks = (SHADES[max(0, min(8, round(part * 8)))] for part in filled)
        text.append("".join(f" {block}{block}" for block in blocks) + "\n")
    return text.append("".join(f"{n:>3}" for n in span), style="dim")


def _span(lengths: Mapping[int, int]) -> range:
    return range(min([*lengths, 1]), max([*lengths, 4]) + 1)


def figures_line(snap: Snapshot, width: int) -> Text:
    """KV use, tokens per second, tokens per forward, preemptions, reused rows, acceptance, bytes;
    figures that do not fit are omitted."""
    pool = snap.pool
    meter = snap.meter
    speed = meter.tokens / snap.seconds if snap.seconds else 0.0
    parts = [
        ("KV ", f"{pool.used}/{pool.codes.size} {100 * pool.used / pool.codes.size:.0f} %"),
        ("", f"{speed:.0f} tok/s"),
        ("", f"{meter.per_forward:.2f} tok/forward"),
        ("preempted ", f"{meter.preempted}" if meter.preempted else ""),
        ("reused ", f"{pool.reused}" if pool.reused else ""),
        ("", number_of(meter.tokens, "token")),
        ("accept ", f"{100 * meter.acceptance_rate:.0f} %"),
        ("", f"{pool.bytes / 1e6:.1f} MB"),
        ("moved ", "" if pool.moved is None else f"{pool.moved / 1e6:.1f} MB"),
        ("draft KV ", f"{pool.draft_used}/{pool.draft_capacity}" if pool.draft_capacity else ""),
    ]
    text = Text(no_wrap=True)
    for name, value in parts:
        if not value:
            continue
        if text.cell_len + len(name) + len(value) + 3 > width:
            break
        text.append(" · " if text else "", style="dim")
        text.append(name, style="dim").append(value, style="bold")
    return text
