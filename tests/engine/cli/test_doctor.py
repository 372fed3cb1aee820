"""`specsot doctor`: the self-test really compares, the report is complete."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specsot.engine.cli import doctor as module
from specsot.engine.cli.doctor import GRAPHS, measure_overhead, try_graphs, unequal
from specsot.engine.errors import Code
from specsot.engine.record.metrics import Meter
from specsot.models.files import ModelError


def tried(**digests: str) -> list[dict[str, Any]]:
    figures = {"tokens": 8, "seconds": 1.0, "tau_step": 2.0, "load_seconds": 0.1}
    return [{"graph": graph, "digest": digest, **figures} for graph, digest in digests.items()]


def test_pairs_must_agree() -> None:
    assert unequal(tried(autoregressive="a", eagle="a", bim_plain="b", bim_eagle="b")) == []
    wrong = tried(autoregressive="a", eagle="x", bim_plain="b", bim_eagle="b")
    assert unequal(wrong) == ["autoregressive and eagle give different tokens"]
    assert unequal(tried(bim_plain="b")) == []


def test_the_shipped_graphs_agree_on_the_embedded_models() -> None:
    found = list(try_graphs(1, max_new_tokens=6))
    assert [one["graph"] for one in found] == list(GRAPHS)
    assert unequal(found) == []
    assert all(one["tokens"] > 0 for one in found)


def test_overhead_is_measured_over_enough_rounds() -> None:
    meter = measure_overhead(1, rounds=1)
    assert meter.rounds >= 1 and 0 < meter.overhead_share < 1


Outcome = Callable[..., int]


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The exit code of a report on these digests, with this error after them."""

    def make(error: Exception | None = None, as_json: bool = False, **digests: str) -> int:
        def runs(threads: int | None) -> Iterator[dict[str, Any]]:
            yield from tried(**digests)
            if error is not None:
                raise error

        monkeypatch.setattr(module, "start_ups", lambda: {"import torch": 1.0})
        monkeypatch.setattr(module, "measure_overhead", lambda threads, rounds: Meter(rounds=200))
        monkeypatch.setattr(module, "try_graphs", runs)
        return module.doctor(as_json=as_json, threads=1, rounds=1)

    return make


def test_the_report_is_one_document(outcome: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(as_json=True, autoregressive="a", eagle="a") == Code.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["problems"] == [] and found["overhead"]["rounds"] == 200
    assert {"versions", "machine", "embedded models"} <= set(found["environment"])
    assert [one["graph"] for one in found["self_test"]] == ["autoregressive", "eagle"]


@pytest.mark.parametrize(
    "error, code, says",
    [
        (ModelError("x", "is broken"), Code.MODEL, "x: is broken"),
        (RuntimeError("boom"), Code.FAILED, "RuntimeError: boom"),
        (None, Code.UNEQUAL, "bim_plain and bim_eagle give different tokens"),
    ],
)
def test_what_fails_is_told(
    outcome: Outcome, capsys: pytest.CaptureFixture[str], error: Exception, code: Code, says: str
) -> None:
    assert outcome(error, bim_plain="a", bim_eagle="b") == code
    captured = capsys.readouterr()
    assert says in captured.err and "not good" in captured.out
