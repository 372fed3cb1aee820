"""N-grams: golden drafts and traces, the same trees as brute force; packing."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.vanilla import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.ngram import (
    CountTable,
    HostTree,
    SuffixIndex,
    count_tree,
    longest_match,
    lookup_tree,
)
from specsot.ops.draft.proposals import pack
from specsot.ops.types import ancestors
from specsot.ops.verify.verify import filler_ids

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


def table_of(case: Any) -> CountTable:
    return CountTable(case["n"], case["n"] - 1 if case["one_level"] else case["min_context"])


@pytest.mark.parametrize("case", cases("nasd"))
def test_tables_follow_the_golden_traces(case: Any) -> None:
    table = table_of(case)
    for op in case["trace"]:
        seq = op.get("seq", [])
        if op["op"] == "initialize":
            table.learn_(seq)
        elif op["op"] == "update":
            table.update_(seq, len(seq), op["tokens"])
        elif op["op"] == "draft":
            tree = count_tree([table], seq, nodes=op["gamma"], levels=op["gamma"])
            assert chain_of(tree) == op["draft"]
        elif op["op"] == "has_gram":
            *before, last = op["gram"]
            one = table.followers.get(tuple(before))
            assert (one is not None and last in one.counts) == op["value"]
        else:
            size, said = longest_match([table], seq) or (0, None)
            assert (said is not None) == op["known"]
            assert (said.ranked[0] if said else None) == op["token"]
            assert size == op["context_len"]
    final = [
        [list(key), [list(item) for item in sorted(one.counts.items())], one.ranked[0]]
        for key, one in sorted(table.followers.items())
    ]
    assert final == case["final"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 4))
def test_ranked_followers_are_the_most_frequent(ids: list[int], width: int) -> None:
    table = CountTable(2, width=width)
    for end in range(len(ids) + 1):  # at every moment, not only at the end
        one = table.followers.get((ids[end - 1],)) if end else None
        if one is not None:
            best = sorted(one.counts.values(), reverse=True)[:width]
            assert [one.counts[token] for token in one.ranked] == best
            assert one.total == sum(one.counts.values())
        table.learn_(ids[: end + 1], end)


@settings(max_examples=100, deadline=None)
@given(IDS, st.integers(0, 40), st.integers(2, 4))
def test_learning_round_by_round_equals_learning_at_once(
    ids: list[int], cut: int, order: int
) -> None:
    whole, grown = CountTable(order), CountTable(order)
    whole.learn_(ids)
    grown.learn_(ids[:cut])
    grown.learn_(ids, min(cut, len(ids)))
    assert whole.followers == grown.followers


@settings(max_examples=100, deadline=None)
@given(IDS, IDS, st.integers(1, 10), st.integers(1, 4), st.integers(1, 3), st.integers(2, 4), STOPS)
def test_a_count_tree_holds_the_most_probable_nodes(
    prompt: list[int], own: list[int], nodes: int, levels: int, width: int, order: int, stops: Any
) -> None:
    tables = [CountTable(order), CountTable(order)]
    tables[0].learn_(prompt)
    tables[1].learn_(own)
    context = tuple(prompt + own)
    tree = count_tree(tables, context, nodes=nodes, levels=levels, width=width, stop_ids=stops)
    everything: dict[tuple[int, ...], float] = {}

    def descend(path: tuple[int, ...], score: float) -> None:
        match = longest_match(tables, (*context, *path)) if len(path) < levels else None
        for token in match[1].ranked[:width] if match else ():
            assert match is not None
            if token in stops:
                continue
            share = match[1].counts[token] / match[1].total
            everything[*path, token] = score + math.log(share)
            descend((*path, token), everything[*path, token])

    descend((), 0.0)
    found = paths(tree)
    assert found == {path: pytest.approx(everything[path]) for path in found}
    best = sorted(everything.values(), reverse=True)[:nodes]
    assert sorted(found.values(), reverse=True) == pytest.approx(best)


def test_counts_of_the_prompt_and_of_the_branch_are_added() -> None:
    prompt, own = CountTable(2), CountTable(2)
    prompt.learn_([1, 2, 1, 2, 1, 3])
    own.learn_([1, 3, 1, 3])
    match = longest_match([prompt, own], [7, 1])
    assert match is not None
    size, said = match
    assert (size, said.ranked, said.counts, said.total) == (1, [3, 2], {2: 2, 3: 3}, 5)
    assert longest_match([prompt, own], [7]) is None


class Narrow(list[int]):
    """Token ids of which nobody may look at more than a few at once."""

    def __getitem__(self, at: Any) -> Any:
        assert not isinstance(at, slice) or len(range(*at.indices(len(self)))) <= 3
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        raise AssertionError("the whole context is walked through")


def test_neither_learning_nor_drafting_looks_at_the_whole_context() -> None:
    ids, table = Narrow([1, 2, 3] * 300), CountTable(4)
    table.learn_(ids, 890)
    assert count_tree([table], ids, nodes=3, levels=3).tokens == (1, 2, 3)


def test_fillers_are_learnt_where_the_target_gave_them_a_chance() -> None:
    scores_RV = torch.tensor([[0.0, 2.0, 1.0, -1.0], [-torch.inf, -torch.inf, 5.0, -torch.inf]])
    ids = filler_ids(scores_RV, 2)[:, :2]
    assert ids[0].tolist() == [1, 2]
    assert sorted(ids[1].tolist()) == [-1, 2]
    table = CountTable(2)
    table.learn_([0, 1, 2], 1, ids.tolist())
    assert table.followers[(0,)].counts == {1: 2, 2: 1}, "the token itself, and as a filler"
    assert table.followers[(1,)].counts == {2: 2}


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
