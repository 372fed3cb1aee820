"""Outlines that are numbered lists: read, written, and held to their grammar."""

from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specsot.states.text.grammar import OutlineGrammar, OutlineMatcher, list_grammar
from specsot.states.text.outline import USUAL_LENGTH, Point, parse_list, render_list, repeats

SPECIAL = ["<pad>", "<s>", "<end>"]
END = 2


@cache
def tokenizer() -> Tokenizer:
    """Byte-level, with all bytes; some tokens of it cross the end of a line."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "1. How rain forms\n2. Floods in the news\n3. What to do about floods\n4. Rain again\n"
    made.train_from_iterator([text] * 5, trainer)
    return made


@cache
def grammar(most: int) -> OutlineGrammar:
    return OutlineGrammar(tokenizer(), tokenizer().get_vocab_size(), [END], most, form="list")


def point(number: int, title: str) -> Point:
    return Point(number, USUAL_LENGTH, None, (), title)


def take(matcher: OutlineMatcher, text: str) -> None:
    """Byte by byte, so that any text can be taken in."""
    for byte in tokenizer().encode(text).ids:
        matcher.advance(byte)


def test_a_list_is_read_as_it_was_written() -> None:
    points = (point(1, "How rain forms"), point(2, "Floods"))
    assert parse_list(render_list(points), max_branches=8).points == points
    assert parse_list(render_list(points), max_branches=8).status == "ok"


@pytest.mark.parametrize(
    ("text", "titles", "status"),
    [
        ("1. Rain\n\n 2)  Sun \n", ["Rain", "Sun"], "ok"),
        ("<think>1. Hm</think>\n1. Rain\n2. Sun", ["Rain", "Sun"], "ok"),
        ("3. Rain\n7. Sun", ["Rain", "Sun"], "ok"),
        ('1. **Rain**: it falls\n2. "Sun"', ["Rain", "Sun"], "ok"),
        ("1. Rain\n2. rain!\n3. Sun", ["Rain", "Sun"], "partial"),
        ("Here it is:\n1. Rain\n2. Sun", ["Rain", "Sun"], "partial"),
        ("1. a\n2. b\n3. c\n4. d\n5. e", ["a", "b", "c", "d"], "partial"),
        ("1. Rain\n2. a|b\n3. </s>\n4.", ["Rain"], "partial"),
        ("1. " + "x" * 61, ["x" * 60], "ok"),
        ("It depends.", [], "unparsable"),
        ("", [], "unparsable"),
    ],
)
def test_what_models_write(text: str, titles: list[str], status: str) -> None:
    outline = parse_list(text, max_branches=4)
    assert [p.title for p in outline.points] == titles
    assert [p.id for p in outline.points] == list(range(1, len(titles) + 1))
    assert outline.status == status
    assert bool(outline.skipped) == (status != "ok")


@pytest.mark.parametrize("most", [1, 2, 8])
def test_what_the_grammar_allows_is_read_without_mending(most: int) -> None:
    rng = np.random.default_rng(most)
    question = "What is rain?"
    for _ in range(25):
        matcher, ids = grammar(most).matcher(question), []
        while not matcher.finished:
            legal = np.flatnonzero(matcher.legal_mask())
            ends = [t for t in legal if t == END or "\n" in tokenizer().decode([t])]
            ids.append(int(rng.choice(ends if ends and rng.random() < 0.5 else legal)))
            matcher.advance(ids[-1])
        outline = parse_list(tokenizer().decode(ids), max_branches=most)
        assert outline.status == "ok" and not outline.mended
        assert min(2, most) <= len(outline.points) <= most
        titles = [p.title for p in outline.points]
        assert not any(repeats(t, titles[:i], question) for i, t in enumerate(titles))


def test_a_title_ends_where_it_says_something_new() -> None:
    matcher = grammar(4).matcher("How can I improve my time management?")
    newline = tokenizer().encode("\n").ids[0]
    for text in ("1. How can I improve my time", "1. Rain\n2. rain"):
        matcher = grammar(4).matcher("How can I improve my time management?")
        take(matcher, text)
        assert not matcher.is_legal(newline) and not matcher.is_legal(END)
        take(matcher, " today")
        assert matcher.is_legal(newline)
        matcher.rollback(len(tokenizer().encode(" today").ids))
        assert not matcher.is_legal(newline)


def test_one_line_alone_is_no_outline_where_two_are_allowed() -> None:
    matcher = grammar(2).matcher()
    take(matcher, "1. Rain")
    assert not matcher.is_legal(END)
    take(matcher, "\n2. Sun")
    assert matcher.is_legal(END)
    matcher.advance(END)
    assert matcher.finished and not matcher.legal_mask().any()


def test_the_grammar_says_how_many_lines_there_are() -> None:
    assert len(list_grammar(8).splitlines()) == 9
