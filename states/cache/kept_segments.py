"""Segments of rows that stay for whoever begins with the same tokens, and how they are found."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from ...ops.kv.slots import Ints

# Tokens that a match must have. Rows that lie apart are gathered in every forward: fewer are read
# anew in less time than that takes.
SHORTEST = 64


@dataclass(slots=True)
class PrefixFigures:
    """What a cache has done: tokens of prompts that were looked up and of those reused, segments
    that were split, and segments and rows that were evicted."""

    asked: int = 0
    reused: int = 0
    splits: int = 0
    evicted: int = 0
    evicted_rows: int = 0


@dataclass(eq=False, slots=True)
class KeptSegment:
    """Rows that stay: `tokens` int32, their ids, the first of them at position `start`.

    behind: kept segments that go on from it, by how they begin. pins: requests that go on from it
    or from one of these. used: when it was last, in steps of the cache's own clock. salt: whose
    requests may go on from it.
    """

    segment: int
    start: int
    tokens: Ints
    behind: "Beginnings"
    pins: int = 0
    used: int = 0
    salt: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_leaf(self) -> bool:
        """Whether it can be evicted."""
        return not self.pins and not len(self.behind)


@dataclass(slots=True)
class Leaves:
    """Kept segments that may be evicted, those that were not used for longest first.

    marked: a heap of (when it was used, segment); outdated ones are passed over.
    """

    kept: dict[int, KeptSegment]
    marked: list[tuple[int, int]] = field(default_factory=list)

    def mark(self, one: KeptSegment) -> None:
        """Note a segment that may be evicted now."""
        if one.is_leaf:
            heappush(self.marked, (one.used, one.segment))
        if len(self.marked) > 4 * len(self.kept) + 64:
            self.marked = [(one.used, one.segment) for one in self.kept.values() if one.is_leaf]
            heapify(self.marked)

    def oldest(self) -> KeptSegment:
        """The first one, which is marked no more."""
        while True:
            used, segment = heappop(self.marked)
            one = self.kept.get(segment)
            if one is not None and one.used == used and one.is_leaf:
                return one


@dataclass(slots=True)
class Beginnings:
    """Segments that begin at one place, found by their first tokens.

    width: how many of these; segments can begin with the same `back` tokens, which their drafter's
    rows do not share.
    """

    width: int
    by_start: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.by_start)

    def add(self, segment: int, tokens: Ints) -> None:
        self.by_start.setdefault(self._key(tokens), []).append(segment)

    def remove(self, segment: int, tokens: Ints) -> None:
        key = self._key(tokens)
        self.by_start[key].remove(segment)
        if not self.by_start[key]:
            del self.by_start[key]

    def find(self, tokens: Ints) -> Iterator[int]:
        """Segments that may go on like this."""
        key = self._key(tokens)
        for width in range(len(key), 0, -1):
            yield from self.by_start.get(key[:width], ())

    def _key(self, tokens: Ints) -> tuple[int, ...]:
        return tuple(tokens[: self.width].tolist())


def shared_length(one: Ints, other: Ints) -> int:
    """How many tokens two texts begin with together."""
    most = min(len(one), len(other))
    if not most or one.item(0) != other.item(0):
        return 0
    return int((one[:most] != other[:most]).argmax()) or most  # 0: nothing differs
