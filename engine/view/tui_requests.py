"""What was asked: the question of a run with one request, the progress of a run with many."""

from collections.abc import Sequence

from rich.text import Text

from ..record.snapshot import RequestView
from ..record.text_stream import printable
from .tui_parts import cut, wrapped

MARKS = {  # a mark, its style, and its name in the legend
    "done": ("✓", "green", "done"),
    "running": ("▶", "cyan", "in parts"),
    "merging": ("▶", "cyan", "merging"),
    "outlining": ("O", "white", "in outlines"),
    "waiting": ("·", "grey50", "waiting"),
    "preempted": ("‖", "yellow", "preempted"),
    "refused": ("✗", "bold red", "refused"),
}
BAR = 8  # cells of a request's bar
LONGEST = 6  # cells of a request's name


def asked_lines(requests: Sequence[RequestView], width: int, rows: int) -> Text:
    """A question in some lines, or a mark for each of many requests."""
    if len(requests) == 1:
        return _question(requests[0].question, width, rows)
    counts = {name: sum(_state(one) == name for one in requests) for name in MARKS}
    text = Text.assemble(
        (f" {counts['done']}/{len(requests)} requests done ", "bold"), no_wrap=True
    )
    others = [name for name in MARKS if name != "done" and counts[name]]
    known = "".join(f"  {MARKS[name][0]} {counts[name]} {MARKS[name][2]}" for name in others)
    room = width - text.cell_len - len(known) - 1
    for one in _around(requests, max(room, 8)):
        mark, style, _ = MARKS[_state(one)]
        text.append(mark, style=style)
    text.append(known, style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


def lines_of_question(question: str, width: int) -> int:
    """Lines that a question takes."""
    return len(_in_lines(question, width))


def _question(question: str, width: int, rows: int) -> Text:
    lines = _in_lines(question, width)
    if len(lines) > rows:
        lines = [*lines[: rows - 1], cut(f"{lines[rows - 1]} {lines[rows]}", width - 4)]
    text = Text(" ? ", style="bold green", no_wrap=True)
    return text.append("\n   ".join(lines), style="not bold default")


def _in_lines(question: str, width: int) -> list[str]:
    return wrapped(printable(question[: 20 * width], "\n\t").split(), max(width - 4, 8))


def _state(one: RequestView) -> str:
    return "refused" if one.refused else one.stage if one.stage in MARKS else "waiting"


def _around(requests: Sequence[RequestView], room: int) -> Sequence[RequestView]:
    """As many as fit, those that run among them."""
    first = next((at for at, one in enumerate(requests) if _state(one) != "done"), 0)
    start = max(min(first - room // 4, len(requests) - room), 0)
    return requests[start : start + room]


# -- a line for each ------------------------------------------------------------------------------


def requests_text(requests: Sequence[RequestView], width: int, height: int) -> Text:
    """A line per request: mark, name, bar of its parts, tokens, question. Those that run first."""
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
        place = ranks[_state(requests[at])]
        return place, -at if place == 2 else at

    room = height if len(requests) <= height else max(height - 1, 1)
    chosen = sorted(sorted(range(len(requests)), key=rank)[:room])
    lines = [_line(requests[at], width) for at in chosen]
    if hidden := len(requests) - len(chosen):
        lines.append(Text(f"  … and {hidden} more", style="dim"))
    return Text("\n", no_wrap=True).join(lines)


def _line(one: RequestView, width: int) -> Text:
    mark, style, _ = MARKS[_state(one)]
    filled = round(BAR * one.done / one.parts) if one.parts else 0
    parts = f"{one.done}/{one.parts}" if one.parts else ""
    line = Text.assemble(
        (f"{mark} ", style),
        (cut(printable(one.key, ""), LONGEST).ljust(LONGEST + 1), f"bold {style}"),
        ("━" * filled, style),
        ("─" * (BAR - filled), "grey37"),
        (f" {parts:>5} {one.tokens:>5} ", "dim"),
        no_wrap=True,
    )
    question = " ".join(printable(one.question[: 4 * width], "\n\t").split())
    return line.append(cut(question, max(width - line.cell_len, 1)))
