"""`specsot bench --tune`: the fastest value of each setting in turn, as a profile."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from specsot.engine.bench import command
from specsot.engine.bench.command import FIGURE, PROFILE, tune_command
from specsot.engine.bench.experiment import BenchOptions, prepare_experiment
from specsot.engine.errors import Code
from specsot.engine.prepare.job import read_config
from specsot.engine.prepare.options import RunOptions

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]

Asked = list[tuple[list[str], Any]]


@pytest.fixture
def asked() -> Asked:
    return []


def scripted(monkeypatch: Patch, asked: Asked, speed: Mapping[str, float]) -> None:
    def measure(prepared: Any, files: Any) -> Any:
        entries = prepared.entries
        asked.append(([one.side for one in entries], entries[0].varied.get("parts")))
        rows = {}
        for number, one in enumerate(entries):
            known = (value for word, value in speed.items() if word in f"{one.side},{one.varied}")
            rows[str(number)] = {"figures": {FIGURE: [next(known, 1.0), None, None]}}
        return SimpleNamespace(code=0, problems=[]), {"rows": rows}

    monkeypatch.setattr(command, "measure", measure)


def test_each_setting_is_found_behind_the_ones_before(
    quick: RunOptions, asked: Asked, monkeypatch: Patch, capsys: Output, tmp_path: Path
) -> None:
    fast = {"draft_depth=3": 2.0, "num_draft_tokens=8": 1.5, "num_draft_tokens=16": 1.51}
    scripted(monkeypatch, asked, fast)
    out = tmp_path / "tuned"
    code = tune_command(BenchOptions(("eagle",), out=out), replace(quick, profile=None))
    assert code == Code.OK
    nodes, levels = asked
    assert nodes[0][0] == "eagle@drafter.kind=none"
    assert nodes[0][1:3] == [
        f"eagle@drafter.num_draft_tokens={n},drafter.draft_depth=5,drafter.top_k=4" for n in (2, 4)
    ]
    assert levels[0][1] == "eagle@drafter.draft_depth=2,drafter.top_k=4,drafter.num_draft_tokens=8"
    text = (out / PROFILE).read_text()
    made = yaml.safe_load(text)["profiles"]["tuned"]
    assert made["model"] == quick.model
    found = {"num_draft_tokens": 8, "draft_depth": 3, "top_k": 4}
    assert made["drafters"]["eagle3"] == {"model": quick.drafter_model, **found}
    assert "# num_draft_tokens: 8 (against plain decoding: 2 1.00, 4 1.00, 8 1.50, 16 1.51" in text
    assert text == capsys.readouterr().out
    (tmp_path / "specsot.yaml").write_text(text)
    config, profile = read_config(tmp_path, replace(quick, model=None, profile="tuned"))
    assert config.model == quick.model and profile is not None


def test_parts_have_trees_of_their_own_size(
    quick: RunOptions, asked: Asked, monkeypatch: Patch, capsys: Output
) -> None:
    fast = {"num_draft_tokens=8,drafter.draft_depth=5,drafter.top_k=4,{'parts': '1'": 2.0}
    fast |= {"num_draft_tokens=2,drafter.draft_depth=5,drafter.top_k=4,{'parts': '4'": 2.0}
    scripted(monkeypatch, asked, fast)
    assert tune_command(BenchOptions(("bim_eagle",)), quick) == Code.OK
    assert [parts for _, parts in asked] == ["1", "4", "4"]
    made = yaml.safe_load(capsys.readouterr().out)["profiles"]["tuned"]["drafters"]["eagle3"]
    assert made["num_draft_tokens"] == {1: 8, 4: 2}


@pytest.mark.parametrize(
    ("asks", "says"),
    [
        (BenchOptions(("autoregressive",)), "nothing to tune of a drafter of kind 'none'"),
        (BenchOptions(("eagle", "dflash")), "takes one graph"),
        (
            BenchOptions(("eagle",), vary=("drafter.num_draft_tokens=2,4",)),
            "neither --vary nor --against",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    asks: BenchOptions, says: str, quick: RunOptions, capsys: Output
) -> None:
    assert tune_command(asks, quick) == Code.USAGE
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("kind", command.AXES)
def test_every_axis_is_one_of_the_kind(kind: str, quick: RunOptions) -> None:
    graphs = {"eagle3": "eagle", "vanilla": "speculative"}
    own = [f"drafter.{name}={one}" for name, one in command.AT_FIRST.get(kind, {}).items()]
    sides = [
        ",".join((f"{graphs.get(kind, kind)}@drafter.{name}={value}", *own))
        for name, values in command.AXES[kind].items()
        for value in values
    ]
    own_models = replace(quick, model=None, drafter_model=None)
    assert len(prepare_experiment(BenchOptions(tuple(sides)), own_models).jobs) == len(sides)


def test_it_runs(quick: RunOptions, capsys: Output) -> None:
    asked = BenchOptions(("ngram",), repeats=1, count=1)
    assert tune_command(asked, replace(quick, max_new_tokens=3)) == Code.OK
    (found,) = yaml.safe_load(capsys.readouterr().out)["profiles"].values()
    assert set(found["drafters"]["ngram"]) == {"model", "num_draft_tokens", "draft_depth"}
