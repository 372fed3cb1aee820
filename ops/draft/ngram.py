"""NASD: drafting from count tables of n-grams, filled with what the target says (no model).

Ou et al., "Lossless acceleration of large language model via adaptive n-gram parallel decoding"
(NAACL 2024 industry, 2404.08698), with back-off to shorter contexts and filler tokens. Whatever
the tables hold, drafts are only proposals: they are accepted by the target's own tokens.

Token ids are Python ints. Learning a token costs the same however much a table holds; a branch's
trees come from the last tokens of its context. Prompt lookup is in `lookup.py`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from math import log

from .host_tree import HostTree

Gram = tuple[int, ...]


@dataclass(slots=True)
class Followers:
    """What followed one context: counts, and the `width` most frequent tokens in order.

    A token moves up only when its count is strictly larger: of equals, the first to get there
    stays in front.
    """

    counts: dict[int, int] = field(default_factory=dict)
    ranked: list[int] = field(default_factory=list)
    total: int = 0

    def add_(self, token: int, width: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + 1
        self.total += 1
        if token not in self.ranked:
            if len(self.ranked) < width:
                self.ranked.append(token)
            elif count > self.counts[self.ranked[-1]]:
                self.ranked[-1] = token
            else:
                return
        at = self.ranked.index(token)
        while at and count > self.counts[self.ranked[at - 1]]:
            self.ranked[at - 1 : at + 1] = [token, self.ranked[at - 1]]
            at -= 1


class CountTable:
    """Counts of n-grams: contexts of `min_context` to `order` - 1 tokens and what followed them.

    Args:
        order: longest n-gram, its last token counted (at least 2).
        min_context: shortest context; `order` - 1 for a table of one level.
        width: tokens per context that can be drafted side by side.
    """

    def __init__(self, order: int, min_context: int = 1, width: int = 8) -> None:
        if not 1 <= min_context < order or width < 1:
            raise ValueError(f"no n-grams of order {order} from {min_context} context tokens on")
        self.order, self.min_context, self.width = order, min_context, width
        self.followers: dict[Gram, Followers] = {}

    def update_(self, ids: Sequence[int], end: int, tokens: Sequence[int]) -> None:
        """Count each of these tokens once as what followed ids[:end]."""
        for size in range(self.min_context, min(self.order - 1, end) + 1):
            found = self.followers.setdefault(tuple(ids[end - size : end]), Followers())
            for token in tokens:
                found.add_(token, self.width)

    def learn_(
        self, ids: Sequence[int], start: int = 0, fillers: Sequence[Sequence[int]] = ()
    ) -> None:
        """Count ids[start:], each token after the ids before it.

        Args:
            fillers: for each of these tokens what else the target found likely in its place
                (`filler_ids`); negative ids are none. Only committed positions are learnt from.
        """
        for end in range(start, len(ids)):
            self.update_(ids, end, ids[end : end + 1])
            if fillers:
                self.update_(ids, end, [token for token in fillers[end - start] if token >= 0])

    def count(self, gram: Sequence[int]) -> int:
        """How often the last token was counted after the ones before it."""
        found = self.followers.get(tuple(gram[:-1]))
        return 0 if found is None else found.counts.get(gram[-1], 0)


@dataclass(frozen=True, slots=True)
class ContextMatch:
    """Followers of the longest known context: tokens in order with their counts."""

    context: int
    ranked: tuple[tuple[int, int], ...]
    total: int


def longest_match(tables: Sequence[CountTable], context: Sequence[int]) -> ContextMatch | None:
    """What the tables together say after a context; None where even the shortest is unknown.

    Counts of all tables are added; of equal sums the earlier table's order decides.
    """
    longest = max(table.order for table in tables) - 1
    for size in range(min(longest, len(context)), 0, -1):
        key = tuple(context[-size:])
        found = [table.followers[key] for table in tables if key in table.followers]
        if found:
            return ContextMatch(size, _merged(found), sum(one.total for one in found))
    return None


def _merged(found: Sequence[Followers]) -> tuple[tuple[int, int], ...]:
    if len(found) == 1:
        return tuple((token, found[0].counts[token]) for token in found[0].ranked)
    sums = {t: sum(one.counts.get(t, 0) for one in found) for each in found for t in each.ranked}
    return tuple(sorted(sums.items(), key=lambda item: -item[1]))


def count_tree(
    tables: Sequence[CountTable],
    context: Sequence[int],
    *,
    nodes: int,
    levels: int,
    width: int = 1,
    stop_ids: Collection[int] = (),
) -> HostTree:
    """The `nodes` most probable continuations under the counts; a chain for width 1.

    Nodes are taken best first by the product of their relative frequencies, of equals the one
    that was found first. A node whose context is unknown has no children. Neither a stop token
    nor anything behind one is drafted.

    Args:
        context: the branch's last tokens, the pending one included; order - 1 of them suffice.
        width: children per node at most.
    """
    if nodes < 1 or levels < 1:
        return HostTree()
    growth = _Growth(tables, width, stop_ids)
    growth.offer_(-1, 0, 0.0, tuple(context[1 - max(table.order for table in tables) :]))
    return growth.tree(nodes, levels)


class _Growth:
    """Best-first search: a heap of nodes by (score, order in which they were found)."""

    def __init__(self, tables: Sequence[CountTable], width: int, stop_ids: Collection[int]) -> None:
        self.tables, self.width, self.stop_ids = tables, width, stop_ids
        self.heap: list[tuple[float, int, int, int, Gram]] = []
        self.found = 0

    def offer_(self, parent: int, depth: int, loss: float, context: Gram) -> None:
        """Put the children of a node on the heap."""
        said = longest_match(self.tables, context)
        for token, count in said.ranked[: self.width] if said else ():
            if said and token not in self.stop_ids:
                entry = (loss - log(count / said.total), self.found, parent, depth + 1)
                heappush(self.heap, (*entry, (*context, token)))
                self.found += 1

    def tree(self, nodes: int, levels: int) -> HostTree:
        taken: list[tuple[int, int, int, float]] = []
        while self.heap and len(taken) < nodes:
            loss, _, parent, depth, context = heappop(self.heap)
            taken.append((context[-1], parent, depth, -loss))
            if depth < levels:
                self.offer_(len(taken) - 1, depth, loss, context)
        if not taken:
            return HostTree()
        tokens, parents, depths, scores = zip(*taken, strict=True)
        return HostTree(tokens, parents, depths, scores)


class Scope(StrEnum):
    """How long counts live, and who adds to them."""

    BRANCH = "branch"  # its own counts over a read-only table of the request's prompt
    REQUEST = "request"  # one table for all branches of a request
    SESSION = "session"  # one table for everything


class CountTables:
    """The count tables of all requests and branches under one scope."""

    def __init__(self, scope: Scope, order: int, min_context: int = 1, width: int = 8) -> None:
        self.scope, self.shape = scope, (order, min_context, width)
        self.session = CountTable(*self.shape)
        self.requests: dict[str, CountTable] = {}
        self.branches: dict[tuple[str, int], CountTable] = {}

    def open_(self, request: str, prompt: Sequence[int]) -> None:
        """A request begins: count its prompt."""
        if self.scope is not Scope.SESSION:
            self.requests[request] = CountTable(*self.shape)
        self.tables_(request, None)[-1].learn_(prompt)

    def tables_(self, request: str, branch: int | None) -> tuple[CountTable, ...]:
        """The tables a branch drafts from; the last one is the one that it adds to."""
        if self.scope is Scope.SESSION:
            return (self.session,)
        shared = self.requests[request]
        if self.scope is Scope.REQUEST or branch is None:
            return (shared,)
        own = self.branches.setdefault((request, branch), CountTable(*self.shape))
        return (shared, own)

    def close_(self, request: str) -> None:
        """A request is done: forget what only it had."""
        self.requests.pop(request, None)
        for key in [key for key in self.branches if key[0] == request]:
            del self.branches[key]
