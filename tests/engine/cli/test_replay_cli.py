"""`specsot replay` from the command line, and runs that are made to wait."""

import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from helpers.commands import call

from specsot.engine.cli import live_run
from specsot.engine.errors import Code
from specsot.engine.run import runner

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def kept(shell: Any) -> Any:
    shell.defaults["max_new_tokens"] = 8
    assert shell.run() == Code.OK
    return shell


def test_lines_where_nobody_has_a_terminal(kept: Any, capsys: Captured) -> None:
    assert call("replay") == Code.OK
    captured = capsys.readouterr()
    assert "? [1] How do bees make honey?" in captured.out and "◆" in captured.out
    assert captured.err == ""


def test_one_picture(kept: Any, capsys: Captured) -> None:
    assert call("replay", "latest", "--step", "9", "--size", "80x24") == Code.OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 24 and max(map(len, lines)) <= 80
    assert "drafts" in lines[2] and any("▶ grow_tree" in line for line in lines)
    assert call("replay", "--svg", "a.svg") == Code.OK
    assert call("replay", "--step", "-1", "--size", "100x30", "--svg", "b.svg") == Code.OK
    pictures = [Path(name).read_text(encoding="utf-8") for name in ("a.svg", "b.svg")]
    assert pictures[0] == pictures[1] and pictures[0].startswith("<svg") and "drafts" in pictures[0]


BAD = [
    (["nothing"], "no such run"),
    (["--speed", "0"], "--speed takes"),
    (["--speed", "nan"], "--speed takes"),
    (["--step", "0"], "the run has transitions 1 to"),
    (["--step", "9999"], "the run has transitions 1 to"),
    (["--step", "1", "--size", "wide"], "--size wide"),
    (["--step", "1", "--size", "9x9"], "--size 9x9"),
]


def test_bad_words_give_one_line(kept: Any, capsys: Captured) -> None:
    for words, told in BAD:
        assert call("replay", *words) == Code.USAGE
        err = capsys.readouterr().err
        assert told in err and err.count("\n") == 1


def test_what_an_old_run_lacks_is_said(kept: Any, capsys: Captured) -> None:
    path = kept.latest / "trace.jsonl"
    lines = [line for line in kept.lines("trace.jsonl") if line["kind"] != "texts"]
    for line in lines:
        line.pop("trees", None)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert call("replay", "--step", "-1") == Code.OK
    captured = capsys.readouterr()
    assert "no drafts so far" in captured.out
    assert captured.err.count("note: ") == 2 and "drafts are not in this run folder" in captured.err


# -- --slow ---------------------------------------------------------------------------------------


def test_a_slow_run_has_the_figures_of_a_fast_one(
    kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, drive, took = kept.digest, live_run.drive, []

    def timed(*args: Any, **more: Any) -> Any:
        began = monotonic()
        status = drive(*args, **more)
        took.append(monotonic() - began)
        return status

    monkeypatch.setattr(live_run, "drive", timed)
    assert kept.run(slow=0.05) == Code.OK
    metrics, records = kept.read("metrics.json"), kept.lines("trace.jsonl")
    waited = 0.05 * sum(one["kind"] == "move" for one in records)
    limit = took[0] - waited / 2  # the run itself takes less than what is left
    assert kept.digest == digest and took[0] > waited > 0.5
    assert metrics["seconds"]["total"] < limit and records[-1]["t"] / 1e9 < limit
    assert sum(state["milliseconds"] for state in metrics["states"].values()) / 1e3 < limit
    times = [one["t"] for one in records]
    assert times == sorted(times)


@pytest.mark.parametrize("slow", [-1.0, float("nan"), 3601.0])
def test_slow_takes_seconds(shell: Any, slow: float) -> None:
    assert shell.run(slow=slow) == Code.USAGE
    assert "--slow takes seconds, 0 to 3600" in shell.err


def test_a_halt_ends_the_wait() -> None:
    class Asked:
        snapshot_requested = False
        looks = 0

        def serve_snapshot(self) -> None:
            self.looks += 1
            if self.looks == 2:
                halt.status = runner.Status.INTERRUPTED

    halt, recorder = runner.StopSignal(), Asked()
    began = monotonic()
    assert runner.delay(60.0, recorder, halt)(None)  # type: ignore[arg-type]
    assert monotonic() - began < 5 and recorder.looks == 2 and recorder.snapshot_requested
