"""What a viewer shows of a run: an immutable snapshot."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...states.blend import BlendSummary, Reused
from ...states.graph.graph import Graph
from ...states.prefix_cache import KeptSegment
from ...states.request import Branch, Finish, Request
from ...states.round import VerifiedTree
from .metrics import Meter


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


Codes = npt.NDArray[np.int16]

# What a slot of the pool holds; a branch's code is BRANCH + its index.
FREE, PREFIX, TREE, OUTLINE, PADDING, REUSED, PICKED, KEPT, BRANCH = range(9)


@dataclass(frozen=True, slots=True)
class Move:
    """A transition that was taken: milliseconds spent in `source`, tokens committed there."""

    source: str
    target: str
    guard: str | None
    millis: float
    committed: int


@dataclass(frozen=True, slots=True)
class BranchView:
    """One branch; `index` -1 is the root branch, which writes the outline."""

    request: str
    index: int
    title: str
    stage: str
    finish: str
    tokens: int
    budget: int
    text: str


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request; `parts` that it has so far, `done` of them ended; tokens of all its branches."""

    key: str
    question: str
    stage: str
    parts: int
    done: int
    tokens: int
    refused: bool = False


@dataclass(frozen=True, slots=True)
class PoolView:
    """A KV pool; `codes` tells for every slot what it holds (FREE, PREFIX, TREE, ...).

    rows: of the pool, one behind the other in `codes`; `capacity` slots in all.
    moved: bytes moved inside both pools, as their ledgers have it; None if that is not known.
    reused: tokens of prompts whose rows were there already.
    """

    codes: Codes
    used: int
    capacity: int
    bytes: int
    draft_used: int
    draft_capacity: int
    rows: int = 1
    moved: int | None = 0
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Scene:
    """What never changes during a run: the title line and the graph's ways."""

    graph: str
    layout: str
    drafter: str
    model: str
    states: tuple[str, ...]
    ways: Mapping[str, tuple[str, ...]]
    requests: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole picture at one moment; `seconds` since the run began.

    meter: a copy of the run's, without requests and moments. blend: the last forward with cached
    rows, None if there was none. trees: of the last rounds of branches, one for each.
    """

    state: str
    before: str
    moves: tuple[Move, ...]
    branches: tuple[BranchView, ...]
    pool: PoolView
    meter: Meter
    seconds: float
    blend: BlendSummary | None = None
    requests: tuple[RequestView, ...] = ()
    trees: tuple[DraftTree, ...] = ()


def scene_of(graph: Graph, model: str, requests: int) -> Scene:
    """The unchanging part for a graph."""
    ways = {name: tuple(e.to for e in graph.edges_from(name)) for name in graph.states}
    kinds = (graph.layout.kind, graph.drafter.kind)
    name = model.rstrip("/").rpartition("/")[2]
    return Scene(graph.name, *kinds, name, tuple(graph.states), ways, requests)


def slot_codes(
    pool: Any,
    requests: Iterable[Request],
    reused: Mapping[int, Reused] | None = None,
    kept: Mapping[int, KeptSegment] | None = None,
) -> Codes:
    """What each slot of a pool (ops.kv.KVCache) holds, from its slot table and the branch table.

    Args:
        kept: segments that stay for other requests; those that some go on from are prefixes.
    """
    owner = np.asarray(pool.owner)
    code_of: dict[int, int] = {}
    for request in requests:
        code_of[request.prefix_owner] = PREFIX
        for branch in request.all_branches():
            code_of[branch.owner] = OUTLINE if branch.is_root else BRANCH + branch.index
    for segment, one in (kept or {}).items():
        code_of[segment] = PREFIX if one.pins else KEPT
    numbers = range(int(owner.max(initial=0)) + 1)  # a beam's rows have owners of their own
    table = np.array([code_of.get(number, TREE) for number in numbers], np.int16)
    codes: Codes = table[np.maximum(owner, 0)]
    for whose, rows in (reused or {}).items():
        for positions, code in ((rows.cached, REUSED), (rows.picked, PICKED)):
            codes[(owner == whose) & np.isin(pool.position, list(positions))] = code
    codes[(owner >= 0) & ~np.asarray(pool.committed)] = TREE
    codes[owner < 0] = FREE
    return _with_padding(codes.reshape(pool.rows, -1)).reshape(-1) if pool.rows > 1 else codes


def _with_padding(codes_RC: Codes) -> Codes:
    """Rows of a batch are as long as the longest: what is behind a shorter one is padding."""
    used = codes_RC != FREE
    longest = int(np.flatnonzero(used.any(0)).max(initial=-1)) + 1
    short = ~used & used.any(1)[:, None]
    short[:, longest:] = False
    return np.where(short, np.int16(PADDING), codes_RC)


def runs_of(codes: Codes) -> list[list[int]]:
    """Equal neighbours as [code, how many]."""
    cuts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    return [[int(codes[a]), b - a] for a, b in pairwise(cuts) if b > a]


def pool_view(board: Mapping[str, Any]) -> PoolView:
    """Both pools of a run."""
    kv = board["kv"]
    draft = board["kv_draft"]
    book = board["branches"]
    used = kv.needed_length
    prefixes = book.prefixes
    kept = prefixes.kept if prefixes is not None else None
    return PoolView(
        slot_codes(kv, book.requests, book.reused, kept),
        used,
        kv.slots,
        used * kv.slot_bytes,
        draft.needed_length if draft is not None else 0,
        draft.slots if draft is not None else 0,
        kv.rows,
        sum(sum(pool.ledger.bytes.values()) for pool in (kv, draft) if pool is not None),
        prefixes.figures.reused if prefixes is not None else 0,
    )


def branch_view(branch: Branch, text: str) -> BranchView:
    name = (branch.request.key, branch.index, branch.title)
    stage = "done" if branch.ended else str(branch.stage)
    finish = str(branch.finish or "")
    return BranchView(*name, stage, finish, len(branch.tokens), branch.budget, text)


def request_view(request: Request) -> RequestView:
    branches = request.branches
    done = sum(branch.ended for branch in branches)
    tokens = sum(len(branch.tokens) for branch in request.all_branches())
    refused = any(branch.finish is Finish.REFUSED for branch in request.all_branches())
    stage = "done" if request.finished else str(request.stage)
    facts = (request.key, request.question, stage)
    return RequestView(*facts, len(branches), done, tokens, refused)
