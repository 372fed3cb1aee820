"""Segments: which goes on behind which, and what a row of one of them may see."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsot.ops.kv.pool import FREE, NO_SEGMENT, UNKNOWN
from specsot.states.request_table import SegmentTree


def grown(parents: list[int]) -> tuple[SegmentTree, list[int]]:
    """A tree in which segment i goes on behind number `parents[i] % (i + 1) - 1`, -1 for none."""
    tree, ids = SegmentTree(), list[int]()
    for number, parent in enumerate(parents):
        at = parent % (number + 1) - 1
        ids.append(tree.add(ids[at]) if at >= 0 else tree.add())
    return tree, ids


FORESTS = st.lists(st.integers(0, 20), min_size=1, max_size=12).map(grown)


def test_a_path_leads_to_the_root() -> None:
    tree = SegmentTree()
    root, other = tree.add(), tree.add()
    branch = tree.add(root)
    leaf = tree.add(branch)
    assert tree.path(leaf) == [leaf, branch, root]
    assert tree.path(root) == [root]
    assert [tree.home[s] for s in (leaf, branch, root, other)] == [root, root, root, other]
    tree.remove([leaf, branch, root, 99])
    assert len(tree.parent) == 1 and leaf not in tree
    assert tree.add() > leaf, "an id is never used twice"


def test_what_went_on_behind_an_absorbed_segment_goes_on_behind_the_other() -> None:
    tree = SegmentTree()
    prefix = tree.add()
    outline, sibling = tree.add(prefix), tree.add(prefix)
    child = tree.add(outline)
    tree.merge_into_parent(outline, prefix)
    assert outline not in tree
    assert tree.path(child) == [child, prefix]
    assert tree.path(sibling) == [sibling, prefix]


@pytest.mark.parametrize(
    ("change", "lineage", "homes"),
    [
        (lambda tree, root, other, leaf: tree.set_parent(leaf, other), "lo", "ro"),
        (lambda tree, root, other, leaf: tree.set_reads(leaf, [other]), "lro", "ro"),
        (lambda tree, root, other, leaf: tree.make_home(leaf), "lr", "lr"),
        (lambda tree, root, other, leaf: tree.insert_above(leaf), "lnr", "rn"),
        (lambda tree, root, other, leaf: tree.merge_into_parent(root, other), "lo", "ro"),
    ],
    ids=["hang", "read", "settle", "insert", "absorb"],
)
def test_what_was_told_is_told_anew_after_a_change(
    change: Callable[[SegmentTree, int, int, int], object], lineage: str, homes: str
) -> None:
    tree = SegmentTree()
    root, other = tree.add(), tree.add()
    leaf = tree.add(root)
    assert tree.lineage(leaf) == (leaf, root) and tree.homes(leaf) == (root,)
    before = tree.visibility((leaf,))
    assert before.path_SA.tolist() == [[leaf, root]]
    named = {"r": root, "o": other, "l": leaf, "n": leaf + 1}
    change(tree, root, other, leaf)
    told = tree.visibility((leaf,))
    assert told.path_SA.tolist() == [[named[one] for one in lineage]]
    assert tree.lineage(leaf) == tuple(named[one] for one in lineage)
    assert tree.homes(leaf) == told.homes_S[0] == tuple(named[one] for one in homes)
    assert before.path_SA.tolist() == [[leaf, root]], "what was told before stays as it was"


@given(FORESTS, st.lists(st.sampled_from([FREE, UNKNOWN, *range(13)]), max_size=10))
def test_a_row_sees_the_slots_of_its_path(
    forest: tuple[SegmentTree, list[int]], owners: list[int]
) -> None:
    tree, ids = forest
    lineages = tree.visibility(tuple(ids))
    paths = [[s for s in row if s != NO_SEGMENT] for row in lineages.path_SA.tolist()]
    assert paths == [tree.path(segment) for segment in ids]
    assert lineages.homes_S == tuple((path[-1],) for path in paths)
    naive = [[owner in path for owner in owners] for path in paths]
    nothing = [False] * len(owners)  # behind the last segment stands padding
    owner_PK = np.tile(np.array(owners, np.int32), (len(ids) + 1, 1))
    numbers = np.arange(len(ids) + 1, dtype=np.int32)
    assert lineages.sees(numbers, owner_PK).tolist() == [*naive, nothing]
    assert tree.visibility(()).path_SA.shape[0] == 0
