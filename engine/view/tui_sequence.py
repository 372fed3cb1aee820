"""Panels of the live view: the sequence as a strip, accepted lengths, the line of figures."""

from collections.abc import Iterable, Mapping

import numpy as np
from rich.style import Style
from rich.text import Text

from ...ops.layer_plan import LayerStatus
from ...states.blend import BlendSummary
from ..record.snapshot import (
    BRANCH,
    FREE,
    KEPT,
    OUTLINE,
    PADDING,
    PICKED,
    PREFIX,
    REUSED,
    TREE,
    Codes,
    PoolView,
    Snapshot,
)
from .tui_parts import color_of

SHADES = " ▁▂▃▄▅▆▇█"
CELLS = {  # character, style and name; characters differ too, for eyes that see no colours
    PREFIX: ("█", "grey74", "prefix"),
    TREE: ("+", "#202020 on yellow", "tree"),
    OUTLINE: ("O", "#202020 on white", "outline"),
    PADDING: ("-", "grey37", "padding"),
    REUSED: ("▒", "dodger_blue2", "cached"),
    PICKED: ("*", "#202020 on orange1", "picked"),
    KEPT: ("░", "grey50", "kept"),
    FREE: ("·", "grey37", "free"),
}

# -- the sequence ---------------------------------------------------------------------------------


def strip_text(pool: PoolView, width: int, rows: int) -> tuple[Text, int]:
    """The target's pool as coloured cells, and how many slots one cell stands for.

    Only the part in use is drawn, with some of the free slots behind it.
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
    """The rows of a batch that hold something, side by side if there are more than lines."""
    codes_RC = pool.codes.reshape(pool.rows, -1)
    codes_RC = codes_RC[codes_RC.any(1)]  # FREE is 0
    beside = max(1, -(-len(codes_RC) // lines))  # rows in a line
    each = (width + 1) // beside - 1
    extent = int(np.flatnonzero(codes_RC.any(0)).max(initial=-1)) + 1
    step = max(1, -(-extent // each))
    text = Text(no_wrap=True)
    for number, codes in enumerate(codes_RC):
        if number:
            text.append("\n" if number % beside == 0 else " ")
        cells = downsample(codes[: each * step], step)
        text.append_text(_cells_text(np.pad(cells, (0, each - cells.size))))
    return text, step


def downsample(codes: Codes, step: int) -> Codes:
    """One code per `step` slots: what most of them hold, used before free."""
    present = np.unique(codes[codes != FREE])
    if step == 1 or not present.size:
        return codes[::step]
    groups = np.pad(codes, (0, -codes.size % step), constant_values=FREE).reshape(-1, step)
    counts = np.stack([(groups == code).sum(1) for code in present])
    return np.where(counts.any(0), present[counts.argmax(0)], codes.dtype.type(FREE))


def _cells_text(codes: Codes) -> Text:
    """A cell per code; equal ones beside each other have one style."""
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
    """What the cells mean; only those that are there, free ones last."""
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
    """A cell for each layer of the last blended forward: its status, the rows that it computed."""
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
    """KV use, tokens per second, tokens per forward, acceptance, and how often somebody made way or
    rows were there already; what has no room is left out."""
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
