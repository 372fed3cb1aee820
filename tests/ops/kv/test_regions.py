"""Regions: where the slots of a root lie, and what a forward of that root has to read."""

import numpy as np
import pytest
from helpers.pools import pool
from hypothesis import given
from hypothesis import strategies as st

from specsot.ops.kv.pool import FREE, NO_SEGMENT, SPREAD, KVCache, PoolFullError, Region


@pytest.mark.parametrize(
    ("others", "size", "first"),
    [
        ([], 10, 0),
        ([(0, 10)], 10, 10),
        ([(10, 10)], 10, 0),
        ([(9, 10)], 10, 19),
        ([(20, 10), (0, 10)], 10, 10),
        ([(0, 10), (19, 10)], 10, 29),
        ([(0, 0), (0, 0)], 40, 0),
    ],
)
def test_a_region_is_the_first_gap_that_is_large_enough(
    others: list[tuple[int, int]], size: int, first: int
) -> None:
    found = Region.between([Region(*one) for one in others], size, 40)
    assert (found.first, found.size) == (first, size)
    assert Region.between([Region(*one) for one in others], 41, 40) == Region()


@given(st.lists(st.integers(1, 30), max_size=12), st.sets(st.integers(0, 11)))
def test_regions_never_overlap(sizes: list[int], closed: set[int]) -> None:
    regions: list[Region] = []
    for number, size in enumerate(sizes):
        regions.append(Region.between(regions, size, 120))
        if number in closed:
            regions.pop(0)
    kept = [range(r.first, r.first + r.size) for r in regions]
    slots = [slot for one in kept for slot in one]
    assert len(set(slots)) == len(slots) and all(slot < 120 for slot in slots)


def test_the_lowest_free_slots_from_its_first_on_are_taken() -> None:
    def left() -> KVCache:
        kv = pool(10)
        kv.append_([9] * 7, range(7))
        kv.release_([0, 1, 2, 3, 5])
        kv.regions[1] = Region(4, 3)
        return kv

    assert left().append_([1] * 2, [0, 1], home=1).tolist() == [5, 7], "it may go on behind its end"
    slots = left().append_([1] * 8, range(8), home=1)
    assert slots.tolist() == [0, 1, 2, 3, 5, 7, 8, 9], "or begin again"
    with pytest.raises(PoolFullError, match="9 slots requested, 8 free"):
        left().append_([1] * 9, range(9), home=1)


def test_a_region_remembers_between_which_slots_it_was_used() -> None:
    region = Region(8, 8)
    region.include_(9, 12)
    assert (region.low, region.high) == (9, 13)
    region.include_(10, 10)
    region.include_(8, 20)
    assert (region.low, region.high) == (8, 21)


# -- regions of a pool ---------------------------------------------------------------------------


def take(kv: KVCache, root: int, count: int, owner: int | None = None) -> list[int]:
    mine = root if owner is None else owner
    start = int(np.count_nonzero(kv.owner == mine))
    positions = list(range(start, start + count))
    slots = kv.append_([mine] * count, positions, home=root)
    kv.commit_(slots, positions)
    return slots.tolist()


def test_equal_shares_lie_at_equal_distances() -> None:
    kv = pool(64)
    for root in (1, 2, 3, 4):
        kv.open_(root, 16)
    for root in (3, 1, 4, 2):  # in whatever order they take slots
        assert take(kv, root, 3)[0] == 16 * (root - 1)
    assert [kv.keys_of([root]) for root in (1, 2, 3, 4)] == [(0, 3), (16, 3), (32, 3), (48, 3)]
    kv.check_integrity()


def test_the_share_of_a_root_that_ended_goes_to_the_next_one() -> None:
    kv = pool(80)
    for root in range(5):
        kv.open_(root, 16)
        take(kv, root, 2)
    kv.retire_([1, 2])
    assert 2 not in kv.regions
    kv.open_(5, 24)
    assert take(kv, 5, 1) == [16], "two gaps that touch are one"
    kv.open_(6, 16)
    assert kv.regions[6].size == 0, "eight slots are left there, which are too few"


