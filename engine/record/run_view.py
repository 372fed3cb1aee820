"""The state of a run as viewers show it, folded from its events, live or read from trace.jsonl."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ...states.blend import Reused
from ...states.machine import Moved
from ...states.prefix_cache import CachedSegment
from ...states.request import Branch, Finish, Request
from ...states.round import BlendSummary, RoundSummary, VerifiedTree
from .metrics import Meter

Codes = npt.NDArray[np.int16]

# What a slot of the pool holds; the code of a branch is BRANCH + its index.
FREE, PREFIX, TREE, OUTLINE, PADDING, REUSED, PICKED, RETAINED, BRANCH = range(9)
MAX_ENTRIES = 64  # moves, and branches with their last trees, that a view retains


class Mark(StrEnum):
    """The outcome of a drafted token, or the origin of a token of the target's."""

    ROOT = "root"
    ACCEPTED = "accepted"
    FORCED = "forced"  # accepted, as the only token that a grammar allows
    REJECTED = "rejected"
    UNREACHED = "not reached"  # its parent was not accepted, or the answer ended before it
    BONUS = "bonus"  # the target's token after a path that was accepted to its end
    TARGET = "own"  # the target's token where no draft matched
    OFFERED = "offered"  # not verified yet


@dataclass(frozen=True, slots=True)
class DraftNode:
    """One token of a tree; parent: its index in the tree, -1 for the root."""

    text: str
    parent: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Of a branch's last round: parents before children, the accepted path first; round: number of
    the target forward."""

    request: str
    name: str
    round: int
    position: int
    nodes: tuple[DraftNode, ...]
    drafted: int
    accepted: int


def draft_tree(number: int, tree: VerifiedTree, text: Callable[[int], str]) -> DraftTree:
    """number: of the target forward. text: of a token; if empty, its id in angle brackets."""
    request, _, name = tree.branch.rpartition("/")
    tokens = (tree.root, *tree.tokens[1:], tree.final)  # the final token is a node below the path
    parents = (*tree.parents, *tree.path[-1:])
    first = [*tree.path, len(parents) - 1] if tree.path else [0]
    order = [*first, *(node for node in tree.drafts if node not in tree.path)]
    place = {node: at for at, node in enumerate(order)}
    nodes = []
    for node in order:
        shown = text(tokens[node]) or f"<{tokens[node]}>"
        nodes.append(DraftNode(shown, place[parents[node]] if node else -1, _mark(tree, node)))
    return DraftTree(
        request=request,
        name=name,
        round=number,
        position=tree.position,
        nodes=tuple(nodes),
        drafted=len(tree.drafts),
        accepted=max(len(tree.path) - 1, 0),
    )


def _mark(tree: VerifiedTree, node: int) -> Mark:
    if node == 0:
        return Mark.ROOT
    if not tree.path:
        return Mark.OFFERED
    if node == len(tree.tokens):  # the final token
        if len(tree.path) - 1 > tree.num_committed:
            return Mark.UNREACHED
        is_leaf = all(tree.parents[draft] != tree.path[-1] for draft in tree.drafts)
        return Mark.BONUS if tree.drafts and is_leaf else Mark.TARGET
    if node not in tree.path:
        return Mark.REJECTED if tree.parents[node] in tree.path else Mark.UNREACHED
    if tree.path.index(node) - 1 > tree.num_committed:  # the stop token is not committed either
        return Mark.UNREACHED
    return Mark.FORCED if tree.forced else Mark.ACCEPTED


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
    key: str
    question: str
    stage: str
    parts: int
    done: int
    tokens: int
    refused: bool = False


@dataclass(frozen=True, slots=True)
class PoolView:
    """codes: the content of every slot, row after row. moved: bytes moved inside both pools; None
    if unknown. reused: prompt tokens whose rows came from the prefix cache."""

    codes: Codes
    used: int
    bytes: int
    draft_used: int
    draft_capacity: int
    rows: int = 1
    moved: int | None = 0
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Scene:
    """The constants of a run."""

    graph: str
    layout: str
    drafter: str
    model: str
    states: tuple[str, ...]
    ways: Mapping[str, tuple[str, ...]]
    requests: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment; moves: the last transitions, each with the tokens committed in its
    source; meter: a copy without requests and marks."""

    state: str
    moves: tuple[tuple[Moved, int], ...]
    branches: tuple[BranchView, ...]
    pool: PoolView
    meter: Meter
    seconds: float
    blend: BlendSummary | None = None
    requests: tuple[RequestView, ...] = ()
    trees: tuple[DraftTree, ...] = ()


