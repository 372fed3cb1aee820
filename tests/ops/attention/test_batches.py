"""Which rows of a forward are computed side by side, and what they read of the pool."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from helpers import attention
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specsot.ops.attention.backends import MAX_WASTE, MAX_WASTED_ENTRIES, AttentionPlan
from specsot.ops.attention.metadata import (
    AttentionBatch,
    AttentionGroup,
    QuerySequence,
    SlotRun,
    row_index,
)
from specsot.ops.forward import plan_attention
from specsot.ops.kv.pool import KVCache


def pool_of(sizes: Sequence[int], region: int, capacity: int = 4096) -> KVCache:
    kv = KVCache(1, 1, 2, capacity)
    for root in range(len(sizes)):
        kv.open_(root, region)
    for root, size in enumerate(sizes):
        kv.append_([root] * size, range(size), home=root)
    return kv


def members_of(queries: Sequence[int]) -> list[QuerySequence]:
    ends = np.cumsum(queries)
    return [
        QuerySequence(np.arange(end - count, end), 0, (root,))
        for root, (count, end) in enumerate(zip(queries, ends.tolist(), strict=True))
    ]


def check(kv: KVCache, members: Sequence[QuerySequence], made: Sequence[AttentionBatch]) -> None:
    found: dict[int, np.ndarray] = {}
    for stack in made:
        assert len(stack.rows_Gq) == len(stack.slots_GK)
        for rows_q, slots_K in zip(stack.rows_Gq, stack.slots_GK, strict=True):
            (which,) = [i for i, m in enumerate(members) if m.rows[0] == rows_q[0]]
            rows, more = members[which].rows, len(rows_q) - len(members[which].rows)
            assert rows_q.tolist() == [*rows.tolist(), *[rows[-1]] * more]
            assert which not in found
            found[which] = slots_K
    assert sorted(found) == list(range(len(members)))
    for which, slots_K in found.items():
        own = np.flatnonzero(np.isin(kv.home, members[which].homes) & (kv.owner >= 0))
        assert set(own.tolist()) <= set(slots_K.tolist())
        assert slots_K.max(initial=0) < kv.slots


def cost(made: Sequence[AttentionBatch]) -> int:
    return sum(stack.rows_Gq.size * stack.slots_GK.shape[1] for stack in made)


# Slots of each request, distance of their regions, query rows of each, the backend, and the slots
# of each batch with the first rows of its sequences.
STACKED = {
    "equal requests at equal distances": (
        ([40] * 5, 64, [6] * 5, "grouped"), [(SlotRun(0, 40, 64, 5), [0, 6, 12, 18, 24])]),
    "a long one is not computed beside short ones": (
        ([300, 2000, 300, 300], 2048, [20] * 4, "grouped"),
        [(SlotRun(0, 300), [0]), (SlotRun(2048, 2000), [20]),
         (SlotRun(4096, 300, 2048, 2), [40, 60])]),
    "a few entries are nothing": (
        ([30, 20, 500], 512, [1] * 3, "auto"), [(SlotRun(0, 500, 512, 3), [0, 1, 2])]),
    "a shorter sequence repeats its last row": (
        ([10, 12, 11], 64, [2, 4, 1], "grouped"), [(SlotRun(0, 12, 64, 3), [0, 2, 6])]),
    "other distances begin a new group": (
        ([10, 10, 0, 10, 10], 64, [2] * 5, "grouped"),
        [(SlotRun(0, 10, 64, 2), [0, 2]), (SlotRun(192, 10, 64, 2), [6, 8])]),
    "the dense backend reads the whole pool once": (
        ([10, 20, 5], 64, [2, 3, 1], "dense"), [(SlotRun(0, 133), [0])]),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKED)
def test_which_requests_are_computed_side_by_side(name: str) -> None:
    (sizes, region, queries, backend), expected = STACKED[name]
    kv = pool_of(sizes, region, 8192)
    members = [one for one, size in zip(members_of(queries), sizes, strict=True) if size]
    for order in (members, members[::-1]):  # in the order of their slots
        made = attention.batches(kv, order, backend)
        assert [(stack.keys, stack.rows_Gq[:, 0].tolist()) for stack in made] == expected
        if backend != "dense":
            check(kv, members, made)


def test_a_slot_has_a_place_in_its_run() -> None:
    (stack,) = attention.batches(pool_of([40] * 5, 64), members_of([6] * 5), "grouped")
    assert stack.places(np.array([[7], [67]]), np.array([0, 1])).tolist() == [[7], [3]]


def test_a_group_never_reaches_behind_the_pool() -> None:
    kv = KVCache(1, 1, 2, 40)
    for root, (region, size) in enumerate(((30, 25), (10, 5))):
        kv.open_(root, region)
        kv.append_([root] * size, range(size), home=root)
    made = attention.batches(kv, members_of([2, 2]), "auto")
    assert [stack.keys for stack in made] == [SlotRun(0, 25), SlotRun(30, 5)]


def test_the_first_members_may_have_to_be_alone() -> None:
    kv = pool_of([300] * 3, 512)
    one, two, three = members_of([2] * 3)
    made = attention.batches(kv, [three, one, two], "auto", isolated=True)
    assert [stack.keys for stack in made] == [SlotRun(1024, 300), SlotRun(0, 300, 512, 2)]
    assert [stack.rows_Gq[:, 0].tolist() for stack in made] == [[4], [0, 2]]


def test_slots_that_lie_too_far_apart_are_a_list_of_their_own() -> None:
    kv = pool_of([4, 200, 4], 0)
    kv.append_([0] * 2, [4, 5], home=0)
    made = attention.batches(kv, members_of([1, 1, 1]), "grouped")
    lists = [one for one in made if not isinstance(one.keys, SlotRun)]
    assert [one.keys.tolist() for one in lists] == [[[0, 1, 2, 3, 208, 209]]]
    check(kv, members_of([1, 1, 1]), made)
    slots_EX, zero_E = np.array([[208, 0], [3, 209]], np.int32), np.zeros(2, np.int64)
    assert lists[0].places(slots_EX, zero_E).tolist() == [[4, 0], [3, 5]]


# Rows of the pool with their used slots, the row of each sequence, and the batch of a backend.
ROWS = {
    "as far as they are used": ({1: 30, 2: 50, 3: 40}, (1, 2, 3), "grouped", (100, 50, 100, 3)),
    "all as far as the fullest": ({1: 30, 2: 50, 3: 40}, (1, 2, 3), "dense", (100, 50, 100, 3)),
    "an empty one is in no group": ({0: 5, 2: 5}, (0, 1, 2), "grouped", (0, 5, 200, 2)),
    "of the reference it is": ({0: 5, 2: 5}, (0, 1, 2), "dense", (0, 5, 100, 3)),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_pool(name: str) -> None:
    used, rows, backend, run = ROWS[name]
    kv = KVCache(1, 1, 2, 100, 4)
    for row, size in used.items():
        kv.append_([row] * size, range(size), row, row)
    members = [QuerySequence(np.array([2 * b, 2 * b + 1]), row, ()) for b, row in enumerate(rows)]
    (stack,) = attention.batches(kv, members, backend)
    filled = [one for one in members if backend == "dense" or one.row in used]
    assert stack.keys == SlotRun(*run)
    assert stack.rows_Gq.tolist() == [one.rows.tolist() for one in filled]


@pytest.mark.parametrize("backend", ["dense", "grouped"])
def test_rows_of_a_pool_come_in_any_order_and_with_gaps(backend: str) -> None:
    kv = KVCache(1, 1, 2, 400, 5)
    for row in range(5):
        kv.append_([row] * 300, range(300), row, row)
    members = [QuerySequence(np.array([s]), row, ()) for s, row in enumerate((4, 0, 2, 3))]
    made = attention.batches(kv, members, backend)
    assert [(stack.keys, stack.rows_Gq[:, 0].tolist()) for stack in made] == [
        (SlotRun(0, 300, 800, 2), [1, 2]), (SlotRun(1200, 300, 400, 2), [3, 0])
    ]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 120), min_size=1, max_size=8),
    queries=st.lists(st.integers(1, 40), min_size=8, max_size=8),
    region=st.sampled_from((0, 64, 128)),
    seed=st.integers(0, 9),
)
def test_every_row_is_in_one_group_which_costs_little_more_than_its_own_slots(
    sizes: list[int], queries: list[int], region: int, seed: int
) -> None:
    kv = pool_of(sizes, region)
    draw = np.random.default_rng(seed)
    for root in draw.permutation(len(sizes)).tolist():
        kv.append_([root] * 3, range(3), home=root)
    members = members_of(queries[: len(sizes)])
    for even in (False, True):
        made = attention.batches(kv, members, "grouped", equal_lengths=even)
        check(kv, members, made)
        alone = sum(cost(attention.batches(kv, [one], "grouped")) for one in members)
        assert cost(made) <= MAX_WASTE * alone + MAX_WASTED_ENTRIES * len(made)
        for stack in made if even else ():
            firsts = stack.rows_Gq[:, 0].tolist()
            assert len({one.rows.size for one in members if one.rows[0] in firsts}) == 1


def test_a_forward_by_hand_is_one_group() -> None:
    causal = AttentionPlan.causal(3)
    assert attention.drawn(causal.groups[0].mask_GqK[0]) == "#..\n##.\n###"
    mask_BQK = torch.ones(2, 3, 4, dtype=torch.bool)
    told = AttentionPlan.dense(mask_BQK, torch.arange(4)[None], first=5, stride=7)
    assert told.groups[0].mask_GqK is mask_BQK and told.groups[0].rows_Gq is None
    assert told.groups[0].keys.slots_GK.tolist() == [[5, 6, 7, 8], [12, 13, 14, 15]]
    assert told.groups[0].positions_GK.tolist() == [[0, 1, 2, 3]] * 2


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


def queries(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(rows)
    return torch.randn(rows, attention.HEADS, attention.DIM, generator=draw, dtype=torch.float64)


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
    one = attention.scene(draw, *CASES[case])
    rows = replace(one.rows, blend=object() if even else None)  # type: ignore[arg-type]
    q_Nhd = queries(rows.tokens_BQ.numel())
    expected = attention.attend_naively(one, q_Nhd)
    for name in ("dense", "grouped", "cascade"):
        out_NI = attention.attended(plan_attention(rows, one.kv, attention=name), q_Nhd, one.kv)
        for row, expected_I in expected.items():
            assert torch.allclose(out_NI[row], expected_I, atol=1e-9), (name, row)
