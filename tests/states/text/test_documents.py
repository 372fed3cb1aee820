"""Documents: token ids as in training, cut the same way everywhere; search by BM25."""

from collections import Counter
from math import log
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import specsot
from specsot.states.text.documents import (
    WORD,
    Document,
    DocumentSearch,
    check_document,
    split_ids,
)
from specsot.states.text.prompts import PromptBook, load_template
from specsot.states.text.tokens import PromptError, leading_id
from tools.embedded.documents import opening
from tools.embedded.pieces import USER

EMBEDDED = Path(specsot.__file__).parent / "models" / "embedded" / "target"


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return AutoTokenizer.from_pretrained(EMBEDDED)


@given(st.lists(st.integers(0, 99), max_size=60), st.integers(1, 20))
def test_cuts_lose_nothing_and_are_even(ids: list[int], most: int) -> None:
    parts = split_ids(ids, most)
    assert [i for part in parts for i in part] == ids
    sizes = [len(part) for part in parts]
    assert len(parts) == -(-len(ids) // most)
    assert all(0 < size <= most for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_a_chunk_has_room_for_something() -> None:
    with pytest.raises(ValueError, match="at most 0"):
        split_ids([1], 0)


def test_ids_are_those_of_the_training_texts(tokenizer) -> None:  # type: ignore[no-untyped-def]
    book = PromptBook(tokenizer, load_template("embedded"))
    texts = ["Ann Lee works as a baker. Ann Lee lives in Bo.", "Name: Bo Li\nAge: 5", "A / B; C"]
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    ours = [i for text in texts for i in [*book.document("unused", text), newline]]
    cut = [pieces for seed in range(9) if len(pieces := opening(Random(seed), texts)) > 2]
    assert cut, "half of the training texts are cut where a slot begins"
    for pieces in cut:
        theirs = [tokenizer.encode(piece.text, add_special_tokens=False) for piece in pieces]
        assert ours == [i for part in theirs[1:] for i in part] and pieces[0].text == USER


def test_a_template_may_show_titles_and_no_text_becomes_a_control_token(tokenizer) -> None:  # type: ignore[no-untyped-def]
    book = PromptBook(tokenizer, load_template("instruct"))
    ids = book.document("<|im_end|>", "Say <|im_start|>.")
    assert tokenizer.decode(ids) == 'Document "<|im_end|>":\nSay <|im_start|>.'
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_what_cannot_be_a_document() -> None:
    check_document(Document("a.txt", "Text."))
    for wrong in (Document("a", ""), Document("", "x"), Document("x" * 201, "x")):
        with pytest.raises(PromptError, match="document"):
            check_document(wrong)


class Writes:
    """A tokenizer that may put its beginning-of-text token in front."""

    def __init__(self, bos: str | None, puts_it: bool) -> None:
        self.bos_token, self.puts_it = bos, puts_it

    def encode(self, text: str, **options: object) -> list[int]:
        ids = [1] if text == self.bos_token else [7]
        return [1, *ids] if self.puts_it else ids


def test_the_beginning_of_text_token_if_it_is_put_in_front(tokenizer) -> None:  # type: ignore[no-untyped-def]
    writers = (Writes("<s>", True), Writes("<s>", False), Writes(None, False), tokenizer)
    assert [leading_id(one) for one in writers] == [1, None, None, None]


WORDS = ("bee", "honey", "tram", "rain", "Zoë", "snow")
TEXT = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)
CROWD = st.lists(TEXT, min_size=1, max_size=8)


def documents(texts: list[str]) -> list[Document]:
    return [Document(f"#{n}", text) for n, text in enumerate(texts)]


def written_down(texts: list[str], query: str) -> list[float]:
    bags = [Counter(WORD.findall(text.casefold())) for text in texts]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(texts)
    for word in WORD.findall(query.casefold()):
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
    wanted = {at: score for at, score in enumerate(written_down(titled, query)) if score > 0}
    assert found == pytest.approx(wanted, rel=1e-5)


@settings(deadline=None, max_examples=60)
@given(CROWD, TEXT, st.integers(0, 9))
def test_best_first_ties_in_order_and_no_more_than_asked(
    texts: list[str], query: str, limit: int
) -> None:
    search = DocumentSearch(documents(texts))
    found = search.find(query, limit)
    keys = [(-score, index) for index, score in found.items()]
    assert keys == sorted(keys) and len(found) <= limit
    assert [*found] == [*search.find(query, 99)][:limit], "a limit only cuts"
    assert found == DocumentSearch(documents(texts)).find(query, limit)


def test_equal_documents_come_in_their_order() -> None:
    same = [Document("a", "rain"), Document("b", "snow"), Document("c", "rain")]
    assert [*DocumentSearch(same).find("rain", 9)] == [0, 2]
    many = [Document("a", "rain"), Document("b", "rain and snow")] * 40
    assert [*DocumentSearch(many).find("rain", 99)] == [*range(0, 80, 2), *range(1, 80, 2)]


def test_case_marks_and_titles() -> None:
    given = [Document("Bees", "They make honey."), Document("Straße", "A tram stops here.")]
    search = DocumentSearch(given)
    for query, found in (("HONEY!", [0]), ("the bees", [0]), ("STRASSE", [1]), ("unknown", [])):
        assert [*search.find(query, 9)] == found


@pytest.mark.parametrize("texts", [[], ["", ""], ["?!", "..."]])
def test_nothing_to_find(texts: list[str]) -> None:
    search = DocumentSearch([Document("-", text) for text in texts])
    assert not any(search.find(query, 9) for query in ("rain", "", "?"))
