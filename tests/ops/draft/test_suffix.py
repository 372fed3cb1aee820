"""Suffix matching: what is found, what is forgotten, and the trees of what followed."""

from math import exp, isclose, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.ops.draft.suffix import FAR, PAIR, Place, SuffixTexts, suffix_tree

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_matches_are_all_earlier_occurrences(texts: list[list[int]], ids: list[int]) -> None:
    store = SuffixTexts(most=1000)
    for tokens in texts:
        text = store.open_()
        for token in tokens:
            store.append_(text, [token])
    expected = []
    for text, tokens in store.texts.items():
        for end in range(PAIR, len(tokens)):
            most = min(end, len(ids), FAR)
            lengths = [n for n in range(PAIR, most + 1) if tokens[end - n : end] == ids[-n:]]
            expected += [Place(text, end, max(lengths))] if lengths else []
    longest = max((place.length for place in expected), default=0)
    near = {place for place in expected if 2 * place.length > longest}
    found = store.matches(ids)
    assert {*found} == near and len(found) == len(near)
    assert [p.length for p in found] == sorted((p.length for p in found), reverse=True)


def test_the_start_of_another_text_is_compared_and_not_found() -> None:
    store = SuffixTexts(most=100)
    text = store.open_([5, 6])
    store.append_(text, [7, 8, 9])
    assert store.matches([5, 6]) == []
    assert store.matches([5, 6, 7, 8]) == [Place(text, 4, 4)]


def test_the_oldest_texts_are_forgotten() -> None:
    store = SuffixTexts(most=9)
    texts = [store.open_() for _ in range(3)]
    for number, text in enumerate(texts):
        store.append_(text, [10 * number, 1, 2, 3])
    assert list(store.texts) == texts[2:] and store.size == 4
    store.append_(texts[0], [1, 2, 3])  # without effect
    assert [place.text for place in store.matches([1, 2])] == texts[2:]
    store.count_([Place(texts[0], 2, 2)], 2)


def test_a_tree_has_the_shares_of_the_matches_that_pass_through_it() -> None:
    store = SuffixTexts(most=100)
    text = store.open_()
    store.append_(text, [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 6, 9])
    matches = store.matches([8, 1, 2])
    assert [place.length for place in matches] == [2, 2, 2]
    tree = suffix_tree(store, matches, nodes=4, levels=2, stop_ids={9})
    assert tree.tokens == (3, 6, 5, 4) and tree.parents == (-1, -1, 0, 0)
    first = store.chance(2) * 2 / 3
    assert isclose(tree.scores[0], log(first))
    assert isclose(tree.scores[2], log(first * store.chance(3) / 2))
    none = suffix_tree(store, [], nodes=4, levels=2)
    assert none.tokens == suffix_tree(store, matches, nodes=4, levels=0).tokens == ()


def test_lengths_that_were_right_have_a_higher_chance() -> None:
    store = SuffixTexts(most=100)
    text = store.open_()
    store.append_(text, [1, 2, 3])
    before = store.chance(2)
    for token in (3, 3, 3, 4):
        store.count_(store.matches([1, 2]), token)
    assert before < store.chance(2) == (4.0 * 2 / 4 + 3) / 8
    assert store.chance(FAR + 5) == store.chance(FAR)


def test_what_is_expected_after_one_match_is_what_its_tree_promises() -> None:
    store = SuffixTexts(most=100)
    text = store.open_()
    store.append_(text, [1, 2, 3, 4, 5, 6])
    assert store.expected(store.matches([9, 9]), 4) == store.expected(store.matches([1, 2]), 0) == 1
    matches = store.matches([1, 2])
    tree = suffix_tree(store, matches, nodes=3, levels=3)
    assert store.expected(matches, 3) == pytest.approx(1 + sum(map(exp, tree.scores)))
    store.append_(text, [1, 2, 7])
    matches = store.matches([1, 2])
    tree = suffix_tree(store, matches, nodes=8, levels=1)
    assert store.expected(matches, 1) == pytest.approx(1 + sum(map(exp, tree.scores)))


def test_matches_of_a_text_that_was_forgotten_are_dropped() -> None:
    store = SuffixTexts(most=8)
    store.append_(store.open_(), [1, 2, 3, 4])
    matches = store.matches([1, 2])
    store.append_(store.open_(), [5, 6, 7, 8, 9])
    assert matches and store.kept(matches) == []
