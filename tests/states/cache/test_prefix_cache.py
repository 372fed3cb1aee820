"""The radix tree: whatever comes, goes, and is evicted, what a request finds is its own text."""

import os
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specsot.ops.kv.pool import Ints, KVCache
from specsot.states.prefix_cache import PrefixCache, shared_length
from specsot.states.request_table import SegmentTree

SLOTS, MIN_MATCH = 400, 16
STEM = tuple(range(100, 100 + 3 * MIN_MATCH))  # what most texts begin with, in part


def content(ids: tuple[int, ...]) -> float:
    return float(zlib.crc32(repr(ids).encode()) % 1_000_003)


@dataclass
class Reader:
    """A request: its text so far, and its segments."""

    text: list[int]
    prefix: int
    branch: int
    shared: int
    rows: int
    forks: list["Reader"] = field(default_factory=list)


class Engine(RuleBasedStateMachine):
    """Requests and branches, over the pools of a target and of a drafter that pairs or not."""

    @initialize(back=st.sampled_from([0, 1]), size=st.sampled_from([1, 4, 16]), apart=st.booleans())
    def begin(self, back: int, size: int, apart: bool) -> None:
        self.back, self.tree = back, SegmentTree(separate_homes=apart)
        both = (SLOTS, SLOTS + 64)
        self.pools = [KVCache(1, 1, 1, slots, block_size=size) for slots in both]
        self.cache = PrefixCache(self.pools, self.tree, back, MIN_MATCH)
        self.live: list[Reader] = []
        self.finished: list[tuple[int, ...]] = []

    def write(self, one: Reader, owner: int, first: int, last: int) -> None:
        home = self.tree.home[owner]
        for pool, back in zip(self.pools, (0, self.back), strict=True):
            positions = range(first if first == one.shared else first - back, last - back)
            slots = pool.append_([owner] * len(positions), positions, home=home)
            pool.commit_(slots, positions)
            for slot, at in zip(slots.tolist(), positions, strict=True):
                pool.data[0, :, 0, slot] = content(tuple(one.text[: at + 1 + back]))
        one.rows = last

    @property
    def readers(self) -> list[Reader]:
        return [reader for one in self.live for reader in (one, *one.forks)]

    def free(self) -> int:
        return SLOTS - sum(len(one.text) + 8 for one in self.readers)

    def make_room_(self, coming: Reader) -> None:
        own = sum(len(r.text) - r.shared for r in (*self.readers, coming))
        self.cache.evict_to_(SLOTS - own - self.cache.pinned)

    @rule(
        stem=st.integers(0, len(STEM)),
        tail=st.lists(st.integers(0, 2), min_size=2, max_size=30),
        answer=st.lists(st.integers(0, 2), max_size=10),
        again=st.none() | st.integers(0, 50),
    )
    def open(self, stem: int, tail: list[int], answer: list[int], again: int | None) -> None:
        text = [*STEM[:stem], *tail]
        if again is not None and self.finished:  # the next turn of a chat
            text = [*self.finished[again % len(self.finished)], *tail][:120]
        if self.free() < len(text) + len(answer) + 8:
            return
        prefix = self.tree.add()
        ids = np.array(text, np.int32)
        shared = self.cache.attach_(prefix, ids, len(ids))
        assert shared == 0 or MIN_MATCH <= shared < len(ids)
        one = Reader([*text, *answer], prefix, -1, shared, shared)
        self.check(one, prefix)
        self.make_room_(one)
        one.branch = self.tree.add(prefix)
        for first, last in ((shared, len(text)), (len(text), len(one.text))):
            self.write(one, one.branch, first, last)
        self.live.append(one)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50), share=st.floats(0, 1))
    def publish(self, which: int, share: float) -> None:
        one = self.live[which % len(self.live)]
        end = one.shared + int(share * (one.rows - one.shared))
        tokens = np.array(one.text[one.shared : end], np.int32)
        if len(tokens):
            self.cache.publish_(one.prefix, [one.branch], tokens, one.shared)
            one.shared = end
        self.check(one, one.branch)

    @precondition(lambda self: self.live and not self.back)  # a pair would span the fork
    @rule(which=st.integers(0, 50), tail=st.lists(st.integers(0, 2), min_size=1, max_size=20))
    def fork(self, which: int, tail: list[int]) -> None:
        """Another branch behind all rows of a request."""
        one = self.live[which % len(self.live)]
        if self.free() < len(one.text) + len(tail) + 8:
            return
        self.publish(which, 1.0)
        branch = self.tree.add(one.prefix)
        fork = Reader([*one.text, *tail], one.prefix, branch, one.shared, one.shared)
        self.make_room_(fork)
        self.write(fork, branch, fork.shared, len(fork.text))
        one.forks.append(fork)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50))
    def close(self, which: int) -> None:
        one = self.live.pop(which % len(self.live))
        for reader in (one, *one.forks):
            self.tree.set_parent(reader.branch, self.tree.parent[one.prefix])
            tokens = np.array(reader.text[reader.shared : reader.rows], np.int32)
            if not self.cache.insert_(reader.branch, tokens, reader.shared):
                self.drop(reader.branch)
            self.finished.append(tuple(reader.text))
        self.cache.detach_(one.prefix)
        self.drop(one.prefix)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        one = self.live.pop(which % len(self.live))
        for reader in (one, *one.forks):
            self.drop(reader.branch)
        self.cache.detach_(one.prefix)
        self.drop(one.prefix)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50))
    def preempt(self, which: int) -> None:
        text = self.live[which % len(self.live)].text
        self.close(which)
        self.open(0, text[:100], [0], None)

    def drop(self, owner: int) -> None:
        for pool in self.pools:
            pool.retire_([owner])
        self.tree.remove([owner])

    @rule(most=st.integers(0, SLOTS))
    def evict(self, most: int) -> None:
        self.cache.evict_to_(most)
        assert self.cache.idle <= most

    @rule(first=st.integers(0, SLOTS), count=st.integers(0, 200))
    def clear(self, first: int, count: int) -> None:
        self.cache.evict_slots_(first, first + count)
        owners = set(self.pools[0].owner[first : first + count].tolist())
        assert all(self.cache.nodes[one].pins for one in owners if one in self.cache.nodes)

    def check(self, one: Reader, owner: int) -> None:
        path = self.tree.path(owner)
        for pool, back in zip(self.pools, (0, self.back), strict=True):
            slots = np.flatnonzero(np.isin(pool.owner, path) & pool.committed)
            slots = slots[np.argsort(pool.position[slots])]
            positions = pool.position[slots].tolist()
            least = one.rows if not back or owner == one.prefix else one.rows - back
            assert positions[:least] == list(range(least)), "a row is missing or there twice"
            for slot, at in zip(slots.tolist(), positions[:least], strict=False):
                wanted = content(tuple(one.text[: at + 1 + back]))
                assert pool.data[0, 0, 0, slot] == wanted, "a row of another text"

    @invariant()
    def all_is_consistent(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        for pool in self.pools:
            pool.check_integrity()
        for one in self.readers:
            self.check(one, one.branch)
        alive = {owner for r in self.readers for owner in (r.branch, r.prefix)}
        alive |= set(self.cache.nodes)
        for pool in self.pools:
            assert set(pool.owner[pool.owner >= 0].tolist()) <= alive, "rows of nobody"

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.live:
            self.close(0)
        self.cache.evict_to_(0)
        assert not self.cache.nodes and not self.tree.parent
        assert all(pool.current_length == pool.idle_length == 0 for pool in self.pools)


TestEngine = Engine.TestCase
EXAMPLES = int(os.environ.get("SPECSOT_TEST_EXAMPLES", "30"))
TestEngine.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)


