"""One round of one branch: the tree that was proposed, and what the target made of it."""

from specsot.states.round import ExplainedRound

from .svg import Picture

LEFT, STEP, ROW, HIGH = 16.0, 118.0, 34.0, 24.0
VERDICTS = (
    ("yes", "accepted"),
    ("no", "rejected"),
    ("free", "not reached"),
    ("bonus", "the target's"),
)


def tree_picture(title: str, one: ExplainedRound, names: dict[int, str]) -> Picture:
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


def _rows(one: ExplainedRound) -> dict[int, float]:
    """In which row each node stands, children beside and below their parent; 0 is the root."""
    rows: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for draft in one.drafts:
        children.setdefault(draft.parent, []).append(draft.node)

    def place(node: int, row: float) -> float:
        rows[node] = row
        for number, child in enumerate(children.get(node, ())):
            row = place(child, row if number == 0 else row + 1)
        return row

    place(0, 0)
    return rows


def _tree(
    picture: Picture,
    one: ExplainedRound,
    names: dict[int, str],
    rows: dict[int, float],
    top: float,
    judged: bool,
) -> None:
    def node(depth: int, row: float, text: str, kind: str) -> None:
        x, y = LEFT + depth * STEP, top + row * ROW
        picture.box(x, y, STEP - 26, HIGH, "box", 5)
        picture.box(x, y, 6, HIGH, kind, 2)
        picture.text(x + 12, y + 16, text, "m")

    depths = {0: 0} | {draft.node: draft.depth for draft in one.drafts}
    for draft in one.drafts:
        x, y = LEFT + draft.depth * STEP, top + rows[draft.node] * ROW + HIGH / 2
        above = top + rows[draft.parent] * ROW + HIGH / 2
        picture.path(f"M{x - 26:g} {above:g}C{x - 12:g} {above:g} {x - 14:g} {y:g} {x:g} {y:g}")
    node(0, 0, names[one.root], "shared")
    for draft in one.drafts:
        verdict = "yes" if draft.accepted else "no" if draft.reached else "free"
        node(draft.depth, rows[draft.node], names[draft.token], verdict if judged else "b0")
    if judged:
        path = [draft.node for draft in one.drafts if draft.accepted]
        last = max(path, key=lambda one: depths[one], default=0)
        row = max(rows.values()) + 1 if depths[last] < max(depths.values()) else rows[last]
        x, y = LEFT + (depths[last] + 1) * STEP, top + row * ROW + HIGH / 2
        start, above = LEFT + depths[last] * STEP + STEP - 26, top + rows[last] * ROW + HIGH / 2
        picture.path(
            f"M{start:g} {above:g}C{start + 20:g} {above:g} {x - 24:g} {y:g} {x:g} {y:g}", "line"
        )
        node(depths[last] + 1, row, names[one.final], "bonus")
