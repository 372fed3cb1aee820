"""``bim`` against ``batching`` in full: 320 cases on random models, 64 on the embedded one.

    pytest -s tests/full/test_mode_consistency_grid.py

Cases are drawn by SPECSOT_TEST_SEED, in every draw any two settings meet; every case is one run
in each layout, both held to transformers' greedy decoding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.embedded import Embedded, given_outline
from helpers.support import SEED, Graphs, Tiny, many, named
from runs.test_mode_consistency import FACTORS, check_case, compare

from tools.embedded.heldout import probes

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
TINY = {**FACTORS, "family": FAMILIES, "share": ("outline", "prompt"), "stops": ((2,), ())}
# The embedded model's prompts are questions; their classes are the kinds of held-out prompts.
KINDS = ("outline", "unseen", "unknown")
EMBEDDED = {**FACTORS, "prompts": KINDS}
QUESTIONS = {kind: [p.question for p in probes(kind, 24, SEED)] for kind in KINDS}


@pytest.fixture(scope="module")
def embedded() -> Iterator[Embedded]:
    made = Embedded()
    yield made
    tally = made.reference.tally
    print(f"\nembedded: {tally.tokens} tokens equal to transformers', {tally.ties} numeric ties")


@pytest.mark.parametrize("case", many(TINY, 320), ids=named)
def test_random_models(case: dict[str, Any], tiny: Callable[..., Tiny], graphs: Graphs) -> None:
    made = tiny(case["family"], window=17 if case["family"] == "mistral" else None)
    check_case(case, made, graphs, stops=case["stops"], budget=16)


@pytest.mark.parametrize("case", many(EMBEDDED, 64), ids=named)
def test_the_embedded_model(case: dict[str, Any], embedded: Embedded) -> None:
    question = QUESTIONS[case["prompts"]][case["parts"] * 3 + case["max_num_branches"] % 3 - 3]
    sets = [f"layout.{key}={case[key]}" for key in ("max_num_branches", "order")]
    sets.append(f"attention={case['attention']}")
    sets += ["drafter.num_draft_tokens=6"] if case["graph"] == "eagle" else []
    outline = given_outline(case["parts"], deps=case["parts"] % 2 == 0)
    graphs = [f"{layout}_{case['graph']}" for layout in ("bim", "batching")]
    runs = [
        embedded.run(graph, [question], outline=outline, sets=sets, budget=48) for graph in graphs
    ]
    compare(*runs)
    assert embedded.check(runs[0], graphs[0]) >= case["parts"]