def ids(*parts: range) -> Ints:
    return np.array([token for part in parts for token in part], np.int32)


def append_(pool: KVCache, segment: int, positions: range) -> None:
    slots = pool.append_([segment] * len(positions), positions, home=segment)
    pool.commit_(slots, positions)


def insert_(cache: PrefixCache, text: Ints) -> bool:
    segment = cache.segments.add()
    append_(cache.pools[0], segment, range(len(text)))
    return cache.insert_(segment, text, 0)


def kept(text: Ints, back: int = 0) -> tuple[PrefixCache, KVCache]:
    pool = KVCache(1, 1, 1, SLOTS)
    cache = PrefixCache([pool], SegmentTree(), back, MIN_MATCH)
    assert insert_(cache, text)
    return cache, pool


@pytest.mark.parametrize(
    ("text", "back", "shared"),
    [
        (ids(range(100)), 0, 99),  # of an equal prompt one row is computed
        (ids(range(60), range(200, 220)), 0, 60),
        (ids(range(60), range(200, 220)), 1, 59),  # a pairing drafter takes one token less
        (ids(range(MIN_MATCH - 1), range(200, 260)), 0, 0),  # too few
    ],
)
def test_a_request_continues_after_what_it_has_in_common(
    text: Ints, back: int, shared: int
) -> None:
    cache, _ = kept(ids(range(100)), back)
    assert cache.attach_(cache.segments.add(), text, len(text)) == shared
    assert cache.figures.splits == (shared > 0)


