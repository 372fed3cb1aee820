"""Segments: which goes on behind which, and what a row of one of them may see."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specsot.ops.attention.stacks import Lineages
from specsot.ops.kv.slots import FREE, NOBODY, UNKNOWN
from specsot.states.cache.segments import SegmentTree

Picture = list[list[bool]]


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
    assert [tree.home(s) for s in (leaf, branch, root, other)] == [root, root, root, other]
    assert len(tree) == 4 and leaf in tree


def test_an_id_is_never_used_twice() -> None:
    tree = SegmentTree()
    gone = [tree.add() for _ in range(3)]
    tree.remove([*gone, 99])
    assert len(tree) == 0 and gone[0] not in tree
    assert tree.add() not in gone


def test_what_went_on_behind_an_absorbed_segment_goes_on_behind_the_other() -> None:
    """An outline becomes a part of its prefix; another branch of the prefix stays as it was."""
    tree = SegmentTree()
    prefix = tree.add()
    outline, sibling = tree.add(prefix), tree.add(prefix)
    child = tree.add(outline)
    tree.absorb(outline, prefix)
    assert outline not in tree
    assert tree.path(child) == [child, prefix]
    assert tree.path(sibling) == [sibling, prefix]


def test_lineages_are_padded_behind_the_root() -> None:
    tree = SegmentTree()
    root = tree.add()
    branch = tree.add(root)
    leaf = tree.add(branch)
    lineages = tree.lineages([leaf, root])
    assert lineages.ids_S.tolist() == [leaf, root]
    assert lineages.path_SA.tolist() == [[leaf, branch, root], [root, NOBODY, NOBODY]]
    assert lineages.homes_S == ((root,), (root,))
    assert tree.lineages([]).path_SA.shape[0] == 0


@given(FORESTS)
def test_lineages_are_the_paths(forest: tuple[SegmentTree, list[int]]) -> None:
    tree, ids = forest
    lineages = tree.lineages(ids)
    paths = [[s for s in row if s != NOBODY] for row in lineages.path_SA.tolist()]
    assert paths == [tree.path(segment) for segment in ids]
    assert lineages.homes_S == tuple((path[-1],) for path in paths)


def seen(lineages: Lineages, numbers: list[int], owners: list[int]) -> Picture:
    """Row by row whether each slot of a pool is seen."""
    owner_PK = np.tile(np.array(owners, np.int32), (len(numbers), 1))
    picture: Picture = lineages.visible(np.array(numbers, np.int32), owner_PK).tolist()
    return picture


@given(FORESTS, st.lists(st.sampled_from([FREE, UNKNOWN, *range(13)]), max_size=10))
def test_a_row_sees_the_slots_of_its_path(
    forest: tuple[SegmentTree, list[int]], owners: list[int]
) -> None:
    """Whatever the paths are padded with, it is no owner of any slot."""
    tree, ids = forest
    numbers = list(range(len(ids) + 1))
    naive = [[owner in tree.path(segment) for owner in owners] for segment in ids]
    nothing = [False] * len(owners)  # behind the last segment stands padding
    assert seen(tree.lineages(ids), numbers, owners) == [*naive, nothing]
