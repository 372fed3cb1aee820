"""The embedded models in full: held-out prompts through all graphs, and every embedded drafter.

    pytest -s tests/full/test_embedded_grid.py

Cases are drawn by SPECSOT_TEST_SEED; in every draw any two settings meet."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from helpers.embedded import PLAIN, Embedded, given_outline
from helpers.support import FULL, accepted_of, many, named, pairwise, tokens_of

from specsot.engine.models import Models, with_drafter
from specsot.engine.prepare.job import embedded_folder
from tools.embedded.heldout import probes

QUESTIONS = [
    p.question
    for kind, count in (("outline", 16), ("unseen", 12), ("unknown", 6), ("one_hop", 6))
    for p in probes(kind, count, 1)
]
KINDS = {"eagle": "eagle3", "dflash": "dflash", "ddtree": "dflash", "vanilla": "vanilla"}
GIVEN = {
    "drafter": (*KINDS, "ngram", "plain"),
    "parts": tuple(range(1, 9)),
    "order": ("fcfs", "longest_first", "shortest_first"),
    "max_num_branches": (1, 2, 3, 5, 8),
    "attention": ("auto", "dense", "grouped"),
    "share": ("outline", "prompt"),
}


@pytest.fixture(scope="module")
def embedded() -> Iterator[Embedded]:
    made = Embedded()
    yield made
    tally = made.reference.tally
    print(f"\nembedded: {tally.tokens} tokens equal to transformers', {tally.ties} numeric ties")


@pytest.fixture(scope="module")
def drafting(embedded: Embedded) -> dict[str, Models]:
    kinds = {k: with_drafter(embedded.models, embedded_folder(k), k) for k in set(KINDS.values())}
    return {name: kinds[kind] for name, kind in KINDS.items()}


@pytest.mark.parametrize("graph", [*PLAIN, *FULL])
@pytest.mark.parametrize("first", range(0, len(QUESTIONS), 5))
def test_prompts(embedded: Embedded, graph: str, first: int) -> None:
    run = embedded.run(graph, QUESTIONS[first : first + 5])
    assert embedded.check(run, graph) > 40


@pytest.mark.parametrize("case", many(partial(pairwise, GIVEN), 120), ids=named)
def test_given_outlines_in_every_layout(
    case: dict[str, Any], embedded: Embedded, drafting: dict[str, Models]
) -> None:
    sets = [f"layout.{key}={case[key]}" for key in ("max_num_branches", "order")]
    sets += [f"attention={case['attention']}", f"skeleton.share={case['share']}"]
    outline = given_outline(case["parts"], deps=case["parts"] % 2 == 0)
    found = []
    for layout in ("bim", "batching", "paged"):
        graph = f"bim_{case['drafter']}"
        models = drafting.get(case["drafter"])
        question = QUESTIONS[case["parts"] + case["max_num_branches"]]
        settings = {"sets": [*sets, f"layout.kind={layout}"], "models": models}
        run = embedded.run(graph, [question], outline=outline, budget=48, **settings)
        assert embedded.check(run, graph) >= case["parts"]
        found.append((tokens_of(run), accepted_of(run)))
    assert found[0] == found[1] == found[2]
