"""Documents as token ids: in the words the model was trained on, cut the same way everywhere."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import specsot
from specsot.states.text.documents import Document, check_document, split_ids
from specsot.states.text.prompts import PromptBook
from specsot.states.text.template import load_template
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
    """Documents with line ends behind them, joined, are what the model learned to read."""
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


@pytest.mark.parametrize(
    "tokenizer, wanted", [(Writes("<s>", True), 1), (Writes("<s>", False), None)]
)
def test_the_beginning_of_text_token_if_it_is_put_in_front(
    tokenizer: Writes, wanted: int | None
) -> None:
    assert leading_id(tokenizer) == wanted  # type: ignore[arg-type]


def test_models_without_one(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert leading_id(tokenizer) is None and leading_id(Writes(None, False)) is None  # type: ignore[arg-type]
