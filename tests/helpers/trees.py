"""Looking at token trees that were made on the host."""

from specsot.ops.draft.proposals import HostTree


def chain_of(tree: HostTree) -> list[int]:
    """The tokens of a tree that is a chain."""
    count = len(tree)
    assert tree.parents == tuple(range(-1, count - 1))
    assert tree.depths == tuple(range(1, count + 1))
    return list(tree.tokens)


def paths(tree: HostTree) -> dict[tuple[int, ...], float]:
    """The tokens from the root to every node, and its score."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents):
        assert parent < node
        found.append((*(found[parent] if parent >= 0 else ()), tree.tokens[node]))
        assert len(found[-1]) == tree.depths[node]
    assert len(set(found)) == len(found), "no two siblings have the same token"
    return dict(zip(found, tree.scores, strict=True))
