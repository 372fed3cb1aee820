"""Sampled text over the whole of tests/runs/test_sampling.py's factors, in float64 and in float32.

    pytest -s tests/full/test_sampling_grid.py

Cases are drawn by SPECSOT_TEST_SEED; in every draw any two settings meet. In float64 every token
must be the drafter-free run's; in float32 a difference must be a numeric tie: the float64 models
say the reference's token, and what the two tokens were chosen by lies less than 1e-4 apart.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.sampled import FACTORS, Make, drawn, plain, texts, tokens
from helpers.support import Graphs, contexts, many, named, requests_of

from specsot.engine.run.scoring import next_scores
from specsot.states.request import Branch

TIE = 1e-4
BUDGET = 24


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()
    yield found
    print(f"\nsampled: {dict(found)}")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", many(FACTORS, 560), ids=named)
def test_one_seed_is_one_text(
    case: dict[str, Any], dtype: str, tiny: Make, graphs: Graphs, tally: Counter[str]
) -> None:
    made, exact = tiny("llama", dtype=dtype), tiny("llama", dtype="float64")
    alone, run = (drawn(one, made, graphs, BUDGET) for one in (plain(case), case))
    tally[f"{dtype} tokens"] += tokens(run)
    if texts(run) == texts(alone):
        return
    assert dtype == "float32", "a difference in float64"
    book = made.book(case["share"], case["stops"])
    for one, two in zip(requests_of(alone), requests_of(run), strict=True):
        pairs = zip(contexts(one, book, False), contexts(two, book, False), strict=True)
        for (here, before), (there, other) in pairs:
            if before == other and here.tokens != there.tokens:
                assert _tie(exact, here, there, before), f"{here.name}: no tie"
                tally["ties"] += 1


def _tie(exact: Any, here: Branch, there: Branch, context: list[int]) -> bool:
    """Whether the first difference is decided by less than the tie's margin in float64."""
    both = zip([*here.tokens, None], [*there.tokens, None], strict=False)
    place, (one, two) = next((i, pair) for i, pair in enumerate(both) if pair[0] != pair[1])
    order_V = next_scores(exact.models, here, context, place)
    stops = list(here.request.stop_ids)
    values = [order_V[stops].max() if token is None else order_V[token] for token in (one, two)]
    return bool((values[0] - values[1]).abs() < TIE)
