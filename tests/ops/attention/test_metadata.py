"""Groups of rows: which of them are computed side by side, and that it never shows."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from helpers.attention import attended, batches
from helpers.forwards import DIM, HEADS, KV_HEADS, attend_naively, scene
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.ops.attention.backends import AttentionPlan, backend
from specsot.ops.attention.metadata import AttentionBatch, AttentionGroup, QuerySequence, row_index
from specsot.ops.forward import plan_attention
from specsot.ops.kv.pool import SPREAD, KVCache
from specsot.ops.kv.slots import SlotRun


def filled(shares: dict[int, tuple[int, int]], capacity: int = 4096, rows: int = 1) -> KVCache:
    """root -> (size of its region, slots in use)."""
    kv = KVCache(1, KV_HEADS, DIM, capacity, rows, dtype=torch.float64)
    for root, (size, _) in shares.items():
        kv.open_(root, size)
    for root, (_, count) in shares.items():
        kv.append_([root] * count, range(count), home=root)
    return kv


def members(*roots: int, rows: int = 2) -> list[QuerySequence]:
    """One member for each root, with so many rows."""
    return [QuerySequence(np.arange(rows) + i * rows, 0, (r,)) for i, r in enumerate(roots)]


def shapes(found: list[AttentionBatch]) -> list[tuple[list[int], object]]:
    """First row of each sequence, and the run of slots, or the list of them."""
    return [
        (s.rows_Gq[:, 0].tolist(), s.keys if isinstance(s.keys, SlotRun) else s.keys.tolist())
        for s in found
    ]


def test_requests_at_equal_distances_are_computed_side_by_side() -> None:
    kv = filled({1: (512, 300), 2: (512, 290), 3: (512, 300)})
    (stack,) = batches(kv, members(1, 2, 3), "auto")
    assert stack.keys == SlotRun(0, 300, 512, 3)
    assert stack.rows_Gq.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert stack.slots_GK[:, 0].tolist() == [0, 512, 1024]


def test_sequences_lie_in_the_order_of_their_slots() -> None:
    kv = filled({1: (512, 300), 2: (512, 300)})
    assert shapes(batches(kv, members(2, 1), "grouped")) == [([2, 0], SlotRun(0, 300, 512, 2))]


def test_another_distance_begins_another_group() -> None:
    kv = filled({1: (512, 300), 2: (512, 300), 3: (640, 300), 4: (512, 300)})
    assert shapes(batches(kv, members(1, 2, 3, 4), "auto")) == [
        ([0, 2, 4], SlotRun(0, 300, 512, 3)),
        ([6], SlotRun(1664, 300, 0, 1)),
    ]


def test_no_group_is_mostly_padding() -> None:
    """Two short requests beside a long one cost more as one group than as two."""
    kv = filled({1: (512, 30), 2: (512, 20), 3: (512, 500)})
    found = batches(kv, members(1, 2, 3, rows=50), "auto")
    assert [stack.keys for stack in found] == [SlotRun(0, 30, 512, 2), SlotRun(1024, 500)]
    few = batches(kv, members(1, 2, 3, rows=1), "auto")
    assert [stack.keys for stack in few] == [SlotRun(0, 500, 512, 3)], "a few entries are nothing"


def test_a_group_never_reaches_behind_the_pool() -> None:
    """The last request's run cannot be as long as its neighbour's."""
    kv = filled({1: (30, 25), 2: (10, 5)}, capacity=40)
    assert [s.keys for s in batches(kv, members(1, 2), "auto")] == [SlotRun(0, 25), SlotRun(30, 5)]


def test_sequences_of_unequal_numbers_of_rows_repeat_their_last_row() -> None:
    kv = filled({1: (512, 300), 2: (512, 300)})
    two = [QuerySequence(np.arange(4), 0, (1,)), QuerySequence(np.array([4, 5]), 0, (2,))]
    (stack,) = batches(kv, two, "auto")
    assert stack.rows_Gq.tolist() == [[0, 1, 2, 3], [4, 5, 5, 5]]
    apart = batches(kv, two, "auto", equal_lengths=True)
    assert [one.rows_Gq.tolist() for one in apart] == [[[0, 1, 2, 3]], [[4, 5]]]


def test_the_first_members_may_have_to_be_alone() -> None:
    kv = filled({1: (512, 300), 2: (512, 300), 3: (512, 300)})
    found = batches(kv, members(3, 1, 2), "auto", isolated=True)
    assert shapes(found) == [([0], SlotRun(1024, 300)), ([2, 4], SlotRun(0, 300, 512, 2))]


def test_slots_that_lie_apart_are_a_group_alone() -> None:
    kv = filled({1: (0, 4), 2: (0, 2 * SPREAD)})
    kv.append_([1], [4], home=1)
    found = batches(kv, members(1, 2), "auto")
    assert shapes(found) == [
        ([0], [[0, 1, 2, 3, 4 + 2 * SPREAD]]),
        ([2], SlotRun(4, 2 * SPREAD)),
    ]
    assert found[0].places(np.array([[3, 4 + 2 * SPREAD]]), np.zeros(1, np.int64)).tolist() == [
        [3, 4]
    ]


def test_places_are_counted_from_the_first_slot_of_a_sequence() -> None:
    kv = filled({1: (512, 300), 2: (512, 300)})
    (stack,) = batches(kv, members(1, 2), "auto")
    assert stack.places(np.array([[7], [515]]), np.array([0, 1])).tolist() == [[7], [3]]


def test_dense_is_one_group_over_the_whole_pool() -> None:
    kv = filled({1: (512, 300), 2: (512, 290)})
    assert shapes(batches(kv, members(2, 1), "dense")) == [([0], SlotRun(0, 512 + 290))]
    rows = KVCache(1, 1, 2, 16, rows=3)
    rows.append_([1, 1, 1, 2], [0, 1, 2, 0], row=[1, 1, 1, 2])
    two = [QuerySequence(np.array([0, 1]), 1, ()), QuerySequence(np.array([2, 3]), 2, ())]
    assert shapes(batches(rows, two, "dense")) == [([0, 2], SlotRun(16, 3, 16, 2))]
    assert shapes(batches(rows, two, "auto")) == [([0, 2], SlotRun(16, 3, 16, 2))]


@pytest.mark.parametrize(
    ("rows_Gq", "rows", "natural"),
    [
        ([[0, 1], [2, 3]], 4, True),
        ([[0, 1], [2, 3]], 5, False),
        ([[2, 3], [0, 1]], 4, False),
        ([[0, 1], [2, 2]], 4, False),
    ],
)
def test_rows_in_their_natural_order_need_no_index(
    rows_Gq: list[list[int]], rows: int, natural: bool
) -> None:
    host_Gq = np.array(rows_Gq)
    mask_GqK = torch.ones(2, 2, 3, dtype=torch.bool)
    index_Gq = row_index(host_Gq, rows, mask_GqK.device)
    group = AttentionGroup(index_Gq, SlotRun(0, 3, 3, 2), mask_GqK, torch.zeros(2, 3), host_Gq)
    assert (group.rows_Gq is None) == natural
    value_N = torch.arange(10, 10 + rows)
    assert group.of_rows(value_N[: 4 if natural else rows]).tolist() == [
        [10 + row for row in one] for one in rows_Gq
    ]


# -- what comes out ------------------------------------------------------------------------------


def queries(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, HEADS, DIM, generator=draw, dtype=torch.float64)


def test_a_repeated_row_changes_nothing() -> None:
    kv = filled({1: (512, 300), 2: (512, 300)})
    kv.data.normal_(generator=torch.Generator().manual_seed(0))
    two = [QuerySequence(np.arange(3), 0, (1,)), QuerySequence(np.array([3]), 0, (2,))]
    outs = []
    for even in (False, True):
        groups = []
        for batch in batches(kv, two, "auto", equal_lengths=even):
            mask_GqK = torch.ones(*batch.rows_Gq.shape, 300, dtype=torch.bool)
            rows_Gq = row_index(batch.rows_Gq, 4, mask_GqK.device)
            none_GK = torch.zeros(len(mask_GqK), 300)
            groups.append(AttentionGroup(rows_Gq, batch.keys, mask_GqK, none_GK, batch.rows_Gq))
        outs.append(attended(AttentionPlan(backend("auto"), tuple(groups)), queries(4), kv))
    sizes = [len(batches(kv, two, "auto", equal_lengths=even)) for even in (False, True)]
    assert sizes == [1, 2]
    assert torch.allclose(*outs, atol=1e-12)


CASES = {
    "one sequence": (1, False),
    "shared rows": (1, True),
    "rows of a pool": (3, False),
    "trees of their own sizes": (1, False, True),
    "the same in rows": (3, False, True),
}


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_all_backends_attend_to_what_the_rule_allows(case: str, even: bool, draw: Random) -> None:
    """Segments on the way to the root, committed or prompts of this forward, not behind the row;
    of its own tree a node sees its ancestors."""
    one = scene(draw, *CASES[case])
    rows = replace(one.rows, blend=object() if even else None)  # type: ignore[arg-type]
    q_Nhd = queries(rows.tokens_BQ.numel())
    expected = attend_naively(one, q_Nhd)
    for name in ("dense", "grouped", "cascade"):
        out_NI = attended(plan_attention(rows, one.kv, attention=name), q_Nhd, one.kv)
        for row, expected_I in expected.items():
            assert torch.allclose(out_NI[row], expected_I, atol=1e-9), (name, row)
