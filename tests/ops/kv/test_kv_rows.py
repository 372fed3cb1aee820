"""A pool of several rows: each is packed, read and checked by itself."""

import numpy as np
import pytest
import torch
from helpers.pools import DIM, HEADS, commit, mark_, pool

from specsot.ops.attention.backends import slots_of
from specsot.ops.attention.metadata import SlotRun
from specsot.ops.kv.pool import FREE, NO_SEGMENT, PoolFullError


def test_new_slots_are_the_lowest_free_ones_of_their_row() -> None:
    kv = pool(4, 3)
    assert (kv.slots, kv.scratch) == (12, 12)
    assert kv.append_([5, 5], [0, 1], 1).tolist() == [4, 5]
    rows = np.array([2, 0, 2, 1], np.int32)
    assert kv.append_([7, 8, 7, 5], [0, 0, 1, 2], rows).tolist() == [8, 0, 9, 6]
    kv.release_([4])
    assert kv.append_([5], [3], 1).tolist() == [4]
    assert kv.owner.tolist() == [8, *[FREE] * 3, 5, 5, 5, FREE, 7, 7, FREE, FREE]
    assert kv.position[[4, 5, 6, 8, 9]].tolist() == [3, 1, 2, 0, 1]


def test_one_full_row_is_full_while_others_have_room_and_nothing_changes() -> None:
    kv = pool(4, 2)
    commit(kv, 1, [0, 1, 2], row=1)
    before = kv.owner.copy(), kv.position.copy(), kv.committed.copy()
    with pytest.raises(PoolFullError, match="2 slots requested, 1 free"):
        kv.append_([2, 2, 1, 1], [0, 1, 3, 4], np.array([0, 0, 1, 1], np.int32))
    assert all(map(np.array_equal, before, (kv.owner, kv.position, kv.committed)))


def test_every_row_has_an_extent_of_its_own() -> None:
    kv = pool(6, 3)
    assert (kv.extents(), kv.current_length) == ([0, 0, 0], 0)
    commit(kv, 1, [0, 1, 2, 3], row=0)
    commit(kv, 2, [0, 1], row=2)
    assert (kv.extents(), kv.current_length) == ([4, 0, 2], 6), "row 1 is empty"
    kv.release_([0, 1, 12])
    assert (kv.extents(), kv.current_length) == ([4, 0, 2], 3), "holes lie below the end"
    commit(kv, 3, range(6), row=1)
    assert kv.extents() == [4, 6, 2], "a row that is full has no end behind it"
    kv.release_([3, 13])
    assert kv.extents() == [3, 6, 0]


def test_an_owner_is_retired_in_one_row_or_in_all() -> None:
    kv = pool(3, 3)
    for row in range(3):
        commit(kv, 1, [0, 1], row)
        commit(kv, 2 + row, [0], row)
    kv.retire_([1, 3], row=1)
    assert kv.owner.tolist() == [1, 1, 2, FREE, FREE, FREE, 1, 1, 4]
    assert not kv.committed[3:6].any()
    kv.retire_([1])
    assert kv.owner.tolist() == [FREE, FREE, 2, FREE, FREE, FREE, FREE, FREE, 4]


def test_an_owners_slots_are_those_of_one_row_in_the_order_of_positions() -> None:
    kv = pool(5, 2)
    commit(kv, 1, [2, 0, 1], row=0)
    commit(kv, 1, [1, 0], row=1)
    kv.append_([1], [2], 1)
    assert kv.slots_of(1).tolist() == [1, 2, 0]
    assert kv.slots_of(1, 1).tolist() == [6, 5], "fresh slots are not history"


def test_relabelling_and_truncating_reach_every_row() -> None:
    kv = pool(4, 2)
    for row in range(2):
        commit(kv, 1, [0, 1, 2], row)
    kv.relabel_(1, 6, NO_SEGMENT)
    kv.truncate_(6, 1)
    assert kv.owner.tolist() == [6, FREE, FREE, FREE] * 2
    assert not kv.ledger.bytes


def test_what_a_layer_reads_is_a_view_of_a_range_of_rows() -> None:
    kv = pool(4, 3)
    mark_(kv, 6, 5.0)  # slot 2 of row 1
    for first, rows, at in ((0, 3, 1), (1, 2, 0), (1, 1, 0)):
        keys, values = slots_of(*kv.layers[1], SlotRun(first * 4, 3, 4, rows))
        assert keys.shape == values.shape == (rows, HEADS, 3, DIM)
        for part in (keys, values):
            assert part.untyped_storage().data_ptr() == kv.data.untyped_storage().data_ptr()
        assert (keys[at, :, 2] == 5.125).all() and (values[at, :, 2] == -5.125).all()
        assert int((keys != 0).sum()) == HEADS * DIM, "nothing else was written"


def test_runs_may_lie_at_any_equal_distance_and_a_list_of_slots_may_cross_rows() -> None:
    kv = pool(4, 3)
    for slot in range(12):
        mark_(kv, slot, float(slot))
    run = SlotRun(1, 2, 5, 3)
    assert run.slots_GK.tolist() == [[1, 2], [6, 7], [11, 12]], "12 is the scratch slot"
    keys, values = slots_of(*kv.layers[0], run)
    assert keys[:, 1, :, 2].tolist() == [[1.0, 2.0], [6.0, 7.0], [11.0, 0.0]]
    assert torch.equal(values, -keys)
    keys, values = slots_of(*kv.layers[0], torch.tensor([[3, 8, 9]]))
    assert keys[0, 2, :, 0].tolist() == [3.0, 8.0, 9.0] and torch.equal(values, -keys)


def test_a_history_is_checked_in_each_row_by_itself() -> None:
    kv = pool(4, 2)
    commit(kv, 1, [0, 1], row=0)
    commit(kv, 1, [0, 1, 2], row=1)
    kv.check_integrity()
    kv.position[5] = 0
    with pytest.raises(AssertionError, match="a position is held twice"):
        kv.check_integrity()
    kv.position[5] = 7
    with pytest.raises(AssertionError, match="owner 1 has a gap"):
        kv.check_integrity()
