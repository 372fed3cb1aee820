"""Segments of rows that stay for whoever begins with the same tokens, and how they are found."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from ..ops.kv.pool import SlotTable
from ..ops.kv.slots import NOBODY, Ints
from .segments import SegmentTree

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


class PrefixCache:
    """The kept segments of all pools of a run; pools[0] is the target's.

    Args:
        back: how many tokens before its end a match is cut, for the drafter's sake.
        shortest: tokens that a match must have.

    Attributes:
        idle: rows of the target's pool that no request needs; pinned: kept rows that some do.
    """

    def __init__(
        self,
        pools: Sequence[SlotTable],
        segments: SegmentTree,
        back: int,
        shortest: int = SHORTEST,
    ) -> None:
        self.pools = pools
        self.segments = segments
        self.back = back
        self.shortest = shortest
        self.kept: dict[int, KeptSegment] = {}
        self.figures = PrefixFigures()
        self.idle = self.pinned = 0
        self._tops: dict[str, Beginnings] = {}  # by salt: trees of their own
        self._clock = 0
        self._leaves = Leaves(self.kept)

    def _shelf(self) -> Beginnings:
        return Beginnings(self.back + 1)

    # -- who begins -------------------------------------------------------------------------------

    def match(self, ids: Ints, salt: str = "") -> tuple[list[int], int]:
        """The kept segments that ids begin with, from the root on, and how many ids they cover;
        the last one perhaps in part. Those of other salts are never looked at."""
        path = list[int]()
        covered = 0
        shelf = self._tops.get(salt, self._shelf())
        while covered < len(ids):
            rest = ids[covered:]
            found = [(shared_length(self.kept[one].tokens, rest), one) for one in shelf.find(rest)]
            length, best = max(found, default=(0, NOBODY))
            if not length:
                break
            path.append(best)
            covered += length
            if length < len(self.kept[best].tokens):
                break
            shelf = self.kept[best].behind
        return path, covered

    def reusable(self, ids: Ints, limit: int, salt: str = "") -> int:
        """Rows that a request with this prompt finds, `limit` at most; 0 if they are too few."""
        path, covered = self.match(ids, salt)
        length = min(covered - self.back, limit, len(ids) - 1)
        for pool in self.pools[1:]:
            length = min(length, self.covered(pool, path))
        return length if length >= self.shortest else 0

    def covered(self, pool: SlotTable, path: Sequence[int]) -> int:
        """So many positions of a path have their rows in a drafter's pool."""
        covered = 0
        for segment in path:
            first, last = pool.span_of(segment)
            if first > covered or last <= covered:
                break
            covered = last
        return covered

    def lend_(self, segment: int, ids: Ints, limit: int, salt: str = "") -> int:
        """Let a new request's prefix go on behind what is kept of its prompt.

        Args:
            segment: the prefix, without rows yet.

        Returns:
            The position that it begins at: so many rows are there already.
        """
        length = self.hang_(segment, ids, limit, salt)
        self.figures.reused += length
        return length

    def hang_(self, segment: int, ids: Ints, limit: int, salt: str) -> int:
        """The same of a segment whose rows are about to be kept themselves."""
        if length := self.reusable(ids, limit, salt):
            self.segments.hang(segment, self._end_at_(self.match(ids, salt)[0], length))
        return length

    def _end_at_(self, path: Iterable[int], length: int) -> int:
        """The kept segment that ends at a position of a path, split off if need be, and pinned."""
        last = next(self.kept[one] for one in path if self.kept[one].end >= length)
        ends = self._split_(last, length) if last.end > length else last.segment
        self._pin_(ends, 1)
        return ends

    def shorten_(self, segment: int, length: int) -> None:
        """A prefix that lies behind what is kept needs no more of it than its first rows."""
        parent = self.segments.parent(segment)
        path = reversed(self.segments.path(parent))
        self.segments.hang(segment, self._end_at_(path, length) if length else NOBODY)
        self._pin_(parent, -1)

    def release_(self, segment: int, *, drop: bool = False) -> None:
        """A request does not go on any more from what its prefix lies behind, of which nothing idle
        shall stay if it is to be dropped."""
        parent = self.segments.parent(segment)
        if parent == NOBODY:
            return
        self._pin_(parent, -1)
        idle = [one for one in self.segments.path(parent) if not self.kept[one].pins]
        if drop and idle:
            self._drop_(idle[-1])

    def _drop_(self, segment: int) -> None:
        """Evict an idle segment with all that lies behind it."""
        for one in reversed(list(self._subtree(segment))):
            self._evict_(self.kept[one])

    def _pin_(self, segment: int, change: int) -> None:
        now = self._tick()
        for one in self.segments.path(segment):
            kept = self.kept[one]
            if bool(kept.pins) != bool(kept.pins + change):
                self._count(kept, -1)
                kept.pins += change
                self._count(kept, 1)
            else:
                kept.pins += change
            kept.used = now
            self._leaves.mark(kept)

    # -- what stays -------------------------------------------------------------------------------

    def publish_(
        self, segment: int, more: Sequence[int], tokens: Ints, start: int, salt: str = ""
    ) -> None:
        """The first rows of a running request can be shared from now on; it goes on behind them.

        Args:
            segment: its prefix, whose own rows begin at `start`. more: the segments behind it that
                have some of the rows, where the prefix alone has not all.
            tokens: the ids of the rows.
        """
        above = self.segments.insert(segment)
        end = start + len(tokens)
        for pool in self.pools:
            for owner in (segment, *more):
                pool.split_(owner, above, end)
        self._place(KeptSegment(above, start, tokens, self._shelf(), 1, self._tick(), salt))

    def keep_(self, segment: int, tokens: Ints, start: int, salt: str = "") -> bool:
        """A segment that nobody writes to any more stays, if it lies behind what stays.

        Returns:
            False where there is nothing new in it: then its rows are the caller's to give back.
        """
        parent = self.segments.parent(segment)
        if not len(tokens) or (parent != NOBODY and parent not in self.kept):
            return False
        same = self._shelf_of(parent, salt).find(tokens)
        if any(shared_length(self.kept[one].tokens, tokens) == len(tokens) for one in same):
            return False
        self.segments.settle(segment)
        for pool in self.pools:
            pool.truncate_(segment, start + len(tokens))
            pool.split_(segment, segment, start + len(tokens))
        self._place(KeptSegment(segment, start, tokens, self._shelf(), 0, self._tick(), salt))
        return True

    def _place(self, kept: KeptSegment) -> None:
        """Take a new segment in."""
        self.kept[kept.segment] = kept
        parent = self.segments.parent(kept.segment)
        self._shelf_of(parent, kept.salt).add(kept.segment, kept.tokens)
        self._count(kept, 1)
        self._leaves.mark(kept)

    def _count(self, kept: KeptSegment, sign: int) -> None:
        """Its rows are idle or pinned from now on (or, with -1, no longer)."""
        rows = sign * len(kept.tokens)
        if kept.pins:
            self.pinned += rows
            return
        self.idle += rows
        for pool in self.pools:
            pool.rest_(kept.segment, idle=sign > 0)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _shelf_of(self, parent: int, salt: str) -> Beginnings:
        if parent == NOBODY:
            return self._tops.setdefault(salt, self._shelf())
        return self.kept[parent].behind

    def _split_(self, kept: KeptSegment, position: int) -> int:
        """Cut a segment in two; returns the first part, a new segment in front of the second."""
        self.figures.splits += 1
        parent = self.segments.parent(kept.segment)
        cut = position - kept.start
        shelf = self._shelf_of(parent, kept.salt)
        shelf.remove(kept.segment, kept.tokens)
        self._count(kept, -1)
        above = self.segments.insert(kept.segment)
        for pool in self.pools:
            pool.split_(kept.segment, above, position)
        own = kept.tokens[:cut]
        behind = self._shelf()
        first = KeptSegment(above, kept.start, own, behind, kept.pins, kept.used, kept.salt)
        kept.start = position
        kept.tokens = kept.tokens[cut:]
        self.kept[above] = first
        shelf.add(above, first.tokens)
        first.behind.add(kept.segment, kept.tokens)
        for part in (first, kept):
            self._count(part, 1)
        return above

    # -- what goes --------------------------------------------------------------------------------

    def make_room_(self, most: int) -> None:
        """Evict idle segments until their rows are no more than `most`."""
        while self.idle > max(most, 0):
            self._evict_(self._leaves.oldest())

    def clear_(self, first: int, last: int) -> None:
        """Evict the idle segments that have slots from `first` to before `last` in the target's
        pool, with all that lies behind them."""
        owners = np.unique(self.pools[0].owner[first:last])
        for segment in owners.tolist():
            if segment in self.kept and not self.kept[segment].pins:
                self._drop_(segment)

    def _subtree(self, segment: int) -> Iterator[int]:
        yield segment
        for below in self.kept[segment].behind.by_start.values():
            for one in below:
                yield from self._subtree(one)

    def _evict_(self, kept: KeptSegment) -> None:
        self.figures.evicted += 1
        self.figures.evicted_rows += len(kept.tokens)
        parent = self.segments.parent(kept.segment)
        shelf = self._shelf_of(parent, kept.salt)
        shelf.remove(kept.segment, kept.tokens)
        if parent == NOBODY and not len(shelf):
            del self._tops[kept.salt]
        self._count(kept, -1)
        del self.kept[kept.segment]
        for pool in self.pools:
            pool.retire_([kept.segment])
        self.segments.remove([kept.segment])
        if parent != NOBODY:
            self._leaves.mark(self.kept[parent])

    def check_integrity(self) -> None:
        """Raise AssertionError unless tree, labels and counts agree."""
        target = self.pools[0]
        idle = 0
        for kept in self.kept.values():
            name = f"kept segment {kept.segment}"
            rows = np.sort(target.position[target.owner == kept.segment])
            assert np.array_equal(rows, np.arange(kept.start, kept.end)), f"{name}: rows"
            parent = self.segments.parent(kept.segment)
            above = None if parent == NOBODY else self.kept[parent]
            start, salt = (0, kept.salt) if above is None else (above.end, above.salt)
            assert (start, salt) == (kept.start, kept.salt), f"{name} does not follow its parent"
            assert above is None or above.pins >= kept.pins, f"{name}: pins"
            idle += 0 if kept.pins else len(kept.tokens)
        assert idle == self.idle, "idle rows are counted wrongly"
        whole = sum(len(kept.tokens) for kept in self.kept.values())
        assert whole == self.idle + self.pinned, "kept rows are counted wrongly"
