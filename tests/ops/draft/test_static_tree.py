"""Static trees: laid out level by level, or refused with the node that is wrong."""

import pytest
from specsot_eagle1.static_tree import MC_SIM_7B_63, Node, StaticTree, lay_out

from specsot.engine.prepare.files import open_graph
from specsot.states.yaml.source import GraphError


def nodes_of(tree: StaticTree) -> list[Node]:
    found: list[list[Node]] = []
    inner: list[Node] = [()]
    for level in tree.levels:
        pairs = zip(level.above, level.ranks, strict=True)
        found.append([(*inner[above], rank) for above, rank in pairs])
        inner = [found[-1][index] for index in level.inner]
    return [node for level in found for node in level]


TREES: dict[str, tuple[Node, ...]] = {
    "EAGLE-1's": MC_SIM_7B_63,
    "one node": ((3,),),
    "a chain": ((0,), (0, 0), (0, 0, 0)),
    "in any order": ((1, 1, 2), (0, 1), (1, 1), (1,), (0,), (1, 1, 0)),
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_is_laid_out_by_depth_and_rank(name: str) -> None:
    given = TREES[name]
    tree = lay_out(given)
    nodes = nodes_of(tree)
    assert nodes == sorted(given, key=lambda node: (len(node), node))
    assert [len(node) for node in nodes] == list(tree.depths)
    parents = [nodes[parent] if parent >= 0 else () for parent in tree.parents]
    assert parents == [node[:-1] for node in nodes]
    assert all(level.breadth > max(level.ranks) for level in tree.levels)


@pytest.mark.parametrize("name", TREES)
def test_inner_nodes_see_their_own_path(name: str) -> None:
    given = TREES[name]
    inner = sorted({node[:-1] for node in given} - {()}, key=lambda node: (len(node), node))
    tree = lay_out(given)
    assert tree.inner == len(inner)
    for level in tree.levels:
        known = inner[: len(level.inner_depths)]
        assert [len(node) for node in known] == list(level.inner_depths)
        mine = [node for node in known if len(node) == level.depth]
        for node, seen in zip(mine, level.ancestors, strict=True):
            sees = [other for other, visible in zip(known, seen, strict=True) if visible]
            assert sees == [node[:length] for length in range(1, len(node) + 1)]


WRONG = [
    ("[]", "must not be empty"),
    ("[[0], []]", "a node is a list of child ranks, not empty"),
    ("[[0], [1, 0]]", "[1, 0] needs its parent [1] in the tree"),
    ("[[0], [1], [0]]", "[0] is given twice"),
    ("[[0], [-1]]", "must be at least 0, not -1"),
    ("[[0], [256]]", "must be at most 255, not 256"),
    ("[[0], [true]]", "must be an integer, not true"),
    ("[[0], 1]", "must be a list, not the number 1"),
    ("5", "must be a list, not the number 5"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_graph_with_a_wrong_tree_is_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError) as caught:
        open_graph("bim_eagle", ("drafter.kind=eagle1", f"drafter.tree={text}"))
    assert f"drafter.tree: {message}" in str(caught.value)
