"""N-grams: golden drafts, the same trees as brute force; packing."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.vanilla import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.ngram import HostTree, SuffixIndex, lookup_tree
from specsot.ops.draft.proposals import pack
from specsot.ops.types import ancestors

IDS = st.lists(st.integers(0, 3), max_size=40)
STOPS = st.sets(st.just(0))


def chain_of(tree: HostTree) -> list[int]:
    count = len(tree.tokens)
    assert tree.parents == tuple(range(-1, count - 1))
    assert tree.depths == tuple(range(1, count + 1))
    return list(tree.tokens)


def paths(tree: HostTree) -> dict[tuple[int, ...], float]:
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(tree.parents):
        assert parent < node
        found.append((*(found[parent] if parent >= 0 else ()), tree.tokens[node]))
        assert len(found[-1]) == tree.depths[node]
    assert len(set(found)) == len(found), "no two siblings have the same token"
    return dict(zip(found, tree.scores, strict=True))


@pytest.mark.parametrize("case", cases("prompt_lookup"))
def test_one_match_drafts_what_transformers_drafts(case: Any) -> None:
    index = SuffixIndex(case["max_ngram"])
    index.append_(case["ids"])
    # transformers drafts nothing when only one more token fits
    room = 0 if case["max_length"] == len(index.ids) + 1 else case["num_output_tokens"]
    tree = lookup_tree(index, nodes=room, levels=room, stop_ids=case["eos"])
    assert chain_of(tree) == case["draft"]


def naive_matches(ids: list[int], longest: int, most: int) -> list[int]:
    found: list[int] = []
    for size in range(min(longest, len(ids) - 1), 0, -1):
        ends = [e for e in range(size, len(ids)) if ids[e - size : e] == ids[-size:]]
        found += [e for e in ends if e not in found]
    return found[:most]


@settings(max_examples=150, deadline=None)
@given(IDS, IDS, st.integers(1, 4), st.integers(1, 6))
def test_an_index_that_grew_finds_what_a_rescan_finds(
    prompt: list[int], own: list[int], longest: int, most: int
) -> None:
    index = SuffixIndex(longest)
    for ids, tokens in ((prompt, prompt), (prompt + own, own)):
        index.append_(tokens)
        assert index.ids == ids
        assert index.matches(most) == naive_matches(ids, longest, most)


@settings(max_examples=150, deadline=None)
@given(IDS, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), STOPS)
def test_a_lookup_tree_holds_the_most_frequent_beginnings(
    ids: list[int], nodes: int, levels: int, matches: int, stop_ids: set[int]
) -> None:
    index = SuffixIndex(3)
    index.append_(ids)
    tree = lookup_tree(index, nodes=nodes, levels=levels, matches=matches, stop_ids=stop_ids)
    found = naive_matches(ids, 3, matches)
    counts: Counter[tuple[int, ...]] = Counter()
    for place in found:
        for end in range(place + 1, min(place + levels, len(ids)) + 1):
            if stop_ids & set(ids[place:end]):
                break
            counts[tuple(ids[place:end])] += 1
    ranked = sorted(counts.values(), reverse=True)[:nodes]
    assert sorted((counts[path] for path in paths(tree)), reverse=True) == ranked
    for path, score in paths(tree).items():
        assert score == pytest.approx(math.log(counts[path] / len(found)))


# --- packing -------------------------------------------------------------------------------------


def test_trees_are_packed_into_a_proposal_padded_to_the_largest() -> None:
    trees = [
        HostTree((5, 6, 7), (-1, 0, 0), (1, 2, 2), (-0.5, -1.0, -2.0)),
        HostTree(),
        HostTree((0,), (-1,), (1,), (0.0,)),
    ]
    proposal = pack(trees, torch.device("cpu"))
    assert proposal.levels == 2
    assert proposal.tokens_SN.tolist() == [[5, 6, 7], [0, 0, 0], [0, 0, 0]]
    assert proposal.parents_SN.tolist() == [[-1, 0, 0], [-1, -1, -1], [-1, -1, -1]]
    assert proposal.depths_SN.tolist() == [[1, 2, 2], [1, 1, 1], [1, 1, 1]]
    assert proposal.valid_SN.tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert proposal.scores_SN.tolist()[2] == [0.0, -math.inf, -math.inf]
    kinds = (proposal.tokens_SN.dtype, proposal.valid_SN.dtype, proposal.scores_SN.dtype)
    assert kinds == (torch.int64, torch.bool, torch.float32)
    above_T = ancestors(proposal.parents_SN, proposal.levels)[0, 3]
    assert above_T.tolist() == [True, True, False, True]
    assert pack([], torch.device("cpu")).valid_SN.shape == (0, 0)