@pytest.mark.parametrize("known", [0, 40, 99])
def test_rows_from_elsewhere_are_stored_behind_what_is_cached(known: int) -> None:
    """Each row is written once, at its own position, and all of them are found afterwards."""
    text = ids(range(100))
    cache, pool = kept(ids(range(known), range(200, 210)))
    written = list[int]()

    def write_(segment: int, start: int) -> None:
        written.extend(range(start, len(text)))
        append_(pool, segment, range(start, len(text)))

    assert cache.store_(text, "", write_)
    assert written == list(range(known, 100)) and cache.match(text)[1] == 100
    cache.check_integrity()
    assert not cache.store_(ids(range(300, 340)), "", write_, claimed=SLOTS - 39)
    assert len(written) == 100 - known and len(cache.segments.parent) == len(cache.nodes)


def test_a_match_inside_a_segment_splits_it_and_moves_nothing() -> None:
    cache, pool = kept(ids(range(100)))
    before, bytes_moved = pool.data.data_ptr(), sum(pool.ledger.bytes.values())
    where = {int(pool.position[slot]): slot for slot in np.flatnonzero(pool.owner >= 0)}
    other = cache.segments.add()
    assert cache.attach_(other, ids(range(60), range(200, 220)), 80) == 60
    first, second = (
        cache.segments.path(other)[1],
        next(one for one in cache.nodes if cache.nodes[one].start == 60),
    )
    assert cache.segments.parent[second] == first and cache.figures.splits == 1
    assert {int(pool.position[s]): s for s in np.flatnonzero(pool.owner >= 0)} == where
    assert pool.data.data_ptr() == before and sum(pool.ledger.bytes.values()) == bytes_moved
    assert cache.idle == 40 and cache.pinned == 60 == pool.current_length - pool.idle_length


@pytest.mark.parametrize("touched", [0, 1])
def test_what_was_not_used_for_longest_goes_first(touched: int) -> None:
    cache, _ = kept(ids(range(50)))
    insert_(cache, ids(range(100, 150)))
    texts = (ids(range(50), range(9)), ids(range(100, 150), range(9)))
    reader = cache.segments.add()
    assert cache.attach_(reader, texts[touched], 59) == 50
    cache.detach_(reader)
    cache.segments.remove([reader])
    cache.evict_to_(50)
    assert [cache.match(text)[1] for text in texts] == [50 * (touched == n) for n in (0, 1)]


def test_the_same_text_is_not_kept_twice() -> None:
    assert not insert_(kept(ids(range(50)))[0], ids(range(50)))


def test_shared_length() -> None:
    assert shared_length(ids(range(5)), ids(range(3))) == 3
    assert shared_length(ids(range(5)), ids(range(1, 3))) == 0
