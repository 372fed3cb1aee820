"""What a halted run holds, page by page: lines for a live view's panel, and for plain output."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..record.drafts import DraftTree
from ..record.inspection import ForwardRow, ForwardView, RunLook
from ..record.text_stream import printable
from .tui_drafts import drafts_legend, tree_lines
from .tui_parts import color_of, cut, wrapped

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
