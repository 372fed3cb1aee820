"""The states of a graph, one below another, and the ways between them that a run took."""

from collections import Counter
from collections.abc import Mapping

from specsot.states.graph.graph import Graph

from .svg import Picture

LEFT, TOP, STEP, WIDTH, HIGH = 300.0, 50.0, 58.0, 150.0, 30.0
REACH, BASE = 26.0, 24.0  # of an arc, for each state that it passes

Way = tuple[str, str, str]  # from, to, guard


def state_graph(title: str, graph: Graph, taken: Mapping[Way, int]) -> Picture:
    """Ways down stand on the right, ways back on the left; those that nobody took are faint."""
    picture, order = Picture(title), list(graph.states)
    ways = {(e.from_, e.to, e.when or "") for e in graph.transitions}
    assert set(taken) <= ways, "a way that the graph does not have"
    for way in sorted(ways, key=lambda way: (way in taken, order.index(way[0]), way)):
        _arc(picture, order.index(way[0]), order.index(way[1]), taken.get(way, 0), way[2])
    for number, name in enumerate(order):
        y = TOP + number * STEP
        picture.box(LEFT, y, WIDTH, HIGH, "box", 6)
        picture.text(LEFT + WIDTH / 2, y + 20, name, "c m")
    return picture


def _arc(picture: Picture, source: int, target: int, times: int, guard: str) -> None:
    down = target > source
    side = LEFT + WIDTH if down else LEFT
    away = (BASE + REACH * (abs(target - source) - 1)) * (1 if down else -1)
    top = TOP + HIGH * (0.7 if down else 0.3)
    first, last = top + source * STEP, TOP + HIGH * (0.3 if down else 0.7) + target * STEP
    kind = "line way" if times else "line dim"
    if target == source + 1:
        x, y = LEFT + WIDTH / 2, TOP + source * STEP + HIGH
        picture.path(f"M{x:g} {y:g}V{y + STEP - HIGH:g}", kind, bool(times))
        first, last, side, away = y, y + STEP - HIGH, x, 0.0
    else:
        bend = side + away * 4 / 3
        picture.path(
            f"M{side:g} {first:g}C{bend:g} {first:g} {bend:g} {last:g} {side:g} {last:g}",
            kind,
            bool(times),
        )
    if times:
        label = f"{times}x" + (f" {guard}" if guard else "")
        place = side + away + (5 if down else -5)
        picture.text(place, (first + last) / 2 + 4, label, "s" if down else "s e")


def ways_of(moves: list[Way]) -> dict[Way, int]:
    """How often each way was taken; the way into the first state is none of the graph's."""
    return dict(Counter(way for way in moves if way[0] != "start"))
