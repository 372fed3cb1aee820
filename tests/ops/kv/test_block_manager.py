"""Blocks: who may take a slot, whose table names what, and what that leaves unused."""

import numpy as np
import pytest
from helpers.pools import pool

from specsot.ops.kv.pool import FREE, NO_SEGMENT, BlockManager, KVCache


def written(kv: KVCache, segment: int, count: int, first: int = 0, home: int = 0) -> list[int]:
    slots = kv.append_([segment] * count, range(first, first + count), home=home)
    kv.commit_(slots, range(first, first + count))
    return slots.tolist()


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


def test_a_last_block_may_be_shorter() -> None:
    kv = pool(10, block_size=4)
    assert len(kv.blocks) == 3
    written(kv, 1, 9)
    assert kv.blocks.wasted(kv.current_length) == 1
    assert written(kv, 2, 1) == [9]
    assert (kv.blocks.high_water, kv.blocks.most_wasted) == (3, 1)


def test_under_batching_a_row_is_a_block() -> None:
    kv = KVCache(1, 1, 1, 8, 3, block_size=4)
    kv.append_([7, 7, 8], [0, 1, 0], row=[0, 0, 2])
    assert kv.blocks.size == 8 and kv.blocks.table(7) == [0] and kv.blocks.table(8) == [2]


def test_the_peak_is_remembered_and_nothing_is_left_in_the_end() -> None:
    kv = pool(48, block_size=8)
    for segment in (1, 2, 3):
        written(kv, segment, 9)
    kv.retire_([2])
    assert (kv.blocks.in_use, kv.blocks.high_water) == (4, 6)
    kv.retire_([1, 3])
    assert kv.blocks.in_use == 0 and not kv.blocks.tables
    assert (kv.blocks.writer == NO_SEGMENT).all()


@pytest.mark.parametrize(
    ("break_", "says"),
    [
        (lambda b: b.tables[1].__setitem__(3, 1), "disagree with the owners"),
        (lambda b: b.references.__setitem__(0, 2), "references are counted wrongly"),
        (lambda b: setattr(b, "in_use", 3), "counted wrongly"),
        (lambda b: b.writer.__setitem__(3, 1), "a free block has a writer"),
    ],
)
def test_integrity_sees_what_is_wrong(break_: object, says: str) -> None:
    blocks, owner = BlockManager(16, 4), np.full(16, FREE, np.int32)
    owner[:5] = 1
    blocks.enter_(owner[:5], np.arange(5))
    blocks.check_integrity(owner)
    break_(blocks)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=says):
        blocks.check_integrity(owner)
