"""The door from Python: what README and docs show runs as it stands; options have their names."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specsot.engine.prepare.options import SessionOptions
from specsot.engine.run.api import open_session
from specsot.states.yaml.source import GraphError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_the_python_that_is_shown_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    out = capsys.readouterr().out
    assert names["run"].finished and names["run"].board["answers"][0].text in out
    assert "honey" in out


def test_arguments_are_the_options_of_a_session(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [field.name for field in fields(SessionOptions)]
    assert list(inspect.signature(open_session).parameters) == names
    target, drafter = map(str, tiny)
    session = open_session(
        "bim_eagle",
        model=target,
        drafter_model=drafter,
        seed=7,
        dtype="float64",
        threads=1,
        max_new_tokens=9,
        sets=["drafter.nodes=3"],
    )
    assert (session.seed, session.budget) == (7, 9)
    assert str(session.models.dtype) == "torch.float64"
    assert session.program.graph.drafter.model_dump()["nodes"] == 3


def test_what_is_no_option_is_refused() -> None:
    wrong: Any = open_session
    for name in ("modl", "quiet", "prompt"):
        with pytest.raises(TypeError, match=name):
            wrong("bim_eagle", **{name: "x"})
    with pytest.raises(GraphError, match="did you mean 'bim_eagle'"):
        open_session("bim_eagel")
