"""Search over documents: BM25 as it is written down, and an order that is always the same."""

from collections import Counter
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot.states.text.documents import Document, DocumentSearch, words_of

WORDS = ("bee", "honey", "tram", "rain", "Zoë", "snow")
TEXT = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)
CROWD = st.lists(TEXT, min_size=1, max_size=8)


def documents(texts: list[str]) -> list[Document]:
    return [Document(f"#{n}", text) for n, text in enumerate(texts)]


def written_down(texts: list[str], query: str) -> list[float]:
    """BM25 in Lucene's form, straight from its formula."""
    bags = [Counter(words_of(text)) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(texts)
    for word in words_of(query):
        having = sum(word in bag for bag in bags)
        idf = log(1 + (len(bags) - having + 0.5) / (having + 0.5))
        for at, bag in enumerate(bags):
            size = 1.5 * (1 - 0.75 + 0.75 * bag.total() / mean)
            scores[at] += idf * bag[word] / (bag[word] + size) if bag[word] else 0.0
    return scores


@settings(deadline=None, max_examples=60)
@given(CROWD, TEXT)
def test_scores_are_those_of_the_formula(texts: list[str], query: str) -> None:
    found = DocumentSearch(documents(texts)).find(query, 99)
    titled = [f"{n} {text}" for n, text in enumerate(texts)]
    wanted = written_down(titled, query)
    assert {hit.index for hit in found} == {at for at, score in enumerate(wanted) if score > 0}
    for hit in found:
        assert hit.score == pytest.approx(wanted[hit.index], rel=1e-5)
        assert hit.document.text == texts[hit.index]


@settings(deadline=None, max_examples=60)
@given(CROWD, TEXT, st.integers(0, 9))
def test_best_first_ties_in_order_and_no_more_than_asked(
    texts: list[str], query: str, limit: int
) -> None:
    search = DocumentSearch(documents(texts))
    found = search.find(query, limit)
    keys = [(-hit.score, hit.index) for hit in found]
    assert keys == sorted(keys) and len(found) <= limit
    assert found == search.find(query, 99)[:limit], "a limit only cuts"
    assert found == DocumentSearch(documents(texts)).find(query, limit)


@settings(deadline=None, max_examples=40)
@given(CROWD, TEXT, st.randoms(use_true_random=False))
def test_order_of_the_documents_decides_nothing_but_ties(
    texts: list[str], query: str, rng: object
) -> None:
    given = documents(texts)
    mixed = list(given)
    rng.shuffle(mixed)  # type: ignore[attr-defined]
    scores = {hit.document: hit.score for hit in DocumentSearch(given).find(query, 99)}
    assert {hit.document: hit.score for hit in DocumentSearch(mixed).find(query, 99)} == scores


def test_equal_documents_come_in_their_order() -> None:
    same = [Document("a", "rain"), Document("b", "snow"), Document("c", "rain")]
    assert [hit.index for hit in DocumentSearch(same).find("rain", 9)] == [0, 2]
    many = [Document("a", "rain"), Document("b", "rain and snow")] * 40
    assert [hit.index for hit in DocumentSearch(many).find("rain", 99)] == [
        *range(0, 80, 2),
        *range(1, 80, 2),
    ]


def test_case_marks_and_titles() -> None:
    given = [Document("Bees", "They make honey."), Document("Straße", "A tram stops here.")]
    search = DocumentSearch(given)
    assert [hit.index for hit in search.find("HONEY!", 9)] == [0]
    assert [hit.index for hit in search.find("the bees", 9)] == [0]
    assert [hit.index for hit in search.find("STRASSE", 9)] == [1]
    assert search.find("an unknown query", 9) == ()


@pytest.mark.parametrize("texts", [[], ["", ""], ["?!", "..."]])
def test_nothing_to_find(texts: list[str]) -> None:
    search = DocumentSearch([Document("-", text) for text in texts])
    assert search.find("rain", 9) == () and search.find("", 9) == () and search.find("?", 9) == ()