def test_a_root_whose_region_is_full_takes_slots_behind_it() -> None:
    kv = pool(32)
    kv.open_(1, 4)
    kv.open_(2, 4)
    take(kv, 2, 1)
    assert take(kv, 1, 6) == [0, 1, 2, 3, 5, 6], "slot 4 is another root's"
    assert kv.keys_of([1]) == (0, 7)
    with pytest.raises(PoolFullError):
        take(kv, 1, 26)
    kv.check_integrity()


def test_slots_of_several_roots_are_taken_in_the_order_of_their_owners() -> None:
    kv = pool(32)
    kv.open_(1, 8)
    kv.open_(2, 8)
    slots = kv.append_([7, 8, 7, 8], [0, 0, 1, 1], home=[1, 2, 1, 2])
    assert slots.tolist() == [0, 8, 1, 9]
    assert kv.home[slots].tolist() == [1, 2, 1, 2] and kv.owner[slots].tolist() == [7, 8, 7, 8]


@pytest.mark.parametrize(("strangers", "is_run"), [(SPREAD + 3, True), (SPREAD + 4, False)])
def test_what_lies_too_far_apart_is_read_as_a_list(strangers: int, is_run: bool) -> None:
    """A run holds as many slots of others as there are own ones, and SPREAD more."""
    kv = pool(3 * SPREAD)
    take(kv, 9, 5)
    mine = take(kv, 1, 2)
    take(kv, 2, strangers)
    mine += take(kv, 1, 1)
    keys = kv.keys_of([1])
    if is_run:
        assert keys == (5, strangers + 3)
    else:
        assert isinstance(keys, np.ndarray) and keys.dtype == np.int32
        assert keys.tolist() == mine
    assert kv.keys_of([1, 2]) == (5, strangers + 3)


def test_roots_without_regions_share_what_is_free() -> None:
    kv = pool(16)
    assert kv.append_([1, 2, 1], [0, 0, 1], home=[1, 2, 1]).tolist() == [0, 2, 1]
    kv.open_(3, 12)
    kv.open_(4, 12)
    assert take(kv, 4, 3) == [3, 4, 5], "nothing is kept free for one that found no gap"


def test_regions_are_of_pools_with_one_row() -> None:
    kv = pool(8, 3)
    kv.open_(1, 4)
    assert kv.regions[1].size == 0
    assert kv.append_([1, 1], [0, 1], 2, 1).tolist() == [16, 17]
    assert kv.home[16:18].tolist() == [1, 1] and kv.home[0] == NO_SEGMENT and kv.owner[0] == FREE
    kv.check_integrity()


def test_keys_of_roots_without_slots_are_none() -> None:
    kv = pool()
    kv.open_(1, 4)
    assert kv.keys_of([1]) == kv.keys_of([9]) == (0, 0)


def test_committing_for_another_root_moves_its_region_along() -> None:
    kv = pool(32)
    kv.open_(1, 8)
    kv.open_(2, 8)
    slots = kv.append_([9, 9], [0, 0], home=1)
    kv.commit_(slots[1:], [0], owner=2, home=2)
    assert kv.home[slots].tolist() == [1, 2] and kv.owner[slots].tolist() == [9, 2]
    assert kv.keys_of([2]) == (1, 1)
    kv.check_integrity()
    assert kv.keys_of([1]) == (0, 2), "what it once had is not looked for"


def test_a_slot_that_was_given_back_is_nobodys() -> None:
    kv = pool(16)
    slots = take(kv, 1, 4)
    kv.release_(slots[1:3])
    kv.release_(slots[1:3])
    assert kv.owner[:4].tolist() == [1, FREE, FREE, 1]
    assert kv.home[:4].tolist() == [1, NO_SEGMENT, NO_SEGMENT, 1]
    assert kv.current_length == 2, "what is given back twice is counted once"


def test_slots_outside_a_region_are_noticed() -> None:
    kv = pool(16)
    take(kv, 1, 3)
    kv.check_integrity()
    kv.regions[1].high = 2
    with pytest.raises(AssertionError, match="slots outside region 1"):
        kv.check_integrity()
    kv.regions[1].high, kv.current_length = 3, 2
    with pytest.raises(AssertionError, match="counted wrongly"):
        kv.check_integrity()
