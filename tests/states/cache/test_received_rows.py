"""Rows of another engine are put into caches that hold other and overlapping prefixes: each gets
its own position and a slot of its own, and nothing that was there changes.

A row holds a number that only its own text gives it, so a row of another text, of another position
or in a wrong place is found. Faults are planted to show that."""

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from specsot.ops.kv.pool import KVCache
from specsot.states import prefix_cache
from specsot.states.prefix_cache import PrefixCache
from specsot.states.request_table import SegmentTree

LAYERS, HEADS, DIM = 2, 2, 2
SLOTS, MIN_MATCH = 400, 16
TEXT = tuple(range(100))
OFFSETS = torch.arange(LAYERS * 2 * HEADS * DIM).view(LAYERS, 2, HEADS, DIM) / 32

Text = tuple[int, ...]


@cache
def row_of(text: Text) -> torch.Tensor:
    """The keys and values after a text, [layers, 2, kv_heads, head_dim]."""
    return zlib.crc32(repr(text).encode()) % 10_007 + OFFSETS


def rows_of(text: Text, positions: Sequence[int], back: int) -> torch.Tensor:
    return torch.stack([row_of(text[: at + 1 + back]) for at in positions], 3)


class Holder:
    """The caches of an engine, with rows of a target and of a drafter, which pairs a row with the
    next token (back = 1) or not. cached: texts by salt and length of their rows, of both pools."""

    def __init__(self, back: int, block_size: int = 1, apart: bool = False) -> None:
        self.back = back
        tree = SegmentTree(separate_homes=apart)
        sizes = (SLOTS, SLOTS + 64)
        self.pools = [KVCache(LAYERS, HEADS, DIM, n, block_size=block_size) for n in sizes]
        self.cache = PrefixCache(self.pools, tree, back, MIN_MATCH)
        self.running = list[tuple[int, Text]]()
        self.cached = list[tuple[Text, str]]()

    def rows(self, text: Text) -> tuple[int, int]:
        return len(text), len(text) - self.back

    def write_(self, segment: int, text: Text, first: int, ends: Sequence[int]) -> None:
        for pool, back, end in zip(self.pools, (0, self.back), ends, strict=True):
            positions = range(min(first, end), end)
            slots = pool.append_([segment] * len(positions), positions, home=segment)
            pool.commit_(slots, positions)
            if positions:
                pool.data[:, :, :, slots] = rows_of(text, positions, back)

    def hold_(self, text: Text, salt: str = "", drafted: int | None = None) -> None:
        """Cache a text as a request that has computed it; drafted: rows of the drafter's pool."""
        segment = self.cache.segments.add()
        start = self.cache.attach_(segment, np.array(text, np.int32), len(text), salt)
        ends = self.rows(text) if drafted is None else (len(text), drafted)
        self.write_(segment, text, start, ends)
        self.cache.detach_(segment)
        assert self.cache.insert_(segment, np.array(text[start:], np.int32), start, salt)
        self.cached.append((text, salt))

    def run_(self, text: Text) -> None:
        """A request that runs: its rows are not cached."""
        segment = self.cache.segments.add()
        self.write_(segment, text, 0, self.rows(text))
        self.running.append((segment, text))

    @property
    def claimed(self) -> int:
        return sum(len(text) for _, text in self.running)

    def check(self, segments: Sequence[int], text: Text, ends: Sequence[int]) -> None:
        """These segments hold a row for each position of a text."""
        for pool, back, end in zip(self.pools, (0, self.back), ends, strict=True):
            slots = np.flatnonzero(np.isin(pool.owner, segments) & pool.committed)
            slots = slots[pool.position[slots] < end]
            slots = slots[np.argsort(pool.position[slots])]
            assert pool.position[slots].tolist() == list(range(end)), "missing, or there twice"
            if end:
                expected = rows_of(text, range(end), back)
                assert torch.equal(pool.data[:, :, :, slots], expected), "rows of another text"

    def check_all(self) -> None:
        self.cache.check_integrity()
        for segment, text in self.running:
            self.check([segment], text, self.rows(text))
        for text, salt in self.cached:
            path, covered = self.cache.match(np.array(text, np.int32), salt)
            assert covered == len(text), "evicted"
            drafted = min(self.cache.covered(self.pools[1], path), len(text) - self.back)
            self.check(path, text, (len(text), drafted))
        known = {*self.cache.nodes, *(segment for segment, _ in self.running)}
        for pool in self.pools:
            pool.check_integrity()
            owners = set(pool.owner[pool.owner >= 0].tolist())
            assert owners <= known, "slots that are lost"
        assert set(self.cache.segments.parent) <= known, "segments that are lost"


def other(first: int, length: int = 60) -> Text:
    return tuple(range(first, first + length))


def fragmented(one: Holder) -> None:
    """Requests run between gaps of evicted prompts, none of which has room for the text."""
    for first in range(1000, 1600, 100):
        one.hold_(other(first, 40))
        one.run_(other(first + 500, 20))
    one.cache.evict_to_(0)
    one.cached.clear()


def nested(one: Holder) -> None:
    one.hold_((*TEXT[:30], 7, 8))
    one.hold_((*TEXT[:70], 7, 8, 9))
    one.hold_((*TEXT[:50], 7))


HELD: dict[str, Callable[[Holder], None]] = {
    "nothing": lambda one: None,
    "another prompt": lambda one: one.hold_(other(500)),
    "a part of a longer segment": lambda one: one.hold_((*TEXT[:40], *other(500))),
    "its beginning": lambda one: one.hold_(TEXT[:64]),
    "too few of its tokens": lambda one: one.hold_((*TEXT[: MIN_MATCH - 2], *other(500))),
    "beginnings that branch": nested,
    "all but the last token": lambda one: one.hold_(TEXT[:-1]),
    "the same for another salt": lambda one: one.hold_(TEXT, "other"),
    "fewer rows of the drafter": lambda one: one.hold_(TEXT[:64], drafted=40),
    "all tokens and few rows of the drafter": lambda one: one.hold_(TEXT, drafted=40),
    "gaps between requests": fragmented,
}


