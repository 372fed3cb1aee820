"""The prefix cache: a radix tree of segments that new requests can continue after.

Rows of ended requests stay in the pools as segments with their token ids. A match that ends inside
a segment splits it: no row is moved. Segments that no request continues after are idle; they are
evicted when their slots are needed, least recently used leaves first. EAGLE pairs a row with the
next token, so its matches end one token early (`lookback`)."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from torch import Tensor

from ..ops.kv.pool import NO_SEGMENT, Ints, KVCache
from .request_table import SegmentTree

# Minimal tokens of a match: to recompute fewer rows is faster than to gather them in every forward.
MIN_MATCH = 64
MOVED = "regroup"  # in the ledger: rows of another engine


@dataclass(slots=True)
class PrefixFigures:
    """Counters: prompt tokens looked up and reused, segments split, segments and rows evicted."""

    asked: int = 0
    reused: int = 0
    splits: int = 0
    evicted: int = 0
    evicted_rows: int = 0


Children = dict[tuple[int, ...], list[int]]


@dataclass(eq=False, slots=True)
class CachedSegment:
    """A node of the tree: a segment with its token ids, int32, the first at position `start`.
    children: cached segments that continue it, by their first tokens, which they may share in part.
    pins: requests that continue after it or its descendants. used: time of its last use. salt: of
    the requests that may continue after it."""

    segment: int
    start: int
    tokens: Ints
    children: "Children" = field(default_factory=dict)
    pins: int = 0
    used: int = 0
    salt: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_evictable(self) -> bool:
        return not self.pins and not self.children


def shared_length(first: Ints, second: Ints) -> int:
    length = min(len(first), len(second))
    if not length or first.item(0) != second.item(0):
        return 0
    return int((first[:length] != second[:length]).argmax()) or length  # 0: nothing differs


@dataclass(eq=False)
class PrefixCache:
    """The cached segments of all pools of a run; pools[0] is the target's. idle: rows of the
    target's pool that no request continues after; pinned: the other ones."""

    pools: Sequence[KVCache]
    segments: SegmentTree
    lookback: int
    min_match: int = MIN_MATCH
    nodes: dict[int, CachedSegment] = field(default_factory=dict)
    figures: PrefixFigures = field(default_factory=PrefixFigures)
    idle: int = 0
    pinned: int = 0
    _roots: dict[str, Children] = field(default_factory=dict)  # a tree per salt
    _clock: Iterator[int] = field(default_factory=itertools.count)
    _evictable: list[tuple[int, int]] = field(default_factory=list)  # a heap of last use, segment

    def _key(self, tokens: Ints) -> tuple[int, ...]:
        return tuple(tokens[: self.lookback + 1].tolist())

    def _candidates(self, children: Children, tokens: Ints) -> Iterator[int]:
        key = self._key(tokens)
        for width in range(len(key), 0, -1):
            yield from children.get(key[:width], ())

    def _link_(self, node: CachedSegment) -> None:
        siblings = self._siblings(self.segments.parent[node.segment], node.salt)
        siblings.setdefault(self._key(node.tokens), []).append(node.segment)

    def _unlink_(self, node: CachedSegment) -> Children:
        """Remove a segment from its siblings; returns the others."""
        siblings = self._siblings(self.segments.parent[node.segment], node.salt)
        key = self._key(node.tokens)
        siblings[key].remove(node.segment)
        if not siblings[key]:
            del siblings[key]
        return siblings

    def match(self, ids: Ints, salt: str = "", *, drafts: bool = True) -> tuple[list[int], int]:
        """The cached segments on the path of these ids, and the number of ids that they cover; the
        last segment may match in part. drafts: prefer segments whose rows the drafters' pools have
        too; the rows of an answer of one token are in the target's pool alone."""
        path = list[int]()
        covered = 0
        children = self._roots.get(salt, {})
        while covered < len(ids):
            rest = ids[covered:]
            candidates = self._candidates(children, rest)
            matches = [(shared_length(self.nodes[s].tokens, rest), s) for s in candidates]
            if drafts and len(matches) > 1:
                _, length, best = max((self._drafted(s, size), size, s) for size, s in matches)
            else:
                length, best = max(matches, default=(0, NO_SEGMENT))
            if not length:
                break
            path.append(best)
            covered += length
            if length < len(self.nodes[best].tokens):
                break
            children = self.nodes[best].children
        return path, covered

    def reusable(self, ids: Ints, limit: int, salt: str = "", *, drafts: bool = True) -> int:
        """Cached rows for this prompt, at most `limit`; 0 if they are fewer than `min_match`.
        drafts: only rows that the drafters' pools have too."""
        path, covered = self.match(ids, salt, drafts=drafts)
        drafted = [self.covered(pool, path) for pool in self.pools[1:] if drafts]
        length = min(covered - self.lookback, limit, len(ids) - 1, *drafted)
        return length if length >= self.min_match else 0

    def _drafted(self, segment: int, length: int) -> int:
        """How many of the first `length` rows of a segment the drafters' pools have."""
        start = self.nodes[segment].start
        return min([length, *(pool.span_of(segment)[1] - start for pool in self.pools[1:])])

    def covered(self, pool: KVCache, path: Sequence[int]) -> int:
        """Number of positions of a path with rows in a drafter's pool."""
        covered = 0
        for segment in path:
            first, last = pool.span_of(segment)
            if first > covered or last <= covered:
                break
            covered = last
        return covered

    def attach_(
        self, segment: int, ids: Ints, limit: int, salt: str = "", *, drafts: bool = True
    ) -> int:
        """Let a segment without rows continue after the cached rows of these ids, and pin them;
        drafts: as for `reusable`. Returns the position of the segment's first own row."""
        if length := self.reusable(ids, limit, salt, drafts=drafts):
            path, _ = self.match(ids, salt, drafts=drafts)
            self.segments.set_parent(segment, self._pin_end_at_(path, length))
        return length

    def _pin_end_at_(self, path: Iterable[int], length: int) -> int:
        """Pin and return the segment that ends at a position of a path, split off if need be."""
        last = next(self.nodes[s] for s in path if self.nodes[s].end >= length)
        segment = self._split_(last, length) if last.end > length else last.segment
        self._pin_(segment, 1)
        return segment

    def shorten_(self, segment: int, length: int) -> None:
        """Let a segment continue after the first `length` cached rows only."""
        parent = self.segments.parent[segment]
        path = reversed(self.segments.path(parent))
        self.segments.set_parent(segment, self._pin_end_at_(path, length) if length else NO_SEGMENT)
        self._pin_(parent, -1)

    def detach_(self, segment: int, *, drop: bool = False) -> None:
        """Unpin the cached rows that a segment continues after; drop: evict the idle ones."""
        parent = self.segments.parent[segment]
        if parent == NO_SEGMENT:
            return
        self._pin_(parent, -1)
        idle = [s for s in self.segments.path(parent) if not self.nodes[s].pins]
        if drop and idle:
            self._evict_subtree_(idle[-1])

    def _pin_(self, segment: int, change: int) -> None:
        now = next(self._clock)
        for member in self.segments.path(segment):
            node = self.nodes[member]
            self._count(node, -1)
            node.pins += change
            self._count(node, 1)
            node.used = now
            self._offer_(node)

    def publish_(
        self, segment: int, more: Sequence[int], tokens: Ints, start: int, salt: str = ""
    ) -> None:
        """Cache rows of the prefix of a running request, which continues after them; more:
        descendants that hold some of the rows."""
        above = self.segments.insert_above(segment)
        for pool in self.pools:
            for owner in (segment, *more):
                pool.split_(owner, above, start + len(tokens))
        self._insert(above, start, tokens, salt=salt, pins=1)

    def insert_(self, segment: int, tokens: Ints, start: int, salt: str = "") -> bool:
        """Cache a segment, if its parent is cached; False if its tokens are cached already."""
        parent = self.segments.parent[segment]
        if not len(tokens) or (parent != NO_SEGMENT and parent not in self.nodes):
            return False
        siblings = self._candidates(self._siblings(parent, salt), tokens)
        if any(shared_length(self.nodes[s].tokens, tokens) == len(tokens) for s in siblings):
            return False
        self.segments.make_home(segment)
        for pool in self.pools:
            pool.truncate_(segment, start + len(tokens))
            pool.split_(segment, segment, start + len(tokens))
        self._insert(segment, start, tokens, salt=salt, pins=0)
        return True

    def store_(
        self, ids: Ints, salt: str, write_: Callable[[int, int], None], claimed: int = 0
    ) -> bool:
        """Cache the rows of these ids that are not cached yet: `write_` puts them into the pools as
        those of a segment from a position on. False if too few slots are free; claimed: slots that
        are held or reserved besides the pinned rows. False too if the target's rows are all cached,
        and only rows of a drafter are missing."""
        segment = self.segments.add()
        start = self.attach_(segment, ids, len(ids), salt)
        free = self.pools[0].slots - claimed - self.pinned - (len(ids) - start)
        if free >= 0:
            self.evict_to_(free)
            write_(segment, start)
        self.detach_(segment)
        if free >= 0 and self.insert_(segment, ids[start:], start, salt):
            return True
        for pool in self.pools:
            pool.retire_([segment])
        self.segments.remove([segment])
        return False

    def movable_rows(self, ids: Sequence[int], salt: str = "") -> tuple[int, ...]:
        """The number of cached rows of a prefix that can be moved to another engine, for each pool:
        the same of all, but for the last rows, which a drafter may lack; () if there are few."""
        path, covered = self.match(np.asarray(ids, np.int32), salt)
        drafted = [self.covered(pool, path) for pool in self.pools[1:]]
        rows = min([covered, *(count + self.lookback for count in drafted)])
        return (rows, *(min(rows, count) for count in drafted)) if rows >= self.min_match else ()

    def take_out(self, ids: Sequence[int], rows: Sequence[int], salt: str = "") -> list[Tensor]:
        """Copies of the first cached rows of `ids`, [layers, 2, kv_heads, R, head_dim] of each
        pool. Raises LookupError if they are not cached any more."""
        path, covered = self.match(np.asarray(ids, np.int32), salt)
        parts = []
        for pool, count in zip(self.pools, rows, strict=True):
            slots = np.concatenate([np.zeros(0, np.int32), *map(pool.slots_of, path)])
            slots = slots[pool.position[slots] < count]
            if slots.size != count or covered < rows[0]:
                raise LookupError(f"{count} rows are needed, {slots.size} are cached")
            index = torch.from_numpy(slots.astype(np.int64)).to(pool.data.device)
            parts.append(pool.data.index_select(3, index))
        return parts

    def put_in_(
        self,
        ids: Sequence[int],
        rows: Sequence[int],
        parts: Sequence[Tensor],
        *,
        salt: str = "",
        claimed: int = 0,
    ) -> bool:
        """Cache rows that `take_out` returned in another engine; False if too few slots are free or
        they are cached already. claimed: as for `store_`."""
        if self.movable_rows(ids, salt) == tuple(rows):
            return False

        def write_(segment: int, start: int) -> None:
            for pool, count, part in zip(self.pools, rows, parts, strict=True):
                positions = np.arange(min(start, count), count)
                pool.put_in_(part[:, :, :, start:], positions, segment, MOVED)

        return self.store_(np.asarray(ids, np.int32), salt, write_, claimed)

    def _insert(self, segment: int, start: int, tokens: Ints, *, salt: str, pins: int) -> None:
        node = CachedSegment(segment, start, tokens, pins=pins, used=next(self._clock), salt=salt)
        self.nodes[segment] = node
        self._link_(node)
        self._count(node, 1)
        self._offer_(node)

    def _count(self, node: CachedSegment, sign: int) -> None:
        rows = sign * len(node.tokens)
        if node.pins:
            self.pinned += rows
            return
        self.idle += rows
        for pool in self.pools:
            pool.rest_(node.segment, idle=sign > 0)

    def _siblings(self, parent: int, salt: str) -> Children:
        if parent == NO_SEGMENT:
            return self._roots.setdefault(salt, {})
        return self.nodes[parent].children

    def _split_(self, node: CachedSegment, position: int) -> int:
        """Split a segment in two; returns the first part, a new segment above the second."""
        self.figures.splits += 1
        cut = position - node.start
        self._unlink_(node)
        self._count(node, -1)
        above = self.segments.insert_above(node.segment)
        for pool in self.pools:
            pool.split_(node.segment, above, position)
        first = replace(node, segment=above, tokens=node.tokens[:cut], children={})
        node.start = position
        node.tokens = node.tokens[cut:]
        self.nodes[above] = first
        for part in (first, node):
            self._link_(part)
            self._count(part, 1)
        return above

    def evict_to_(self, rows: int) -> None:
        """Evict idle segments until at most `rows` rows are idle."""
        while self.idle > max(rows, 0):
            used, segment = heappop(self._evictable)
            node = self.nodes.get(segment)
            if node is not None and node.used == used and node.is_evictable:
                self._evict_(node)

    def _offer_(self, node: CachedSegment) -> None:
        """Let a segment be evicted when it is the least recently used one, if it is evictable."""
        if node.is_evictable:
            heappush(self._evictable, (node.used, node.segment))
        if len(self._evictable) > 4 * len(self.nodes) + 64:
            evictable = (node for node in self.nodes.values() if node.is_evictable)
            self._evictable = [(node.used, node.segment) for node in evictable]
            heapify(self._evictable)

    def evict_slots_(self, first: int, last: int) -> None:
        """Evict idle segments with slots in [first, last) of the target's pool, and descendants."""
        for segment in np.unique(self.pools[0].owner[first:last]).tolist():
            if segment in self.nodes and not self.nodes[segment].pins:
                self._evict_subtree_(segment)

    def _evict_subtree_(self, segment: int) -> None:
        node = self.nodes[segment]
        for child in [child for children in node.children.values() for child in children]:
            self._evict_subtree_(child)
        self._evict_(node)

    def _evict_(self, node: CachedSegment) -> None:
        self.figures.evicted += 1
        self.figures.evicted_rows += len(node.tokens)
        parent = self.segments.parent[node.segment]
        if not self._unlink_(node) and parent == NO_SEGMENT:
            del self._roots[node.salt]
        self._count(node, -1)
        del self.nodes[node.segment]
        for pool in self.pools:
            pool.retire_([node.segment])
        self.segments.remove([node.segment])
        if parent != NO_SEGMENT:
            self._offer_(self.nodes[parent])

    def check_integrity(self) -> None:
        target = self.pools[0]
        idle = 0
        for node in self.nodes.values():
            name = f"cached segment {node.segment}"
            rows = np.sort(target.position[target.owner == node.segment])
            assert np.array_equal(rows, np.arange(node.start, node.end)), f"{name}: rows"
            parent = self.segments.parent[node.segment]
            above = None if parent == NO_SEGMENT else self.nodes[parent]
            start, salt = (0, node.salt) if above is None else (above.end, above.salt)
            assert (start, salt) == (node.start, node.salt), f"{name} does not follow its parent"
            assert above is None or above.pins >= node.pins, f"{name}: pins"
            idle += 0 if node.pins else len(node.tokens)
        assert idle == self.idle, "idle rows are counted wrongly"
        total = sum(len(node.tokens) for node in self.nodes.values())
        assert total == self.idle + self.pinned, "cached rows are counted wrongly"
