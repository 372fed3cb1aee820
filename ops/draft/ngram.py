"""Drafting from n-grams, without a model: prompt lookup (Saxena, 2023; with one match transformers'
`PromptLookupCandidateGenerator`). A token costs the same for any context. No torch."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, count
from math import log
from typing import TypeVar

Gram = tuple[int, ...]
State = TypeVar("State")
Offers = Iterator[tuple[float, int, State]]


@dataclass(frozen=True, slots=True)
class HostTree:
    """A branch's drafted tokens, parents before children; fields as in `Proposal`."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


def best_tree(
    start: State,
    offers: Callable[[State, int], Iterable[tuple[float, int, State]]],
    *,
    nodes: int,
    levels: int,
) -> HostTree:
    """The `nodes` most probable paths from a state, of equals the one that was found first. offers:
    of a state, with the depth of what follows: minus the log-probability of each token that may
    follow, the token, and the state after it, best first."""
    order = count()
    heap: list[tuple[float, int, int, int, int, State, Offers[State], float]] = []

    def push_(offered: Offers[State], parent: int, depth: int, above: float) -> None:
        """The next one of those after a node."""
        for loss, token, after in offered:
            heappush(heap, (above + loss, next(order), parent, depth, token, after, offered, above))
            break

    if nodes and levels:
        push_(iter(offers(start, 1)), -1, 1, 0.0)
    best: list[tuple[int, int, int, float]] = []
    while heap:
        loss, _, parent, depth, token, state, siblings, above = heappop(heap)
        best.append((token, parent, depth, -loss))
        if len(best) == nodes:
            break
        push_(siblings, parent, depth, above)
        if depth < levels:
            push_(iter(offers(state, depth + 1)), len(best) - 1, depth + 1, loss)
    return HostTree(*zip(*best, strict=True)) if best else HostTree()


@dataclass(slots=True)
class SuffixIndex:
    """A branch's token ids, and for every n-gram up to `longest` tokens what places follow it."""

    longest: int
    ids: list[int] = field(default_factory=list)
    places: dict[Gram, list[int]] = field(default_factory=dict)

    def append_(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.ids.append(token)
            for size in range(1, min(self.longest, len(self.ids)) + 1):
                self.places.setdefault(tuple(self.ids[-size:]), []).append(len(self.ids))

    def matches(self, most: int) -> list[int]:
        """Up to `most` places after earlier occurrences of the last tokens, long matches first."""
        length = len(self.ids)
        sizes = range(min(self.longest, length - 1), 0, -1)
        ends = chain.from_iterable(self.places[tuple(self.ids[-size:])] for size in sizes)
        different: dict[int, None] = {}
        for place in ends:
            if len(different) == most:
                break
            if place < length:
                different.setdefault(place)
        return list(different)


def lookup_tree(
    index: SuffixIndex, *, nodes: int, levels: int, matches: int = 1, stop_ids: Collection[int] = ()
) -> HostTree:
    """What followed the best `matches`, as a tree: of the nodes those that most matches pass
    through, of equals the first ones. Neither a stop token nor anything after one is drafted."""
    places = index.matches(matches) if nodes > 0 and levels > 0 else []
    children: dict[tuple[int, int], int] = {}  # (parent, token) -> node, in order of creation
    depths: list[int] = []
    counts: list[int] = []
    for place in places:
        node = -1
        for depth, token in enumerate(index.ids[place : place + levels], 1):
            if token in stop_ids:
                break
            node = children.setdefault((node, token), len(counts))
            if node == len(counts):
                depths.append(depth)
                counts.append(0)
            counts[node] += 1
    edges = list(children)
    ranked = sorted(range(len(counts)), key=lambda node: -counts[node])
    best = sorted(ranked[:nodes])  # a parent counts at least as much as its child
    number = {node: at for at, node in enumerate(best)} | {-1: -1}
    return HostTree(
        tuple(edges[node][1] for node in best),
        tuple(number[edges[node][0]] for node in best),
        tuple(depths[node] for node in best),
        tuple(log(counts[node] / len(places)) for node in best),
    )