def send(one: Holder, text: Text) -> bool:
    """Move a prefix from an engine that has computed it, after another one, to this engine."""
    source = Holder(one.back)
    source.hold_(other(3000, 37))
    source.hold_((*text[:50], *other(4000, 20)))
    source.hold_(text)
    parts = source.cache.take_out(text, rows := source.rows(text))
    assert source.cache.movable_rows(text) == rows
    source.check_all()
    return one.cache.put_in_(text, rows, parts, claimed=one.claimed)


def check_received(held: str, back: int, block_size: int = 1, apart: bool = False) -> None:
    one = Holder(back, block_size, apart)
    HELD[held](one)
    one.check_all()
    stored = send(one, TEXT)
    one.cached.append((TEXT, ""))
    one.check_all()
    if stored:
        assert one.cache.movable_rows(TEXT) == one.rows(TEXT)
        assert not send(one, TEXT), "they are there already"
    longer = (*TEXT, *other(2000, 30))
    assert send(one, longer)
    one.cached.append((longer, ""))
    one.check_all()
    assert one.cache.movable_rows(longer) == one.rows(longer)


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("held", HELD)
def test_received_rows_are_those_of_their_text(held: str, back: int, block_size: int) -> None:
    check_received(held, back, block_size, apart=block_size > 1)


def test_rows_without_room_are_refused_and_leave_nothing() -> None:
    one = Holder(1)
    one.run_(other(500, SLOTS - 50))
    assert not send(one, TEXT)
    one.check_all()
    assert one.cache.match(np.array(TEXT, np.int32))[1] == 0


# -- planted faults -------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A function of an owner, and the wrong one, called with the good one."""

    owner: Any
    function: str
    wrong: Callable[..., Any]


def of_write(**change: Callable[..., Any]) -> Fault:
    """Another argument of the function that writes received rows into a pool."""

    def wrong(good: Any, self: Any, rows: Any, position: Any, owner: int, cause: str) -> None:
        given = {"rows": rows, "position": np.asarray(position, np.int32)}
        given |= {name: change[name](**given) for name in change}
        good(self, given["rows"], given["position"], owner, cause)

    return Fault(KVCache, "put_in_", wrong)


def first_rows(good: Any, self: PrefixCache, ids: Any, rows: Any, parts: Any, **more: Any) -> bool:
    """Where rows are cached already, those of the beginning are written once more after them."""
    _, covered = self.match(np.asarray(ids, np.int32), more.get("salt", ""))
    rolled = [torch.roll(part, covered // 2, 3) for part in parts]
    return bool(good(self, ids, rows, rolled if covered else parts, **more))


def nothing_is_shared(good: Any, self: Any, *given: Any) -> Any:
    """What is stored does not continue after cached rows."""
    self.attach_ = lambda *place: 0
    try:
        return good(self, *given)
    finally:
        del self.attach_


def starts_one_on(
    good: Any, self: PrefixCache, ids: Any, salt: str, write_: Any, *more: Any
) -> Any:
    return good(self, ids, salt, lambda segment, start: write_(segment, start + bool(start)), *more)


def wrong_slots(good: Any, self: Any, rows: Any, position: Any, owner: int, row: int) -> None:
    good(self, rows, position, owner, row)
    slots = self.slots_owned(owner)
    if len(slots) > 1:
        self.data[:, :, :, slots] = self.data[:, :, :, np.roll(slots, 1)]


def occupied_slots(good: Any, self: Any, rows: Any, position: Any, owner: int, row: int) -> None:
    """Rows overwrite what is in the first slots, whoever has them."""
    good(self, rows, position, owner, row)
    self.data[:, :, :, : rows.shape[3]] = rows


FAULTS = {
    "rows are shifted": of_write(rows=lambda rows, position: torch.roll(rows, 1, 3)),
    "keys and values change places": of_write(rows=lambda rows, position: rows.flip(1)),
    "heads change places": of_write(rows=lambda rows, position: rows.flip(2)),
    "positions are one on": of_write(position=lambda rows, position: position + 1),
    "positions are reversed": of_write(position=lambda rows, position: position[::-1].copy()),
    "positions begin at 0": of_write(
        position=lambda rows, position: np.arange(len(position), dtype=np.int32)
    ),
    "other rows of what is sent": Fault(PrefixCache, "put_in_", first_rows),
    "what is cached is written again": Fault(PrefixCache, "store_", nothing_is_shared),
    "a row after the cached ones is left out": Fault(PrefixCache, "store_", starts_one_on),
    "rows are written to the wrong slots": Fault(KVCache, "_write_rows_", wrong_slots),
    "rows are written over others": Fault(KVCache, "_write_rows_", occupied_slots),
    "more is shared than is": Fault(
        prefix_cache,
        "shared_length",
        lambda good, first, second: min(good(first, second) + 5, len(first), len(second)),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_found_in_a_cache_that_holds_something(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    good = getattr(fault.owner, fault.function)
    with monkeypatch.context() as patch:
        patch.setattr(
            fault.owner, fault.function, lambda *given, **more: fault.wrong(good, *given, **more)
        )
        found = next(held for held in HELD if held != "nothing" and fails(held))
    check_received(found, 1)


def fails(held: str) -> bool:
    try:
        check_received(held, 1)
    except AssertionError:
        return True
    return False
