"""Cascade: what is shared is read once, nothing twice, and the sums are those of one softmax."""

import numpy as np
import pytest
import torch
from helpers.attention import attended, metadata_of

from specsot.ops.attention.backends import MIN_SLOTS_SAVED, AttentionPlan, backend, shared_parts
from specsot.ops.attention.metadata import AttentionMetadata, QuerySequence
from specsot.ops.kv.pool import KVCache
from specsot.states.request_table import SegmentTree

HEADS, KV_HEADS, DIM = 4, 2, 8


def behind(prefix: int, own: int, *shape: int, apart: bool = True) -> tuple[KVCache, SegmentTree]:
    """A pool with a document of `prefix` rows, requests behind it and branches behind these, as
    many of each as `shape` says; every request and branch has `own` rows."""
    kv, tree = (
        KVCache(1, KV_HEADS, DIM, 4096, dtype=torch.float64),
        SegmentTree(separate_homes=apart),
    )
    kv.data.normal_(generator=torch.Generator().manual_seed(1))

    def write(parent: int, first: int, count: int) -> int:
        segment = tree.add(parent) if parent >= 0 else tree.add()
        places = range(first, first + count)
        slots = kv.append_([segment] * count, places, home=tree.home[segment])
        kv.commit_(slots, places)
        return segment

    document = write(-1, 0, prefix)
    for branches in shape:
        request = write(document, prefix, own)
        for _ in range(branches):
            write(request, prefix + own, own)
    return kv, tree


def metadata_behind(kv: KVCache, tree: SegmentTree, segments: list[int]) -> AttentionMetadata:
    sequences = [
        QuerySequence(np.array([row]), 0, tree.homes(one)) for row, one in enumerate(segments)
    ]
    return metadata_of(kv, sequences, tree.visibility(tuple(segments)), list(range(len(segments))))


def forward(
    kv: KVCache, tree: SegmentTree, segments: list[int], name: str
) -> tuple[AttentionPlan, torch.Tensor]:
    plan = backend(name).plan(metadata_behind(kv, tree, segments))
    q_Nhd = torch.randn(len(segments), HEADS, DIM, dtype=torch.float64)
    q_Nhd.normal_(generator=torch.Generator().manual_seed(2))
    return plan, attended(plan, q_Nhd, kv)


def leaves(tree: SegmentTree) -> list[int]:
    every = range(len(tree.parent))
    return [one for one in every if one not in {tree.parent[other] for other in every}]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 4, 2)])
def test_what_is_shared_is_read_once_whoever_shares_it(shape: tuple[int, ...]) -> None:
    kv, tree = behind(300, 5, *shape)
    told, out = forward(kv, tree, leaves(tree), "cascade")
    assert told.merged
    seen = sum(int(group.mask_GqK.any(1).sum()) for group in told.groups)
    assert seen == kv.current_length, "every slot is read for somebody, once"
    for name in ("dense", "grouped"):
        other, expected = forward(kv, tree, leaves(tree), name)
        assert not other.merged and torch.allclose(out, expected, atol=1e-12)


def test_a_row_is_once_in_a_group() -> None:
    kv, tree = behind(40, 40, 2, 2)
    told, _ = forward(kv, tree, leaves(tree), "cascade")
    for group in told.groups:
        rows = group.host_rows_Gq
        assert len(np.unique(rows)) == rows.size
    assert sum(len(group.host_rows_Gq) for group in told.groups) == 1 + 2 + 4, "all parts are there"


def test_nothing_is_split_where_nothing_is_shared() -> None:
    kv, tree = behind(40, 5, 1)
    told, _ = forward(kv, tree, leaves(tree), "cascade")
    assert not told.merged
    assert not backend("cascade").plan(metadata_behind(kv, tree, [])).merged


@pytest.mark.parametrize(
    ("prefix", "merged"), [(MIN_SLOTS_SAVED // 3 + 1, True), (MIN_SLOTS_SAVED // 4, False)]
)
def test_auto_takes_it_where_enough_is_read_less_often(prefix: int, merged: bool) -> None:
    kv, tree = behind(prefix, 1, 4)
    told, out = forward(kv, tree, leaves(tree), "auto")
    assert told.merged is merged
    assert torch.allclose(out, forward(kv, tree, leaves(tree), "grouped")[1], atol=1e-12)


def test_rows_of_one_sequence_already_read_the_prefix_once() -> None:
    kv, tree = behind(MIN_SLOTS_SAVED, 1, 4, apart=False)
    sequences = [QuerySequence(np.arange(4), 0, tree.homes(leaves(tree)[0]))]
    metadata = metadata_of(kv, sequences, tree.visibility(tuple(leaves(tree))), list(range(4)))
    assert len(shared_parts(metadata, sequences)) == 2
    assert not backend("auto").plan(metadata).merged
