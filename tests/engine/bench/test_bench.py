"""`specsot bench` on tiny models: tables, files, what is taken up again, what got slower."""

import csv
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest

from specsot.engine.bench import sides
from specsot.engine.bench.command import bench_command
from specsot.engine.bench.experiment import FIGURES, BenchOptions
from specsot.engine.errors import Code
from specsot.engine.prepare.options import RunOptions

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]

ASKED = BenchOptions(("eagle", "ngram"), against="hf,autoregressive", repeats=2, out=Path("kept"))
COUNTED = [name for name, one in FIGURES.items() if not one.timed]


@pytest.fixture
def measured(quick: RunOptions, capsys: Output) -> dict[str, Any]:
    code = bench_command(replace(ASKED, plot=True), quick)
    out = capsys.readouterr()
    assert code == Code.OK, out.err
    result: dict[str, Any] = json.loads(Path("kept/result.json").read_text())
    return {"out": out.out, "err": out.err, **result}


def counted(result: dict[str, Any]) -> dict[str, Any]:
    return {
        label: {name: row["figures"].get(name) for name in COUNTED} | {"equal": row["equal"]}
        for label, row in result["rows"].items()
    }


def test_transformers_and_graphs_stand_in_one_table(measured: dict[str, Any]) -> None:
    rows = measured["rows"]
    assert list(rows) == ["hf", "autoregressive", "eagle", "ngram"] and measured["rounds"] == 4
    # Their tokens are held to each other, round by round.
    assert [row["equal"] for row in rows.values()] == ["-", "4/4 =A", "4/4 =A", "4/4 =A"]
    hf, plain, eagle = (rows[name]["figures"] for name in ("hf", "autoregressive", "eagle"))
    assert hf["tokens"][0] == plain["tokens"][0] == eagle["tokens"][0] == 8
    assert hf["tau_step"][0] == plain["tau_step"][0] == 1 and hf["target_forwards"][0] == 8
    assert hf["speedup_decode"] == [1, 1, 1] and plain["speedup_decode"][0] > 0
    assert eagle["same_answer"][0] == 1 and "rows" not in hf and eagle["rows"][0] > 8
    assert eagle["kv_allocated_mb"][0] >= eagle["kv_held_mb"][0] > plain["kv_held_mb"][0] > 0
    intervals = [row["figures"]["speedup_ttlt"] for row in rows.values()]
    assert all(low <= high for _, low, high in intervals)
    assert "4 of 4 branches equal" in measured["out"] and "2 repeats: 4 rounds" in measured["out"]
    assert rows["eagle"]["ms_per_visit"]["verify"] > 0


def test_files_and_pictures(measured: dict[str, Any], quick: RunOptions, capsys: Output) -> None:
    lines = list(csv.DictReader(StringIO(Path("kept/table.csv").read_text())))
    assert [line["side"] for line in lines] == list(measured["rows"])
    value = measured["rows"]["eagle"]["figures"]["tau_step"][0]
    assert float(lines[2]["tau_step"]) == pytest.approx(value, rel=1e-5)
    page = Path("kept/table.md").read_text()
    assert "| C | eagle | 4/4 =A |" in page and "2 prompts, 2 repeats: 4 rounds" in page
    svg = Path("kept/bench-speedup_decode.svg").read_text()
    assert all(f">{name}</text>" in svg for name in measured["rows"])
    assert Path("kept/bench-speedup_decode.png").read_bytes().startswith(b"\x89PNG")
    assert bench_command(replace(ASKED, refs=("eagle",)), quick) == Code.USAGE
    assert "holds a comparison with other graphs" in capsys.readouterr().err


def test_it_goes_on_where_it_was_interrupted(
    measured: dict[str, Any], quick: RunOptions, monkeypatch: Patch, capsys: Output
) -> None:
    answered, answer = [0], sides._answer

    def once(*args: Any) -> Any:
        answered[0] += 1
        if answered[0] == 6:  # in the second round
            signal.raise_signal(signal.SIGINT)
        return answer(*args)

    monkeypatch.setattr(sides, "_answer", once)
    broken = replace(ASKED, out=Path("broken"))
    assert bench_command(broken, quick) == Code.INTERRUPTED
    out, err = capsys.readouterr()
    assert "1 of 4 rounds; --resume broken goes on from there" in err and "eagle" in out
    assert json.loads(Path("broken/result.json").read_text())["rounds"] == 1
    answered[0] = 100
    assert bench_command(BenchOptions(()), RunOptions(), Path("broken")) == Code.OK
    result = json.loads(Path("broken/result.json").read_text())
    assert result["rounds"] == 4 and answered[0] == 100 + 3 * 4
    assert counted(result) == counted(measured)
    # With nothing left to measure the very same comes out.
    capsys.readouterr()
    assert bench_command(BenchOptions(()), RunOptions(), Path("broken")) == Code.OK
    assert json.loads(Path("broken/result.json").read_text()) == result
    assert bench_command(BenchOptions(()), RunOptions(), Path("nowhere")) == Code.USAGE
    assert "no experiment was begun there" in capsys.readouterr().err


