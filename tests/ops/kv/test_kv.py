"""The KV pool: slots, labels, copies, and a table that stays consistent whatever happens."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers.pools import DIM, HEADS, LAYERS, commit, content, mark_, pool

from specsot.ops.kv.pool import FREE, NO_SEGMENT, PoolFullError


def test_new_rows_take_the_lowest_free_slots_in_their_order() -> None:
    kv = pool()
    assert kv.append_([5, 6, 5], [0, 0, 1]).tolist() == [0, 1, 2]
    kv.release_([1])
    assert kv.append_([7, 7], [3, 4]).tolist() == [1, 3]
    assert kv.owner.tolist() == [5, 7, 5, 7, *[FREE] * 4]
    assert (kv.current_length, kv.extents(), kv.peak_length) == (4, [4], 4)
    assert not kv.committed.any(), "a new row is fresh until it is committed"


def test_a_pool_can_be_filled_to_the_last_slot_and_one_row_more_changes_nothing() -> None:
    kv = pool(4)
    commit(kv, 1, [0, 1, 2])
    assert kv.append_([1], [3]).tolist() == [3]
    before = kv.owner.copy(), kv.position.copy(), kv.committed.copy()
    with pytest.raises(PoolFullError, match="1 slots requested, 0 free"):
        kv.append_([2], [0])
    assert all(map(np.array_equal, before, (kv.owner, kv.position, kv.committed)))
    kv.check_integrity()
    assert kv.scratch == 4 == kv.capacity, "the scratch slot lies behind and is never handed out"
    assert kv.data.shape == (LAYERS, 2, HEADS, 5, DIM)


def test_no_rows_are_no_fault() -> None:
    kv = pool()
    assert kv.append_([], []).tolist() == []
    kv.release_([])
    kv.retire_([])
    assert (kv.current_length, kv.extents()) == (0, [0])


def test_committing_sets_positions_that_were_not_known_before() -> None:
    kv = pool()
    tree = kv.append_([1] * 4, [0] * 4)
    kv.release_(tree[[1, 3]])
    kv.commit_(tree[[0, 2]], [7, 8])
    assert kv.slots_of(1).tolist() == [0, 2]
    assert kv.position[[0, 2]].tolist() == [7, 8]


def test_rows_come_in_the_order_of_their_positions() -> None:
    kv = pool()
    commit(kv, 1, [2, 0, 1])
    kv.append_([1], [3])
    assert kv.slots_of(1).tolist() == [1, 2, 0], "fresh rows are not history"


def test_retiring_frees_the_owners_rows_and_no_others() -> None:
    kv = pool()
    commit(kv, 1, [0, 1])
    commit(kv, 2, [0, 1])
    kv.append_([1], [2])
    kv.retire_([1, 9])
    assert kv.owner.tolist() == [FREE, FREE, 2, 2, *[FREE] * 4]
    assert kv.committed.tolist() == [False, False, True, True, *[False] * 4]


def test_truncating_drops_rows_from_a_position_on() -> None:
    kv = pool()
    commit(kv, 1, [0, 1, 2, 3])
    commit(kv, 2, [3])
    kv.truncate_(1, 2)
    assert kv.slots_of(1).tolist() == [0, 1]
    assert kv.slots_of(2).tolist() == [4]


def test_relabelling_moves_no_byte() -> None:
    kv = pool()
    commit(kv, 1, [0, 1])
    address, before = kv.data.data_ptr(), kv.data.clone()
    kv.relabel_(1, 6, NO_SEGMENT)
    assert kv.slots_of(6).tolist() == [0, 1]
    assert kv.slots_of(1).size == 0
    assert kv.data.data_ptr() == address and torch.equal(kv.data, before)
    assert not kv.ledger.bytes


def test_copying_takes_content_and_labels_along_and_is_counted() -> None:
    kv = pool(8, 2)
    slots = commit(kv, 1, [0, 1, 2])
    for slot in slots:
        mark_(kv, slot, 10.0 + slot)
    address = kv.data.data_ptr()
    kv.copy_([1, 2], [14, 12], "test")
    assert kv.slots_of(1).tolist() == [0, 1, 2]
    assert kv.slots_of(1, 1).tolist() == [14, 12]
    assert [content(kv, s) for s in (0, 1, 2, 14, 12)] == [10.0, 11.0, 12.0, 11.0, 12.0]
    assert kv.current_length == kv.peak_length == 5
    kv.check_integrity()
    assert kv.ledger.bytes == {"test": 2 * kv.slot_bytes}
    assert kv.ledger.moves == {"test": 1}
    assert kv.slot_bytes == LAYERS * 2 * HEADS * DIM * 4
    assert kv.data.data_ptr() == address


def test_what_is_committed_stays_where_it_is_and_holes_go_to_whoever_comes_next() -> None:
    kv = pool(12)
    for owner in (1, 2, 3):
        for slot in commit(kv, owner, [0, 1, 2]):
            mark_(kv, slot, float(slot))
    kv.retire_([2])
    kv.release_([0])
    assert kv.append_([4] * 5, range(5)).tolist() == [0, 3, 4, 5, 9]
    expected = {1: [1.0, 2.0], 3: [6.0, 7.0, 8.0]}
    for owner, values in expected.items():
        assert kv.slots_of(owner).tolist() == values
        assert [content(kv, int(s)) for s in kv.slots_of(owner)] == values
    assert not kv.ledger.bytes, "nothing is ever moved"


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
    ],
)
def test_an_inconsistent_table_is_noticed(break_: object, message: str | None) -> None:
    kv = pool()
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