@dataclass
class RunView:
    """The state of a run after its events so far. trees: (round, tree) of the last round of each
    branch, the latest last."""

    state: str = "start"
    meter: Meter = field(default_factory=Meter)
    moves: deque[tuple[Moved, int]] = field(default_factory=lambda: deque(maxlen=MAX_ENTRIES))
    trees: dict[str, tuple[int, VerifiedTree]] = field(default_factory=dict)
    committed: int = 0  # tokens committed in the present state

    def moved(self, event: Moved, at: int) -> None:
        self.meter.moved(event, at)
        self.moves.append((event, self.committed))
        self.state = event.target
        self.committed = 0

    def round_done(self, summary: RoundSummary, at: int) -> None:
        self.meter.forward_done(summary, at)
        self.committed += sum(summary.committed)
        for tree in summary.trees:
            self.trees.pop(tree.branch, None)  # the latest tree is the last entry
            self.trees[tree.branch] = (self.meter.forwards, tree)
        for name in list(self.trees)[:-MAX_ENTRIES]:
            del self.trees[name]

    def snapshot(
        self,
        branches: Iterable[BranchView],
        requests: Iterable[RequestView],
        pool: PoolView,
        *,
        seconds: float,
        text: Callable[[int], str],
    ) -> Snapshot:
        meter = Meter()
        meter.add(self.meter)
        return Snapshot(
            state=self.state,
            moves=tuple(self.moves),
            branches=tuple(branches),
            pool=pool,
            meter=meter,
            seconds=seconds,
            blend=self.meter.blends[-1] if self.meter.blends else None,
            requests=tuple(requests),
            trees=tuple(draft_tree(number, tree, text) for number, tree in self.trees.values()),
        )


def scene_of(graph: Mapping[str, Any], model: str, requests: int) -> Scene:
    """graph: as in a manifest. model: a path, shown by its last part."""
    ways: dict[str, tuple[str, ...]] = {}
    for edge in graph["transitions"]:
        for source in [edge["from"]] if isinstance(edge["from"], str) else edge["from"]:
            ways[source] = (*ways.get(source, ()), edge["to"])
    return Scene(
        graph=graph["name"],
        layout=graph["layout"]["kind"],
        drafter=graph["drafter"]["kind"],
        model=model.rstrip("/").rpartition("/")[2],
        states=tuple(graph["states"]),
        ways=ways,
        requests=requests,
    )


def branch_view(branch: Branch, text: str) -> BranchView:
    return BranchView(
        request=branch.request.key,
        index=branch.index,
        title=branch.title,
        stage="done" if branch.ended else str(branch.stage),
        finish=str(branch.finish or ""),
        tokens=len(branch.tokens),
        budget=branch.budget,
        text=text,
    )


def request_view(request: Request) -> RequestView:
    branches = list(request.all_branches())
    return RequestView(
        key=request.key,
        question=request.question,
        stage="done" if request.finished else str(request.stage),
        parts=len(request.branches),
        done=sum(branch.ended for branch in request.branches),
        tokens=sum(len(branch.tokens) for branch in branches),
        refused=any(branch.finish is Finish.REFUSED for branch in branches),
    )


def visible_branches(requests: Iterable[Request]) -> Iterator[Branch]:
    """An outline's root branch only until its branches exist."""
    for request in requests:
        yield from request.branches or request.all_branches()


def pool_view(board: Mapping[str, Any]) -> PoolView:
    kv = board["kv"]
    draft = board["kv_draft"]
    table = board["branches"]
    prefixes = table.prefixes
    segments = prefixes.nodes if prefixes is not None else None
    return PoolView(
        codes=slot_codes(kv, table.requests, table.reused, segments),
        used=kv.needed_length,
        bytes=kv.needed_length * kv.slot_bytes,
        draft_used=draft.needed_length if draft is not None else 0,
        draft_capacity=draft.slots if draft is not None else 0,
        rows=kv.rows,
        moved=sum(sum(pool.ledger.bytes.values()) for pool in (kv, draft) if pool is not None),
        reused=prefixes.figures.reused if prefixes is not None else 0,
    )


def slot_codes(
    pool: Any,
    requests: Iterable[Request],
    reused: Mapping[int, Reused] | None = None,
    segments: Mapping[int, CachedSegment] | None = None,
) -> Codes:
    """Of each slot of a pool (ops.kv.KVCache); segments: of the prefix cache, by owner."""
    owner = np.asarray(pool.owner)
    code_of: dict[int, int] = {}
    for request in requests:
        code_of[request.prefix_owner] = PREFIX
        for branch in request.all_branches():
            code_of[branch.owner] = OUTLINE if branch.is_root else BRANCH + branch.index
    for number, segment in (segments or {}).items():
        code_of[number] = PREFIX if segment.pins else RETAINED
    numbers = range(int(owner.max(initial=0)) + 1)  # rows of a beam have other owners: TREE
    table = np.array([code_of.get(number, TREE) for number in numbers], np.int16)
    codes: Codes = table[np.maximum(owner, 0)]
    for number, rows in (reused or {}).items():
        for positions, code in ((rows.cached, REUSED), (rows.picked, PICKED)):
            codes[(owner == number) & np.isin(pool.position, list(positions))] = code
    codes[(owner >= 0) & ~np.asarray(pool.committed)] = TREE
    codes[owner < 0] = FREE
    if pool.rows > 1:  # the free end of a row, up to the length of the longest row, is padding
        codes_RC = codes.reshape(pool.rows, -1)
        used = codes_RC != FREE
        longest = int(np.flatnonzero(used.any(0)).max(initial=-1)) + 1
        short = ~used & used.any(1)[:, None]
        codes_RC[:, :longest][short[:, :longest]] = PADDING
    return codes


def runs_of(codes: Codes) -> list[list[int]]:
    """Run-length encoding: [code, count] of equal neighbours."""
    cuts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
    return [[int(codes[a]), b - a] for a, b in pairwise(cuts) if b > a]
