"""Where the slots of a root lie: regions, and the run of slots that a forward reads of them."""

from itertools import pairwise

import numpy as np
import pytest
from helpers.pools import pool

from specsot.ops.kv.pool import SPREAD, KVCache
from specsot.ops.kv.slots import FREE, NOBODY, PoolFullError, Region


def take(kv: KVCache, root: int, count: int, owner: int | None = None) -> list[int]:
    """Fresh slots for an owner of this root; of the root itself if none is named."""
    slots: list[int] = kv.append_(
        [root if owner is None else owner] * count, range(count), home=root
    ).tolist()
    return slots


def test_roots_take_slots_of_their_own_regions_and_each_is_one_run() -> None:
    kv = pool(64)
    for root in (1, 2, 3):
        kv.open_(root, 16)
    assert [kv.regions[root].first for root in (1, 2, 3)] == [0, 16, 32]
    for _ in range(4):  # side by side, as rounds go
        for root in (1, 2, 3):
            take(kv, root, 3, owner=10 + root)
    assert [kv.keys_of((root,)) for root in (1, 2, 3)] == [(0, 12), (16, 12), (32, 12)]
    assert kv.keys_of((1, 2, 3)) == (0, 44)
    assert (kv.owner[16:28] == 12).all() and (kv.home[16:28] == 2).all()
    kv.check_integrity()


def test_equal_regions_lie_at_equal_distances_and_gaps_are_filled_again() -> None:
    kv = pool(80)
    for root in range(5):
        kv.open_(root, 16)
    firsts = [kv.regions[root].first for root in range(5)]
    assert {b - a for a, b in pairwise(firsts)} == {16}
    take(kv, 2, 4)
    kv.retire_([1, 2])
    assert 2 not in kv.regions and kv.current_length == 0
    kv.open_(5, 24)
    assert kv.regions[5].first == 16, "two gaps that touch are one"
    kv.open_(6, 16)
    assert kv.regions[6].size == 0, "eight slots are left there, which are too few"


def test_a_root_without_a_region_takes_the_lowest_free_slots_wherever_they_are() -> None:
    kv = pool(16)
    kv.open_(1, 12)
    kv.open_(2, 12)
    assert take(kv, 1, 6) == list(range(6))
    assert take(kv, 2, 3) == [6, 7, 8], "nothing is kept free for one that found no gap"
    assert take(kv, 1, 7) == [9, 10, 11, 12, 13, 14, 15]


def test_a_full_region_goes_on_behind_and_then_below_itself() -> None:
    kv = pool(32)
    kv.open_(1, 8)
    kv.open_(2, 8)
    kv.open_(3, 8)
    assert take(kv, 2, 8) == list(range(8, 16))
    assert take(kv, 2, 10) == list(range(16, 26)), "others only lose what they do not use"
    assert take(kv, 3, 6) == list(range(26, 32))
    assert take(kv, 3, 4) == [0, 1, 2, 3]
    with pytest.raises(PoolFullError, match="5 slots requested, 4 free"):
        take(kv, 3, 5)
    kv.check_integrity()


def test_keys_are_a_run_while_others_hold_little_of_it_and_a_list_where_they_hold_much() -> None:
    kv = pool(4 * SPREAD)
    take(kv, 1, 10)
    take(kv, 2, SPREAD + 10)
    take(kv, 1, 1)
    assert kv.keys_of((1,)) == (0, SPREAD + 21), "11 own ones, as many others and SPREAD"
    kv.release_([5])
    keys = kv.keys_of((1,))
    assert isinstance(keys, np.ndarray) and keys.dtype == np.int32
    assert keys.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, SPREAD + 20]
    assert kv.keys_of((1, 2)) == (0, SPREAD + 21), "together they lie side by side"
    assert kv.keys_of((2,)) == (10, SPREAD + 10)


def test_a_root_that_has_nothing_has_no_keys() -> None:
    kv = pool(8)
    assert kv.keys_of((7,)) == (0, 0)
    kv.open_(7, 4)
    assert kv.keys_of((7,)) == (0, 0)
    assert take(kv, 7, 2) == [0, 1] and kv.keys_of((7, 8)) == (0, 2)


def test_rows_that_turn_out_to_be_anothers_are_read_by_it_and_not_by_the_first() -> None:
    """The trees' shared rows: the device alone knows whose they are until a round is read."""
    kv = pool(128)
    kv.open_(1, 50)
    kv.open_(2, 50)
    take(kv, 1, 5)
    take(kv, 2, 5)
    shared = np.array(take(kv, 1, 4, owner=-4))
    kv.commit_(shared[[1, 3]], [5, 6], 2, 2)
    kv.release_(shared[[0, 2]])
    kv.check_integrity()
    assert kv.home[[6, 8]].tolist() == [2, 2]
    assert kv.keys_of((2,)) == (6, 49), "all that it has, wherever that is"
    assert kv.keys_of((1,)) == (0, 9), "what it once had is not looked for"


def test_regions_are_of_pools_with_one_row() -> None:
    kv = pool(8, 3)
    kv.open_(1, 4)
    assert kv.regions[1].size == 0
    assert kv.append_([1, 1], [0, 1], 2, 1).tolist() == [16, 17]
    assert kv.home[16:18].tolist() == [1, 1] and kv.home[0] == NOBODY and kv.owner[0] == FREE
    kv.check_integrity()


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
