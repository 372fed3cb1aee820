"""A quantised target has the same tokens in every layout and with every drafter, in any dtype."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import open_session, perform

OUTLINE = "PLAN\n1|60|-|-|First\n2|60|-|1|Second\n3|60|-|-|Third\nEND\n"
TEXTS = ("How do bees make honey?", "What is a lake?")
Texts = Sequence[Sequence[int]]


def answers(
    graph: str, models: tuple[Path, Path], outline: Path | None, dtype: str, weights: str
) -> Texts:
    drafter = {"drafter_model": str(models[1])} if graph.endswith("eagle") else {}
    session = open_session(
        graph,
        model=str(models[0]),
        outline=outline,
        dtype=dtype,
        weights=weights,
        max_new_tokens=16,
        threads=1,
        **drafter,
    )
    prompts = [Prompt(str(number), text) for number, text in enumerate(TEXTS)]
    core, _, _ = perform(session, prompts)
    return [branch.tokens for request in core.requests for branch in request.branches]


@pytest.mark.parametrize(("weights", "dtype"), [("int8", "float32"), ("int4", "bfloat16")])
def test_parts_have_the_same_tokens_everywhere(
    weights: str, dtype: str, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    outline = tmp_path / "o.txt"
    outline.write_text(OUTLINE)
    expected = answers("bim_plain", tiny, outline, dtype=dtype, weights=weights)
    assert len(expected) == 6 and sum(map(len, expected)) > 40
    for graph in ("batching_plain", "paged_eagle", "bim_eagle", "batching_eagle"):
        assert answers(graph, tiny, outline, dtype=dtype, weights=weights) == expected, graph


def test_drafts_do_not_change_a_plain_answer(tiny: tuple[Path, Path]) -> None:
    expected = answers("autoregressive", tiny, None, dtype="bfloat16", weights="int8")
    assert answers("eagle", tiny, None, dtype="bfloat16", weights="int8") == expected
