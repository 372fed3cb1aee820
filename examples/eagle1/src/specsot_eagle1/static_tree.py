"""EAGLE-1's static trees: which children of which nodes are drafted. Without torch, for graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Node = tuple[int, ...]
"""A node by its child ranks from the root on: (0, 2) is the third best child of the best."""

MC_SIM_7B_63: tuple[Node, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""EAGLE-1's own choice, under its own name (SafeAILab/EAGLE, branch v1): 25 nodes, 5 levels."""


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes of one depth, in order.

    above: for each node its parent, counted among the nodes of the level above that have children.
    ranks: for each node which of its parent's children it is.
    inner: those with children, which the drafter has to forward; inner_depths: depths of all of
        them down to this level; ancestors: for each of this level, which of those are its ancestors
        or itself.
    """

    depth: int
    above: tuple[int, ...]
    ranks: tuple[int, ...]
    inner: tuple[int, ...]
    inner_depths: tuple[int, ...]
    ancestors: tuple[tuple[bool, ...], ...]

    @property
    def breadth(self) -> int:
        """How many children of a parent have to be looked at."""
        return max(self.ranks) + 1


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree laid out level by level; `parents` counts over all nodes, -1 is the root."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    levels: tuple[Level, ...]

    @property
    def inner(self) -> int:
        """How many nodes have children."""
        return len(self.levels[-1].inner_depths)


def fault(tree: Sequence[Node]) -> tuple[int, str] | None:
    """The first invalid node, and the reason; None for a valid tree."""
    known: set[Node] = {(), *tree}
    before: set[Node] = set()
    for index, node in enumerate(tree):
        if not node:
            return index, "a node is a list of child ranks, not empty"
        if node[:-1] not in known:
            return index, f"{list(node)} needs its parent {list(node[:-1])} in the tree"
        if node in before:
            return index, f"{list(node)} is given twice"
        before.add(node)
    return None


@cache
def lay_out(tree: tuple[Node, ...]) -> StaticTree:
    """The nodes by depth, and in a level by their ranks from the root on, as EAGLE-1 counts them.

    The tree has nodes and no `fault`.
    """
    nodes = sorted(tree, key=lambda node: (len(node), node))
    place = {node: index for index, node in enumerate(nodes)} | {(): -1}
    parents = {node[:-1] for node in nodes}
    inner = [node for node in nodes if node in parents]
    levels = []
    for depth in range(1, len(nodes[-1]) + 1):
        here = [node for node in nodes if len(node) == depth]
        above = [node for node in ((), *inner) if len(node) == depth - 1]
        known = [node for node in inner if len(node) <= depth]
        forwarded = [node for node in known if len(node) == depth]
        level = Level(
            depth=depth,
            above=tuple(above.index(node[:-1]) for node in here),
            ranks=tuple(node[-1] for node in here),
            inner=tuple(here.index(node) for node in forwarded),
            inner_depths=tuple(len(node) for node in known),
            ancestors=tuple(
                tuple(node[: len(other)] == other for other in known) for node in forwarded
            ),
        )
        levels.append(level)
    return StaticTree(
        tuple(place[node[:-1]] for node in nodes), tuple(map(len, nodes)), tuple(levels)
    )
