"""How good the embedded target is, held to what was promised: a hundred held-out prompts of a kind.

pytest tests/full/test_quality.py
"""

from collections.abc import Callable

import pytest
from helpers.embedded import Embedded
from helpers.support import requests_of

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
    asked = probes("outline", NUMBER)
    run = Embedded().run("bim_eagle", [p.question for p in asked], budget=1)
    right = total = 0
    for request, probe in zip(requests_of(run), asked, strict=True):
        assert request.outline is not None
        titles = [point.title for point in request.outline.points]
        assert len(set(titles)) == len(titles)
        right += sum(title in probe.titles for title in titles)
        total += len(titles)
    assert total >= 3 * NUMBER
    assert right >= 0.95 * total
