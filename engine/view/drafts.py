"""The panel of drafts: the last tree or chain of each branch, from left to right, the accepted path
first. Marks repeat what colours say."""

from collections.abc import Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from ..record.run_view import BranchView, DraftTree, Mark
from ..shell import printable
from .keys import MaybePages, place_line
from .panels import color_named, cut

DRAFT_MARKS = {  # a mark, its style, and its name in the legend
    Mark.ACCEPTED: ("✓", "bold green", "accepted"),
    Mark.REJECTED: ("✗", "red", "rejected"),
    Mark.BONUS: ("★", "bold yellow", "bonus"),
    Mark.TARGET: ("◆", "bold magenta", "own"),
    Mark.FORCED: ("!", "bold dodger_blue1", "forced"),
    Mark.UNREACHED: ("·", "grey50", "not reached"),
    Mark.OFFERED: ("+", "yellow", ""),
    Mark.ROOT: ("", "bold", ""),
}
LINE = "grey42"  # style of the lines between tokens
WIDTHS = (24, 16, 12, 10, 8, 7, 6, 5)  # of a column, from the widest
COUNTS_WIDTH = 6  # cells of `accepted/drafted`
MIN_TREE_WIDTH = 48  # cells of a tree before two are shown side by side
MAX_ROWS = 99  # lines of a tree


