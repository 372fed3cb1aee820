"""What lies in a pool, and which rows of a forward see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from .svg import Picture

LEFT, CELL, HIGH = 150.0, 7.0, 13.0


@dataclass(frozen=True)
class Slots:
    """A pool at one moment. bim: of each slot, -1 shared, 0, 1 ... branches, None free."""

    name: str
    bim: tuple[int | None, ...]
    positions: tuple[int, ...]
    committed: tuple[bool, ...]


@dataclass(frozen=True)
class Mask:
    """A forward over trees: for each row its branch, its token's text, and which slots it sees."""

    slots: Slots
    branches: tuple[int, ...]
    texts: tuple[str, ...]
    sees: tuple[tuple[bool, ...], ...]


def kind_of(branch: int | None) -> str:
    return "free" if branch is None else "shared" if branch < 0 else f"b{branch % 4}"


def _cells(picture: Picture, kinds: Sequence[str], x: float, y: float) -> None:
    """A cell for each slot: a shape for each run of one kind, and lines between the cells."""
    for kind, run in groupby(enumerate(kinds), key=lambda one: one[1]):
        cells = [number for number, _ in run]
        picture.box(x + cells[0] * CELL, y, len(cells) * CELL, HIGH, kind)
    lines = "".join(f"M{x + n * CELL - 0.5:g} {y:g}v{HIGH:g}" for n in range(1, len(kinds) + 1))
    picture.path(lines, "gap")


def _strip(picture: Picture, slots: Slots, x: float, y: float) -> None:
    kinds = [
        kind_of(branch) + ("" if branch is None or slots.committed[number] else " fresh")
        for number, branch in enumerate(slots.bim)
    ]
    _cells(picture, kinds, x, y)


def _runs(slots: Slots) -> list[tuple[int, int, str]]:
    """First slot, how many, and the name of each run of one owner."""
    runs: list[tuple[int, int, str]] = []
    before: object = "nobody yet"
    for number, branch in enumerate(slots.bim):
        now = (branch, slots.committed[number])
        if now != before:
            name = "" if branch is None else str(branch)
            runs.append((number, 0, name))
        runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
        before = now
    return runs


def slot_table(title: str, moments: list[list[Slots]]) -> Picture:
    """Moments one below another, each of one or more rows of a pool; below a run its positions."""
    picture, y = Picture(title), 44.0
    for rows in moments:
        for slots in rows:
            picture.text(LEFT - 10, y + 11, slots.name, "e")
            _strip(picture, slots, LEFT, y)
            for first, count, name in _runs(slots):
                if name and count >= 3 and slots.committed[first]:
                    x = LEFT + first * CELL
                    span = f"{slots.positions[first]}-{slots.positions[first + count - 1]}"
                    picture.text(x, y + HIGH + 11, span if count > 6 else span.split("-")[0], "s")
            y += HIGH + 18
        y += 10
    _legend(picture, y + 4)
    return picture


def mask_picture(title: str, mask: Mask) -> Picture:
    """A row of cells for each row of the forward; a cell has its slot's colour if it is seen."""
    picture, y = Picture(title), 56.0
    picture.text(LEFT - 10, y + 11, "slots of the pool", "e")
    _strip(picture, mask.slots, LEFT, y)
    for first, count, name in _runs(mask.slots):
        if name and count >= 3:
            picture.text(LEFT + first * CELL, y - 4, f"BIM {name}" if count > 6 else name, "s")
    y += HIGH + 10
    for number, (branch, text) in enumerate(zip(mask.branches, mask.texts, strict=True)):
        if number and branch != mask.branches[number - 1]:
            y += 6
        picture.text(LEFT - 24, y + 11, text, "e m")
        picture.box(LEFT - 18, y, CELL + 3, HIGH, kind_of(branch))
        kinds = [
            kind_of(mask.slots.bim[slot]) if seen else "free"
            for slot, seen in enumerate(mask.sees[number])
        ]
        _cells(picture, kinds, LEFT, y)
        y += HIGH + 2
    _legend(picture, y + 12)
    return picture


def _legend(picture: Picture, y: float) -> None:
    x = LEFT
    words = [("shared", "BIM -1: shared by all")]
    words += [(f"b{branch}", f"branch {branch}") for branch in range(3)]
    words += [("b0 fresh", "not committed"), ("free", "free, or not seen")]
    for kind, text in words:
        picture.box(x, y, 12, 12, kind)
        picture.text(x + 17, y + 10, text, "s")
        x += 36 + 5.6 * len(text)
