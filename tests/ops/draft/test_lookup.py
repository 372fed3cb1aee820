"""Prompt lookup: golden drafts, and the same matches and trees as a rescan finds."""

import math
from collections import Counter
from typing import Any

import pytest
from helpers.trees import chain_of, paths
from helpers.vectors import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.lookup import SuffixIndex, lookup_tree

IDS = st.lists(st.integers(0, 3), max_size=40)


@pytest.mark.parametrize("case", cases("prompt_lookup"))
def test_one_match_drafts_what_transformers_drafts(case: Any) -> None:
    index = SuffixIndex(case["max_ngram"])
    index.append_(case["ids"])
    # transformers drafts nothing when only one more token fits
    room = 0 if case["max_length"] == len(index) + 1 else case["num_output_tokens"]
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
        assert (len(index), index.ids) == (len(ids), ids)
        assert index.matches(most) == naive_matches(ids, longest, most)


@settings(max_examples=150, deadline=None)
@given(IDS, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.sets(st.integers(0, 3)))
def test_a_lookup_tree_holds_the_most_frequent_beginnings(
    ids: list[int], nodes: int, levels: int, matches: int, stops: set[int]
) -> None:
    stop_ids = {stop for stop in stops if stop == 0}
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


def test_a_common_beginning_comes_before_rare_endings() -> None:
    index = SuffixIndex(1)
    index.append_([9, 1, 2, 9, 1, 3, 9, 4, 5, 9])
    tree = lookup_tree(index, nodes=3, levels=2, matches=3)
    assert (tree.tokens, tree.parents) == ((1, 2, 3), (-1, 0, 0))
