"""The door from Python: what README and docs show runs as it stands; options have their names."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import specsot
from specsot.engine.prepare.options import SessionOptions
from specsot.engine.run import api
from specsot.engine.run.api import Answer, Engine, generate, open_session
from specsot.models.linear import has_products
from specsot.states.yaml.source import GraphError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md", "docs/howto.md"])
def test_shown_python_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for block in blocks:
        names: dict[str, Any] = {}
        exec(compile(block, page, "exec"), names)
        out = capsys.readouterr().out
        assert "honey" in out
    if run := names.get("run"):
        assert run.finished and run.answers[0].text in out
    assert page != "README.md" or len([line for line in blocks[0].splitlines() if line]) == 2


def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples/figures.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(cell["source"], "figures.ipynb", "exec"), names)
    assert str(names["answer"]) in capsys.readouterr().out
    assert names["tokens"]["committed"].sum() == names["answer"].metrics["tokens"]
    assert (tmp_path / "tokens.svg").stat().st_size > 1000


def test_the_package_has_the_names_and_loads_nothing_by_itself() -> None:
    code = (
        "import sys, specsot; print([m for m in sys.modules if m.startswith(('torch', 'specsot'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "['specsot']\n"
    assert {name: getattr(specsot, name) for name in specsot.FROM_API} == {
        name: getattr(api, name) for name in specsot.FROM_API
    }
    with pytest.raises(AttributeError, match="'specsot' has no attribute 'opn'"):
        specsot.opn  # noqa: B018


def test_generate_answers_one_prompt_and_tells_a_refusal(
    endless: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    target, drafter = map(str, endless)
    session = open_session("eagle", model=target, drafter_model=drafter, max_new_tokens=5)
    answer = generate(session, "hello")
    assert isinstance(answer, Answer) and answer.question == "hello"
    assert [len(section.tokens) for section in answer.sections] == [5]
    assert generate(session, "hello") == answer
    assert str(answer) == answer.text
    assert answer.metrics["tokens"] == 5 and answer.metrics["rounds"] >= 1
    (part,) = json.loads(json.dumps(answer.to_dict()))["parts"]
    assert part["token_ids"] == [*answer.sections[0].tokens] and "metrics" not in answer.to_dict()
    with Engine(session, threaded=False) as engine:
        served = engine.submit("hello").result()
    assert served.text == answer.text and served.metrics["answer_tokens"] == 5
    refused = generate(session, "far too long " * 3000)
    assert [section.finish for section in refused.sections] == ["refused"]
    assert set(api.__all__) > {"generate", "open_session"}


def test_arguments_are_a_sessions_options(
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
        sets=["drafter.num_draft_tokens=3"],
    )
    assert (session.seed, session.budget) == (7, 9)
    assert str(session.models.dtype) == "torch.float64"
    assert session.program.graph.drafter.model_dump()["num_draft_tokens"] == 3


def test_what_is_no_option_is_refused() -> None:
    wrong: Any = open_session
    for name in ("modl", "quiet", "prompt"):
        with pytest.raises(TypeError, match=name):
            wrong("bim_eagle", **{name: "x"})
    with pytest.raises(GraphError, match="did you mean 'bim_eagle'"):
        open_session("bim_eagel")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_the_processor_does_not_multiply_in_is_noted(dtype: str) -> None:
    models = open_session("autoregressive", dtype=dtype).models
    slow = not has_products(models.device, models.dtype)
    assert any(f"multiply in {dtype}" in note for note in api.notes_of(models)) == slow
