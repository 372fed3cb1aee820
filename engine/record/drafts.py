"""The drafts of a branch's last round for viewers: trees of texts, each with its mark."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ...states.round import VerifiedTree


class Mark(StrEnum):
    """What became of a drafted token, or how a token of the target's came about.

    UNREACHED: its parent was not accepted, or the answer ended before it.
    FORCED: accepted, and a grammar left nothing else.
    BONUS: the target's token behind drafts that were accepted to the end of a path.
    OWN: the target's token where no draft had it.
    OFFERED: not verified yet.
    """

    ROOT = "root"
    ACCEPTED = "accepted"
    FORCED = "forced"
    REJECTED = "rejected"
    UNREACHED = "not reached"
    BONUS = "bonus"
    OWN = "own"
    OFFERED = "offered"


@dataclass(frozen=True, slots=True)
class DraftNode:
    """One token of a tree; parent: a node's place in the tree, -1 for the root's."""

    text: str
    parent: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A branch's last round: parents stand before children, the path that was taken before others.

    request, name: of the branch: `outline`, `combined` or its number from 1. round: its number
        among target forwards. position: of the root. drafted, accepted: tokens.
    """

    request: str
    name: str
    round: int
    position: int
    nodes: tuple[DraftNode, ...]
    drafted: int
    accepted: int


def draft_tree(number: int, tree: VerifiedTree, text: Callable[[int], str]) -> DraftTree:
    """A round's tree with texts; text: of a single token."""
    request, _, name = tree.branch.rpartition("/")
    there = [n for n in range(1, len(tree.tokens)) if tree.tokens[n] >= 0]
    final = DraftNode(shown(tree.final, text), len(tree.path) - 1, _final_mark(tree, there))
    place = {0: 0}
    nodes = [DraftNode(shown(tree.root, text), -1, Mark.ROOT)]
    for node in _in_order(tree, there):
        place[node] = len(nodes)
        parent = place[tree.parents[node]]
        nodes.append(DraftNode(shown(tree.tokens[node], text), parent, _mark(tree, node)))
    nodes.insert(len(tree.path), final)
    moved = [n if n.parent < len(tree.path) else _behind(n) for n in nodes]
    counts = len(there), len(tree.path) - 1
    return DraftTree(request, name, number, tree.position, tuple(moved), *counts)


def _behind(node: DraftNode) -> DraftNode:
    """A node whose parent moved one place on."""
    return DraftNode(node.text, node.parent + 1, node.mark)


def _in_order(tree: VerifiedTree, there: list[int]) -> Iterator[int]:
    """The accepted path, then the others as they were drafted."""
    yield from tree.path[1:]
    yield from (node for node in there if node not in tree.path)


def _mark(tree: VerifiedTree, node: int) -> Mark:
    if node not in tree.path:
        return Mark.REJECTED if tree.parents[node] in tree.path else Mark.UNREACHED
    if tree.path.index(node) - 1 > tree.taken:  # number `taken` is the stop token
        return Mark.UNREACHED
    return Mark.FORCED if tree.forced else Mark.ACCEPTED


def _final_mark(tree: VerifiedTree, there: list[int]) -> Mark:
    if len(tree.path) - 1 > tree.taken:
        return Mark.UNREACHED
    leads_on = any(tree.parents[node] == tree.path[-1] for node in there)
    return Mark.OWN if leads_on or not there else Mark.BONUS


def shown(token: int, text: Callable[[int], str]) -> str:
    """A token's text, or its number where it has none."""
    return text(token) or f"<{token}>"
