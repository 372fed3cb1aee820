"""How good the embedded target is, held to what was promised: a hundred held-out prompts of a kind.

pytest tests/full/test_quality.py"""

from collections.abc import Callable

import pytest
from helpers.embedded import Embedded, titles_named

from specsot.engine.prepare.job import embedded_folder
from tools.embedded.heldout import probes
from tools.embedded.quality import generator, outlines, rates, reading

NUMBER = 100


@pytest.fixture(scope="module")
def generate() -> Callable[..., list[str]]:
    return generator(embedded_folder("target"))


def test_outlines_without_the_grammar_are_valid(generate: Callable[..., list[str]]) -> None:
    assert rates(outlines(generate, "outline", NUMBER))["valid"] >= 0.95


def test_questions_about_documents_are_answered(generate: Callable[..., list[str]]) -> None:
    assert rates(reading(generate, "one_hop", NUMBER))["exact"] >= 0.90


def test_titles_under_the_grammar_name_aspects_of_the_subject_and_none_twice() -> None:
    right, total = titles_named(Embedded(), probes("outline", NUMBER), budget=1)
    assert total >= 3 * NUMBER and right >= 0.95 * total
