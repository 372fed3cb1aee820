"""Every drafter in both layouts, with 1 to 8 branches in every order, held to transformers.

First on random models, then the embedded drafters on the embedded target.

    pytest tests/full/test_drafter_grid.py

Cases are drawn by SPECSOT_TEST_SEED from the factors of tests/runs/test_drafters.py; in every draw
any two settings meet. The summary says how many tokens were compared: more than 50,000.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.embedded import Embedded, given_outline
from helpers.support import Graphs, many, named
from runs.test_drafters import WHOLE, Make, check_case

from specsot.engine.models import Models, with_drafter
from specsot.engine.prepare.environment import embedded_folder
from tools.embedded.heldout import probes

KINDS = {"eagle": "eagle3", "dflash": "dflash", "ddtree": "dflash", "vanilla": "vanilla"}
EMBEDDED = {
    "drafter": (*KINDS, "ngram"),
    "layout": ("bim", "batching", "paged"),
    "parts": tuple(range(1, 9)),
    "order": ("fcfs", "longest_first", "shortest_first"),
    "max_num_branches": (1, 3, 8),
}
QUESTIONS = [probe.question for probe in probes("outline", 12, 0)]


@pytest.fixture(scope="module")
def embedded() -> Iterator[Embedded]:
    made = Embedded()
    yield made
    tally = made.reference.tally
    print(f"\nembedded: {tally.tokens} tokens equal to transformers', {tally.ties} numeric ties")


@pytest.fixture(scope="module")
def drafting(embedded: Embedded) -> dict[str, Models]:
    """The embedded target with each of its drafters."""
    kinds = {k: with_drafter(embedded.models, embedded_folder(k), k) for k in set(KINDS.values())}
    return {name: kinds[kind] for name, kind in KINDS.items()}


@pytest.mark.parametrize("case", many(WHOLE, 1000), ids=named)
def test_every_drafter_is_lossless(case: dict[str, Any], tiny: Make, graphs: Graphs) -> None:
    check_case(case, tiny, graphs)


@pytest.mark.parametrize("case", many(EMBEDDED, 80), ids=named)
def test_embedded_drafters_are_lossless(
    case: dict[str, Any], embedded: Embedded, drafting: dict[str, Models]
) -> None:
    graph = f"{case['layout']}_{case['drafter']}"
    run = embedded.run(
        graph,
        [QUESTIONS[case["parts"]]],
        outline=given_outline(case["parts"], deps=case["parts"] % 2 == 0),
        sets=[f"layout.{key}={case[key]}" for key in ("max_num_branches", "order")],
        budget=32,
        models=drafting.get(case["drafter"]),
    )
    assert embedded.check(run, graph) >= case["parts"]
