"""Requests that another engine has begun go on, whatever the layout and the drafter."""

import pytest
from helpers.clusters import BEES, CAMPING
from helpers.going_on import OBJECT, WARM, check_goes_on

from specsot.engine.prepare.inputs import Prompt

GRAPHS = (
    ("bim_plain", ()),
    ("bim_eagle", ()),
    ("bim_dflash", WARM),
    ("bim_ngram", WARM),
    ("bim_vanilla", ()),
    ("bim_two_drafters", WARM),
    ("bim_eagle", ("skeleton.share=prompt",)),
    ("paged_eagle", WARM),
    ("batching_eagle", ()),
    ("batching_dflash", WARM),
    ("eagle2", ()),
    ("ddtree", WARM),
    ("autoregressive", WARM),
)


@pytest.mark.parametrize("schema", [None, OBJECT], ids=["free", "held"])
@pytest.mark.parametrize("prompt", [BEES, CAMPING], ids=["bees", "camping"])
@pytest.mark.parametrize(("graph", "sets"), GRAPHS)
def test_a_begun_request_goes_on(
    graph: str, sets: tuple[str, ...], prompt: Prompt, schema: str | None
) -> None:
    check_goes_on(graph, sets, prompt, schema)
