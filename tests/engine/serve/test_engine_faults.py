"""What a client is told when a step of the engine fails, or its numbers are none; others go on."""

from collections.abc import Iterator
from importlib.resources import files

import pytest
from helpers.servers import RAIN, Served, serving

RAISES, NO_NUMBERS, SEVERAL = 11, 13, 5
BREAKING = f'''"""An op that breaks the first step of prompts with certain tokens."""

from torch import Tensor

from specsot.ops.registry import op
from specsot.ops.types import Rows


@op("breaking.step_")
def step_(rows: Rows, logits: Tensor) -> None:
    """A prompt with several of one token raises, one with several of another has no numbers."""
    if (rows.tokens_BQ == {RAISES}).sum() >= {SEVERAL}:
        raise RuntimeError("a step broke")
    if (rows.tokens_BQ == {NO_NUMBERS}).sum() >= {SEVERAL}:
        logits.fill_(float("nan"))
'''


@pytest.fixture(scope="module")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("breaking")
    machine = files("specsot").joinpath("graphs/machines/decode.yaml").read_text(encoding="utf-8")
    broken = machine.replace(
        "target.forward_, branch.root,", "target.forward_, breaking:step_, branch.root,"
    )
    assert broken != machine
    (folder / "fragile.yaml").write_text(broken.replace("name: decode", "name: fragile"))
    (folder / "breaking.py").write_text(BREAKING)
    with serving(folder, "fragile.yaml", PYTHONPATH=str(folder)) as server:
        yield server
        assert server.process.poll() is None and "Traceback" not in server.told


@pytest.mark.parametrize(("token", "why"), [(RAISES, "a step broke"), (NO_NUMBERS, "not numbers")])
def test_who_fails_is_told_why_and_the_next_one_is_answered(
    breaking: Served, token: int, why: str
) -> None:
    wanted = breaking.chat(RAIN, "fragile").json()["choices"][0]["message"]["content"]
    prompt = [5, *[token] * SEVERAL, 6]
    response = breaking.complete(prompt, "fragile", max_tokens=4)
    assert response.status_code == 500, response.text
    error = response.json()["error"]
    assert why in error["message"] and "Traceback" not in response.text
    *chunks, last = breaking.stream("/v1/completions", model="fragile", prompt=prompt, max_tokens=4)
    assert last == "[DONE]" and why in chunks[-1]["error"]["message"]
    again = breaking.chat(RAIN, "fragile").json()["choices"][0]["message"]["content"]
    assert again == wanted and breaking.http.get("/health").status_code == 200
