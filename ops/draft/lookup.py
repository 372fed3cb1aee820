"""Prompt lookup: drafts are what followed earlier occurrences of a branch's own last tokens.

Saxena, "Prompt lookup decoding" (2023); with one match it proposes what transformers'
`PromptLookupCandidateGenerator` does. Several matches make a tree. Token ids are Python ints;
appending a token and looking a suffix up cost the same however long the context is.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from math import log

from .host_tree import HostTree


class SuffixIndex:
    """A branch's token ids, and for every n-gram up to `longest` tokens what places follow it."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.ids: list[int] = []
        self.places: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def append_(self, tokens: Sequence[int]) -> None:
        """Take in what the branch has committed."""
        for token in tokens:
            self.ids.append(token)
            for size in range(1, min(self.longest, len(self)) + 1):
                self.places.setdefault(tuple(self.ids[-size:]), []).append(len(self))

    def matches(self, most: int) -> list[int]:
        """Up to `most` places that follow an earlier occurrence of the last tokens.

        Longer matches come first; among equally long ones the leftmost.
        """
        sizes = range(min(self.longest, len(self) - 1), 0, -1)
        ends = chain.from_iterable(self.places[tuple(self.ids[-size:])] for size in sizes)
        different: dict[int, None] = {}
        for place in ends:
            if len(different) == most:
                break
            if place < len(self):
                different.setdefault(place)
        return list(different)


def lookup_tree(
    index: SuffixIndex,
    *,
    nodes: int,
    levels: int,
    matches: int = 1,
    stop_ids: Collection[int] = (),
) -> HostTree:
    """What followed the best `matches`, as a tree: a chain for one match.

    A node counts the matches that pass through it. The `nodes` with the highest counts stay, of
    equals those that were found first, so common beginnings are kept before rare endings. Neither
    a stop token nor anything behind one is drafted.
    """
    places = index.matches(matches) if nodes > 0 and levels > 0 else []
    trie = _Trie()
    for place in places:
        following = index.ids[place : place + levels]
        ends = (at for at, token in enumerate(following) if token in stop_ids)
        trie.add_(following[: next(ends, len(following))])
    return trie.best(nodes, len(places))


class _Trie:
    """Continuations merged at their common beginnings; nodes in order of creation."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.counts: list[int] = []
        self.children: dict[tuple[int, int], int] = {}

    def add_(self, path: Sequence[int]) -> None:
        node = -1
        for depth, token in enumerate(path, 1):
            child = self.children.setdefault((node, token), len(self.tokens))
            if child == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(depth)
                self.counts.append(0)
            self.counts[child] += 1
            node = child

    def best(self, nodes: int, total: int) -> HostTree:
        """The best nodes in order of creation: a parent counts at least as much as its child."""
        ranked = sorted(range(len(self.tokens)), key=lambda node: -self.counts[node])
        kept = sorted(ranked[:nodes])
        place = {node: at for at, node in enumerate(kept)} | {-1: -1}
        return HostTree(
            tuple(self.tokens[node] for node in kept),
            tuple(place[self.parents[node]] for node in kept),
            tuple(self.depths[node] for node in kept),
            tuple(log(self.counts[node] / total) for node in kept),
        )
