"""A quantised target has the same tokens in every layout and with every drafter, in any dtype."""

from pathlib import Path

import pytest
from helpers.support import taking_turns

from specsot.engine.models import Models, load_models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session, perform
from specsot.states.text.outline import parse_outline

OUTLINE = parse_outline(
    "PLAN\n1|60|-|-|First\n2|60|-|1|Second\n3|60|-|-|Third\nEND", max_branches=8
)
TEXTS = ("How do bees make honey?", "What is a lake?")
TARGETS = (("int8", "float32"), ("int4", "bfloat16"))  # weights and dtype
PARTS = ("batching_plain", "paged_eagle", "bim_eagle", "batching_eagle")
Made = dict[tuple[str, str], tuple[Models, dict[str, list[list[int]]]]]


def answers(graph: str, models: Models) -> list[list[int]]:
    program = open_graph(graph)
    outline = None if program.graph.skeleton is None else OUTLINE
    session = Session(program, models, max_new_tokens=16, outline=outline)
    prompts = [Prompt(str(number), text) for number, text in enumerate(TEXTS)]
    core, _, _ = perform(session, prompts)
    return [branch.tokens for request in core.requests for branch in request.branches]


@pytest.fixture(scope="module")
def coded(tiny: tuple[Path, Path]) -> Made:
    """By weights and dtype: models, and what they write without drafts."""
    made: Made = {}
    for weights, dtype in TARGETS:
        models = load_models(*tiny, dtype=dtype, weights=weights)
        made[weights, dtype] = (
            models,
            {one: answers(one, models) for one in ("bim_plain", "autoregressive")},
        )
    return made


@pytest.mark.parametrize(
    ("graph", "target"), [*taking_turns(PARTS, TARGETS), ("eagle", TARGETS[1])], ids=str
)
def test_an_answer_has_the_same_tokens_everywhere(
    graph: str, target: tuple[str, str], coded: Made
) -> None:
    models, plain = coded[target]
    expected = plain["autoregressive" if graph == "eagle" else "bim_plain"]
    assert sum(map(len, expected)) > 20 and answers(graph, models) == expected
