"""The embedded model in full: forty held-out prompts, all graphs; outlines of 1 to 8 branches."""

from collections.abc import Iterator

import pytest
from helpers.embedded import PLAIN, Embedded, given_outline

from tools.embedded.heldout import probes

QUESTIONS = [
    p.question
    for kind, count in (("outline", 16), ("unseen", 12), ("unknown", 6), ("one_hop", 6))
    for p in probes(kind, count, 1)
]
FULL = ("bim_plain", "bim_eagle", "batching_plain", "batching_eagle")
GRAPHS = (*PLAIN, *FULL)


@pytest.fixture(scope="module")
def embedded() -> Iterator[Embedded]:
    made = Embedded()
    yield made
    tally = made.reference.tally
    print(f"\nembedded: {tally.tokens} tokens equal to transformers', {tally.ties} numeric ties")


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("first", range(0, len(QUESTIONS), 5))
def test_prompts(embedded: Embedded, graph: str, first: int) -> None:
    run = embedded.run(graph, QUESTIONS[first : first + 5])
    assert embedded.check(run, graph) > 40


@pytest.mark.parametrize("graph", FULL)
@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize("count", range(1, 9))
def test_given_outlines(embedded: Embedded, graph: str, share: str, count: int) -> None:
    sets = (f"skeleton.share={share}", f"layout.max_num_branches={1 + count % 4}")
    outline = given_outline(count, deps=count % 2 == 0)
    run = embedded.run(graph, QUESTIONS[count : count + 1], outline=outline, sets=sets, budget=60)
    assert embedded.check(run, graph) >= count
