"""`specsot doctor`: the self-test really compares, the report is complete."""

import json
from typing import Any

import pytest

from specsot.engine.bench import comparison
from specsot.engine.cli import doctor as module
from specsot.engine.cli.doctor import GRAPHS
from specsot.engine.errors import Code
from specsot.models.files import ModelError

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "start_ups", lambda: {"import torch": 1.0})


def test_the_shipped_graphs_agree_on_the_embedded_models(capsys: Output) -> None:
    assert module.doctor(as_json=True, threads=1, repeats=2) == Code.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert {"versions", "machine", "embedded models"} <= set(found["environment"])
    tested = found["self_test"]
    assert list(tested["rows"]) == list(GRAPHS) and tested["rounds"] == 2
    compared = {(p["reference"], p["graph"]) for p in tested["equality"] if p["compared"]}
    assert compared == {("A", "B"), ("C", "D")}, "each with its drafter and without"
    for row in tested["rows"].values():
        assert row["figures"]["tokens"][0] > 0 and 0 < row["figures"]["overhead_share"][0] < 1


def test_the_report_is_a_table(capsys: Output) -> None:
    assert module.doctor(as_json=False, threads=1, repeats=1) == Code.OK
    out = capsys.readouterr().out
    assert "import torch: 1.0" in out and "all good" in out
    assert all(f" {graph} " in out for graph in GRAPHS) and "branches equal" in out


@pytest.mark.parametrize(
    "change, code, says",
    [
        (ModelError("x", "is broken"), Code.MODEL, "x: is broken"),
        (RuntimeError("boom"), Code.FAILED, "RuntimeError: boom"),
        ({"differences": 3, "exit_code": 5}, Code.UNEQUAL, "3 branches differ"),
        ({"problems": ["B eagle: it stopped"], "exit_code": 1}, Code.FAILED, "eagle: it stopped"),
    ],
)
def test_what_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, change: Any, code: Code, says: str
) -> None:
    result = {"rows": {}, "problems": [], "differences": 0, "exit_code": 0}

    def measure(prepared: Any) -> dict[str, Any]:
        if isinstance(change, Exception):
            raise change
        return result | change

    monkeypatch.setattr(comparison, "measure", measure)
    assert module.doctor(as_json=False, threads=1, repeats=1) == code
    captured = capsys.readouterr()
    assert says in captured.err and "not good" in captured.out
