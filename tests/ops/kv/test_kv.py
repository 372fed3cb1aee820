"""The KV pool: slots, labels, rows, copies, regions, blocks; any order: `test_kv_machine.py`."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pools import DIM, HEADS, commit, mark_, pool
from hypothesis import given
from hypothesis import strategies as st

from specsot.ops.attention.backends import slots_of
from specsot.ops.attention.metadata import SlotRun
from specsot.ops.kv.pool import FREE, NO_SEGMENT, SPREAD, KVCache, PoolFullError, Region


def written(kv: KVCache, segment: int, count: int, first: int = 0, home: int = 0) -> list[int]:
    slots = kv.append_([segment] * count, range(first, first + count), home=home)
    kv.commit_(slots, range(first, first + count))
    return slots.tolist()


def take(kv: KVCache, root: int, count: int) -> list[int]:
    return written(kv, root, count, int(np.count_nonzero(kv.owner == root)), root)


def test_new_rows_take_the_lowest_free_slots_in_their_order() -> None:
    kv = pool()
    assert kv.append_([5, 6, 5], [0, 0, 1]).tolist() == [0, 1, 2]
    kv.release_([1])
    kv.release_([1])
    assert kv.append_([7, 7], [3, 4]).tolist() == [1, 3]
    assert kv.owner.tolist() == [5, 7, 5, 7, *[FREE] * 4]
    assert (kv.current_length, kv.extents(), kv.peak_length) == (4, [4], 4)
    assert not kv.committed.any() and not kv.slots_of(5).size, "a new row is fresh"
    assert kv.append_([], []).tolist() == []
    homes = kv.append_([7, 8, 7], [0, 0, 1], home=[1, 2, 1])
    assert (homes.tolist(), kv.home[homes].tolist()) == ([4, 6, 5], [1, 2, 1])


def test_new_slots_are_the_lowest_free_ones_of_their_row() -> None:
    kv = pool(4, 3)
    assert kv.append_([5, 5], [0, 1], 1).tolist() == [4, 5]
    rows = np.array([2, 0, 2, 1], np.int32)
    assert kv.append_([7, 8, 7, 5], [0, 0, 1, 2], rows).tolist() == [8, 0, 9, 6]
    kv.release_([4])
    assert kv.append_([5], [3], 1).tolist() == [4]
    assert kv.owner.tolist() == [8, *[FREE] * 3, 5, 5, 5, FREE, 7, 7, FREE, FREE]
    assert kv.position[[4, 5, 6, 8, 9]].tolist() == [3, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("rows", "into", "message"),
    [(1, 0, "2 slots requested, 1 free"), (2, [0, 0, 1, 1], "2 slots requested, 1 free")],
)
def test_where_too_few_slots_are_free_nothing_changes(rows: int, into: Any, message: str) -> None:
    kv = pool(4, rows)
    commit(kv, 1, [0, 1, 2], row=rows - 1)
    before = kv.owner.copy(), kv.position.copy(), kv.committed.copy()
    count = np.size(into) if rows > 1 else 2
    with pytest.raises(PoolFullError, match=message):
        kv.append_([2] * count, [0] * count, np.array(into, np.int32))
    assert all(map(np.array_equal, before, (kv.owner, kv.position, kv.committed)))
    assert kv.scratch == kv.slots == 4 * rows, "the scratch slot is behind the others"


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda kv: kv.committed.__setitem__(7, True), "a free slot is committed"),
        (lambda kv: kv.position.__setitem__(1, 0), "a position is held twice"),
        (lambda kv: kv.position.__setitem__(2, 5), "owner 1 has a gap"),
        (lambda kv: kv.release_([1]), "owner 1 has a gap"),
        (lambda kv: kv.owner.__setitem__(3, 2), "slots in use are counted wrongly"),
        (lambda kv: kv.regions[NO_SEGMENT].include_(0, 0), None),
        (lambda kv: setattr(kv.regions[NO_SEGMENT], "high", 2), "slots outside region"),
        (lambda kv: setattr(kv.regions[NO_SEGMENT], "low", 1), "slots outside region"),
        (lambda kv: kv.blocks.tables[1].__setitem__(3, 1), "disagree with the owners"),
        (lambda kv: kv.blocks.references.__setitem__(0, 2), "references are counted wrongly"),
        (lambda kv: setattr(kv.blocks, "in_use", 3), "counted wrongly"),
        (lambda kv: kv.blocks.writer.__setitem__(3, 1), "a free block has a writer"),
    ],
)
def test_an_inconsistent_table_is_noticed(break_: object, message: str | None) -> None:
    kv = pool(16, block_size=1 if message and "gap" in message else 4)
    commit(kv, 1, [0, 1, 2])
    kv.check_integrity()
    break_(kv)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        kv.check_integrity()


def test_rows_that_are_wiped_hold_zeros_and_nobody_elses_change() -> None:
    made = pool(8)
    first, second = made.append_([1, 1], [0, 1]), made.append_([2], [0])
    made.data.fill_(float("nan"))
    made.data[:, :, :, second] = 3.0
    made.wipe_([1])
    assert (made.data[:, :, :, first] == 0).all() and (made.data[:, :, :, second] == 3).all()
    assert made.owner[first].tolist() == [1, 1], "they are given back by whoever owns them"


def test_a_layer_reads_views_of_runs_or_copies_of_lists() -> None:
    kv = pool(4, 3)
    for slot in range(12):
        mark_(kv, slot, float(slot))
    run = SlotRun(1, 2, 5, 3)
    assert run.slots_GK.tolist() == [[1, 2], [6, 7], [11, 12]], "12 is the scratch slot"
    keys, values = slots_of(*kv.layers[0], run)
    assert keys.shape == (3, HEADS, 2, DIM)
    assert keys[:, 1, :, 2].tolist() == [[1.0, 2.0], [6.0, 7.0], [11.0, 0.0]]
    assert torch.equal(values, -keys)
    for part in (keys, values):
        assert part.untyped_storage().data_ptr() == kv.data.untyped_storage().data_ptr()
    keys, values = slots_of(*kv.layers[0], torch.tensor([[3, 8, 9]]))
    assert keys[0, 2, :, 0].tolist() == [3.0, 8.0, 9.0] and torch.equal(values, -keys)


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


def test_a_segment_takes_whole_blocks_and_goes_on_in_its_own() -> None:
    kv = pool(32, block_size=4)
    assert written(kv, 1, 5) == [0, 1, 2, 3, 4]
    assert written(kv, 2, 3) == [8, 9, 10], "the rest of block 1 is the first one's"
    assert written(kv, 1, 4, first=5) == [5, 6, 7, 12]
    assert written(kv, 2, 2, first=3) == [11, 16]
    assert (kv.blocks.table(1), kv.blocks.table(2)) == ([0, 1, 3], [2, 4])
    assert kv.blocks.references.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert (kv.blocks.in_use, kv.blocks.wasted(kv.current_length)) == (5, 6)
    kv.check_integrity()


def test_rejected_rows_leave_slots_that_their_segment_takes_again() -> None:
    kv = pool(16, block_size=4)
    tree = kv.append_([1] * 6, [0] * 6)
    kv.release_(tree[[1, 2, 4, 5]])
    assert kv.blocks.table(1) == [0] and kv.blocks.in_use == 1, "block 1 is free again"
    assert kv.append_([2], [0]).tolist() == [4]
    assert kv.append_([1] * 3, [0] * 3).tolist() == [1, 2, 8]


def test_what_another_segment_shares_is_not_written_to_any_more() -> None:
    kv = pool(24, block_size=4)
    written(kv, 1, 10)
    before = kv.data.clone()
    kv.split_(1, 5, 6)
    assert (kv.blocks.table(5), kv.blocks.table(1)) == ([0, 1], [1, 2])
    assert kv.blocks.references[:4].tolist() == [1, 2, 1, 0]
    assert kv.data.equal(before) and not kv.ledger.bytes
    kv.split_(1, 6, 10)
    assert (kv.blocks.table(6), kv.blocks.table(1)) == ([1, 2], [])
    assert written(kv, 1, 3, first=10) == [12, 13, 14], "slots 10 and 11 are in a shared block"
    kv.check_integrity()


def test_where_no_block_is_free_any_free_slot_is_taken() -> None:
    kv = pool(12, block_size=4)
    written(kv, 1, 5)
    written(kv, 2, 1)
    assert written(kv, 3, 4) == [5, 6, 7, 9]
    assert kv.blocks.table(3) == [1, 2] and kv.blocks.references.tolist() == [1, 2, 2]
    assert written(kv, 1, 2, first=5) == [10, 11], "block 2 is another's, but there is no other"
    kv.check_integrity()


def test_an_outline_that_becomes_the_prefix_takes_its_blocks_along() -> None:
    kv = pool(32, block_size=4)
    written(kv, 1, 3)
    written(kv, 2, 2)
    kv.relabel_(2, 1, 0)
    assert kv.blocks.table(1) == [0, 1] and not kv.blocks.table(2)
    assert written(kv, 1, 4, first=5) == [3, 6, 7, 8]


def test_the_peak_is_remembered_and_nothing_is_left_in_the_end() -> None:
    kv = pool(10, block_size=4)  # the last block is shorter
    written(kv, 1, 9)
    assert kv.blocks.wasted(kv.current_length) == 1
    assert written(kv, 2, 1) == [9]
    kv.retire_([1])
    assert (kv.blocks.in_use, kv.blocks.high_water, kv.blocks.most_wasted) == (1, 3, 1)
    kv.retire_([2])
    assert kv.blocks.in_use == 0 and not kv.blocks.tables
    assert (kv.blocks.writer == NO_SEGMENT).all()