def drafts_text(
    trees: Sequence[DraftTree],
    branches: Sequence[BranchView],
    width: int,
    height: int,
    pages: MaybePages = None,
) -> Text:
    """The trees that fit; those of running branches first, in their order."""
    trees = without_outlines(trees, branches)
    if not trees:
        return Text("no drafts so far", style="dim")
    names = [(b.request, "outline" if b.index < 0 else str(b.index + 1)) for b in branches]
    live = {name for name, b in zip(names, branches, strict=True) if b.stage == "running"}

    def rank(tree: DraftTree) -> tuple[bool, int, int]:
        name = (tree.request, tree.name)
        return name not in live, [*names, name].index(name), -tree.round

    ranked = sorted(trees, key=rank)
    columns = min(max(width // MIN_TREE_WIDTH, 1), len(ranked))
    each = (width - 2 * (columns - 1)) // columns
    first = pages.window(len(ranked), columns * height) if pages else 0
    shown = ranked[first : first + columns * height]
    heads = _heads(shown, live, many=len({tree.request for tree in trees}) > 1)
    sides = [_column(heads[at::columns], shown[at::columns], each, height) for at in range(columns)]
    lines = []
    for row in zip_longest(*sides):
        parts = [part or Text() for part in row]
        for part in parts:
            part.truncate(each, overflow="ellipsis", pad=part is not parts[-1])
        lines.append(Text("  ", no_wrap=True).join(parts))
    if len(shown) < len(ranked):
        place = place_line("drafts", range(first, first + len(shown)), len(ranked), pages)
        if pages:
            lines[-1].truncate(max(width - len(place) - 2, 0))
        lines[-1].append(f"  {place}", style="dim")
    return Text("\n", no_wrap=True).join(lines)


def without_outlines(trees: Sequence[DraftTree], branches: Sequence[BranchView]) -> list[DraftTree]:
    """The trees but those of outlines of requests that have parts."""
    parted = {branch.request for branch in branches if branch.index >= 0}
    return [tree for tree in trees if tree.name != "outline" or tree.request not in parted]


def drafts_legend(width: int) -> str:
    text = ""
    for mark, _, name in DRAFT_MARKS.values():
        more = f"{' ' if text else ''}{mark} {name}"
        text += more if name and len(text) + len(more) <= width else ""
    return text


def _column(
    heads: Sequence[Text], trees: Sequence[DraftTree], width: int, height: int
) -> list[Text]:
    """Trees after their heads, one below the other; each gets the lines it needs, or its share."""
    tree_width = max(width - max(head.cell_len for head in heads), 12)
    needs = [
        len(_chain_lines(tree, tree_width, MAX_ROWS) if _is_chain(tree) else _leaves(tree))
        for tree in trees
    ]
    shares = [1 for _ in needs]
    while (free := height - sum(shares)) > 0:
        if not (short := [i for i, need in enumerate(needs) if shares[i] < need]):
            break
        for i in short[:free]:
            shares[i] += 1
    lines: list[Text] = []
    for head, tree, rows in zip(heads, trees, shares, strict=True):
        for at, line in enumerate(tree_lines(tree, tree_width, rows)):
            front = head if at == 0 else Text(" " * head.cell_len)
            lines.append(Text(no_wrap=True).append_text(front).append_text(line))
    return lines


def _heads(trees: Sequence[DraftTree], live: set[tuple[str, str]], many: bool) -> list[Text]:
    labels = []
    for tree in trees:
        name = tree.name if tree.name.isdigit() else tree.name[:1].upper()
        labels.append(f"{cut(printable(tree.request, ''), 6)}/{name}" if many else name)
    size = max(map(cell_len, labels)) + 1
    heads = []
    for tree, label in zip(trees, labels, strict=True):
        counts = f"{tree.accepted}/{tree.drafted}".ljust(COUNTS_WIDTH)
        style = f"bold {color_named(tree.name)}" if (tree.request, tree.name) in live else "dim"
        heads.append(Text.assemble((set_cell_size(label, size), style), (counts, "dim")))
    return heads


def tree_lines(tree: DraftTree, width: int, rows: int) -> list[Text]:
    """A tree in at most `rows` lines of `width` cells."""
    return _chain_lines(tree, width, rows) if _is_chain(tree) else _grid_lines(tree, width, rows)


def _is_chain(tree: DraftTree) -> bool:
    parents = [node.parent for node in tree.nodes if _is_draft(node.mark)]
    return len(set(parents)) == len(parents)


def _leaves(tree: DraftTree) -> list[int]:
    parents = {node.parent for node in tree.nodes}
    return [at for at in range(len(tree.nodes)) if at not in parents]


def _is_draft(mark: Mark) -> bool:
    return mark not in (Mark.ROOT, Mark.BONUS, Mark.TARGET)


def _label(tree: DraftTree, node: int) -> str:
    token = tree.nodes[node]
    return DRAFT_MARKS[token.mark][0] + printable(token.text, "")


def _chain_lines(tree: DraftTree, width: int, rows: int) -> list[Text]:
    """The accepted drafts, the final token, and after a gap the rejected drafts."""
    lines = [Text(no_wrap=True)]
    for node, token in enumerate(tree.nodes):
        label = cut(_label(tree, node), WIDTHS[0])
        rejected = token.mark is Mark.REJECTED
        connected = not rejected and token.mark is not Mark.UNREACHED
        link = "" if node == 0 else "─" if connected else "  " if rejected else " "
        if lines[-1].cell_len + len(link) + cell_len(label) > width - 1 and lines[-1].cell_len:
            if len(lines) == rows:
                lines[-1].append("…", style="dim")
                break
            lines.append(Text("  ", no_wrap=True))
        lines[-1].append(link, style=LINE).append(label, style=DRAFT_MARKS[token.mark][1])
    return lines


def _grid_lines(tree: DraftTree, width: int, rows: int) -> list[Text]:
    """Columns of equal depth; a first child is in the line of its parent."""
    leaves = _leaves(tree)
    drawn = _drawn_nodes(tree, leaves, rows)
    below: dict[int, list[int]] = {node: [] for node in drawn}
    depth = {0: 0}
    natural: list[int] = []  # widths of the columns
    for node in sorted(drawn):  # parents first
        if node:
            parent = tree.nodes[node].parent
            below[parent].append(node)
            depth[node] = depth[parent] + 1
        natural += [0] * (depth[node] + 1 - len(natural))
        natural[depth[node]] = max(natural[depth[node]], cell_len(_label(tree, node)))
    for most in WIDTHS:
        columns = [min(size, most) for size in natural]
        if sum(columns) + len(columns) - 1 <= width:
            break

    def block(node: int) -> list[Text]:
        size = columns[depth[node]]
        children = below[node]
        head = Text(cut(_label(tree, node), size), DRAFT_MARKS[tree.nodes[node].mark][1])
        filled = ("─" if children else " ") * (size - head.cell_len)
        lines: list[Text] = []
        for at, child in enumerate(children):
            last = at == len(children) - 1
            for number, line in enumerate(block(child)):
                link = " " if last else "│"
                if number == 0:
                    link = ("─" if last else "┬") if at == 0 else "└" if last else "├"
                front = " " * size if lines else Text.assemble(head, (filled, LINE))
                lines.append(Text.assemble(front, (link, LINE), line, no_wrap=True))
        return lines or [Text.assemble(head, filled, no_wrap=True)]

    lines = block(0)
    for line in lines:
        line.rstrip()
    if hidden := len(leaves) - len(lines):
        lines[-1].append(f"  +{hidden} more", style="dim")
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _drawn_nodes(tree: DraftTree, leaves: Sequence[int], rows: int) -> set[int]:
    """The nodes of the first `rows` paths: the accepted path, then rejected paths, then others."""
    tried: set[int] = set()

    def rank(leaf: int) -> int:
        node = leaf
        while tree.nodes[node].mark is Mark.UNREACHED:
            node = tree.nodes[node].parent
        first = node not in tried
        tried.add(node)
        return 0 if not _is_draft(tree.nodes[leaf].mark) else 1 if first else 2

    drawn: set[int] = set()
    for leaf in sorted(leaves, key=rank)[:rows]:
        while leaf >= 0 and leaf not in drawn:
            drawn.add(leaf)
            leaf = tree.nodes[leaf].parent
    return drawn
