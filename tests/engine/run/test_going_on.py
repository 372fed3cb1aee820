"""A request that another engine has begun: cut anywhere, it goes on with the same tokens."""

import random
from dataclasses import replace

import pytest
from helpers.clusters import BEES, CAMPING, session_of

from specsot.engine.events import AnswerReady, Committed
from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.run.engine import Engine, Handle

WARM = ("sampling.temperature=0.8",)
OBJECT = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
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


def written(handle: Handle) -> tuple[dict[int, list[int]], AnswerReady]:
    handle.result()
    tokens: dict[int, list[int]] = {}
    *notes, last = handle.since(0)
    assert isinstance(last, AnswerReady)
    for one in notes:
        if isinstance(one, Committed):
            tokens.setdefault(one.branch, []).extend(one.tokens)
    return tokens, last


@pytest.mark.parametrize("schema", [None, OBJECT], ids=["free", "bound"])
@pytest.mark.parametrize("prompt", [BEES, CAMPING], ids=["bees", "camping"])
@pytest.mark.parametrize(("graph", "sets"), GRAPHS)
def test_a_begun_request_goes_on(
    graph: str, sets: tuple[str, ...], prompt: Prompt, schema: str | None
) -> None:
    dice = random.Random(graph)
    with Engine(session_of(graph, *sets, budget=16), threaded=False) as engine:
        asked = RequestSettings(schema=schema)
        wanted = written(engine.submit(prompt, settings=asked))
        for salt in ("", "another"):
            cuts = {index: ids[: dice.randrange(len(ids))] for index, ids in wanted[0].items()}
            again = replace(prompt, cache_salt=salt)
            begun = replace(asked, resumed=cuts)
            assert written(engine.submit(again, settings=begun)) == wanted, cuts