def clocked(patch: Patch, seed: int, slower: str = "") -> None:
    answer, random = sides._answer, Random(seed)

    def timed(side: Any, *args: Any) -> Any:
        run = answer(side, *args)
        meter, moments = run.meter, run.moments
        took = meter.forwards * 1e6 * (1 + random.random() / 10)
        meter.in_run = int(took * (3 if side.title == slower else 1))
        moments.first_token, moments.last_token = meter.in_run // 8, meter.in_run
        return run

    patch.setattr(sides, "_answer", timed)


def test_what_got_slower_is_found(quick: RunOptions, monkeypatch: Patch, capsys: Output) -> None:
    asked = BenchOptions(("eagle", "ngram"), against="autoregressive", repeats=4)
    again = replace(asked, baseline=Path("before/result.json"))
    for seed, slower, code in ((1, "", 0), (2, "", 0), (3, "eagle", 6)):
        with monkeypatch.context() as patch:
            clocked(patch, seed, slower)
            first = replace(asked, out=Path("before"))
            assert bench_command(first if seed == 1 else again, quick) == code
        out = capsys.readouterr().out
        assert ("nothing is worse than the baseline" in out) == (seed == 2)
        assert ("worse than the baseline: eagle: speedup_ttlt" in out) == (seed == 3)
        assert "worse than the baseline: ngram" not in out


def test_a_larger_cache_is_found_without_a_clock(quick: RunOptions, capsys: Output) -> None:
    asked = BenchOptions(("eagle",), against="autoregressive", repeats=1)
    assert bench_command(replace(asked, out=Path("before")), quick) == Code.OK
    before = json.loads(Path("before/result.json").read_text())
    before["rows"]["eagle"]["figures"]["kv_held_mb"][0] *= 0.9
    Path("smaller.json").write_text(json.dumps(before))
    assert bench_command(replace(asked, baseline=Path("smaller.json")), quick) == 6
    assert "worse than the baseline: eagle: kv_held_mb" in capsys.readouterr().out
    # What measured something else is no baseline.
    Path("q.txt").write_text("Another question?\n")
    assert bench_command(replace(asked, baseline=Path("smaller.json")), quick) == Code.USAGE
    assert "measured with other prompts" in capsys.readouterr().err
    Path("bad.json").write_text("{}")
    assert bench_command(replace(asked, baseline=Path("bad.json")), quick) == Code.USAGE


def test_assisted_and_looked_up_write_the_same(quick: RunOptions, capsys: Output) -> None:
    asked = BenchOptions(("hf-assisted", "hf-lookup"), against="autoregressive", repeats=1)
    embedded = replace(quick, model=None, drafter_model=None, max_new_tokens=24)
    assert bench_command(asked, replace(embedded, as_json=True)) == Code.OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows["hf-assisted"]["equal"] == rows["hf-lookup"]["equal"] == "2/2 =A"
    assert rows["hf-assisted"]["figures"]["tau_step"][0] > 1.3
    assert rows["hf-assisted"]["figures"]["tokens"] == rows["autoregressive"]["figures"]["tokens"]


def test_what_is_blended_is_probed_apart(quick: RunOptions, capsys: Output) -> None:
    embedded = replace(quick, model=None, drafter_model=None, max_new_tokens=2)
    asked = BenchOptions(("blend",), repeats=1, count=1)
    assert bench_command(asked, replace(embedded, prompts=None, as_json=True)) == Code.OK
    rows = [*json.loads(capsys.readouterr().out)["rows"].values()]
    assert "kl" not in rows[0]["figures"] and rows[1]["figures"]["kl"][0] > 0


def test_lines_come_now_and_then(quick: RunOptions, capsys: Output, monkeypatch: Patch) -> None:
    ticks: Iterator[float] = iter(range(0, 10**6, 20))
    monkeypatch.setattr("specsot.engine.shell.monotonic", lambda: next(ticks))
    assert bench_command(BenchOptions(("autoregressive",), repeats=2), quick) == Code.OK
    told = capsys.readouterr().err
    assert "prompt 2 of 4, about" in told and "left: A autoregressive ..." in told
