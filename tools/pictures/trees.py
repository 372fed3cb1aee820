"""One round of one branch: the tree that was proposed, and what the target made of it."""

from specsot.states.round import VerifiedTree

from .svg import Picture

LEFT, STEP, ROW, HIGH = 16.0, 118.0, 34.0, 24.0
VERDICTS = (
    ("yes", "accepted"),
    ("no", "rejected"),
    ("free", "not reached"),
    ("bonus", "the target's"),
)


def tree_picture(title: str, one: VerifiedTree, names: dict[int, str]) -> Picture:
    """Above the proposal, below the verdict. names: the text of each token id of the round."""
    picture = Picture(title)
    rows = _rows(one)
    for judged in (False, True):
        y = picture.height + 30
        picture.text(LEFT, y, "after verification" if judged else "proposed by the drafter", "s")
        _tree(picture, one, names, rows, y + 12, judged)
    y = picture.height + 16
    for number, (kind, text) in enumerate(VERDICTS):
        picture.box(LEFT + number * 112, y, 12, 12, kind)
        picture.text(LEFT + number * 112 + 17, y + 10, text, "s")
    return picture


def _rows(one: VerifiedTree) -> dict[int, float]:
    """In which row each node stands, children beside and below their parent; 0 is the root."""
    rows: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for node in one.drafts:
        children.setdefault(one.parents[node], []).append(node)

    def place(node: int, row: float) -> float:
        rows[node] = row
        for number, child in enumerate(children.get(node, ())):
            row = place(child, row if number == 0 else row + 1)
        return row

    place(0, 0)
    return rows


def _tree(
    picture: Picture,
    one: VerifiedTree,
    names: dict[int, str],
    rows: dict[int, float],
    top: float,
    judged: bool,
) -> None:
    def box(depth: int, row: float, text: str, kind: str) -> None:
        x, y = LEFT + depth * STEP, top + row * ROW
        picture.box(x, y, STEP - 26, HIGH, "box", 5)
        picture.box(x, y, 6, HIGH, kind, 2)
        picture.text(x + 12, y + 16, text, "m")

    depths = one.depths
    for node in one.drafts:
        x, y = LEFT + depths[node] * STEP, top + rows[node] * ROW + HIGH / 2
        above = top + rows[one.parents[node]] * ROW + HIGH / 2
        picture.path(f"M{x - 26:g} {above:g}C{x - 12:g} {above:g} {x - 14:g} {y:g} {x:g} {y:g}")
    box(0, 0, names[one.root], "shared")
    for node in one.drafts:
        verdict = "yes" if node in one.path else "no" if one.reached(node) else "free"
        kind = verdict if judged else "b0"
        box(depths[node], rows[node], names[one.tokens[node]], kind)
    if judged:
        last = one.path[-1]
        deepest = max((depths[node] for node in one.drafts), default=0)
        row = max(rows.values()) + 1 if depths[last] < deepest else rows[last]
        x, y = LEFT + (depths[last] + 1) * STEP, top + row * ROW + HIGH / 2
        start, above = LEFT + depths[last] * STEP + STEP - 26, top + rows[last] * ROW + HIGH / 2
        picture.path(
            f"M{start:g} {above:g}C{start + 20:g} {above:g} {x - 24:g} {y:g} {x:g} {y:g}", "line"
        )
        box(depths[last] + 1, row, names[one.final], "bonus")
