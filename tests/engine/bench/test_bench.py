"""`specsot bench` on tiny models: tables, files, what is taken up again, what got slower; figures
and their intervals on rounds that are made up; `--tune`."""

import csv
import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.commands import bench_command, tune_command

from specsot.engine.bench import command, comparison, sides
from specsot.engine.bench.command import changes
from specsot.engine.bench.comparison import acceptance_by_depth
from specsot.engine.bench.experiment import (
    DRAWS,
    FIGURES,
    estimate,
    experiment_of_sides,
    prepare_experiment,
    resampled,
)
from specsot.engine.bench.sides import SideRun
from specsot.engine.errors import Code
from specsot.engine.prepare.job import read_config
from specsot.engine.prepare.options import BenchOptions, RunOptions
from specsot.engine.record.metrics import Meter

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]

ASKED = BenchOptions(("eagle", "ngram"), against="hf,autoregressive", repeats=2, out=Path("kept"))
COUNTED = [name for name, one in FIGURES.items() if not one.timed]


def counted(result: dict[str, Any]) -> dict[str, Any]:
    return {
        label: {name: row["figures"].get(name) for name in COUNTED} | {"equal": row["equal"]}
        for label, row in result["rows"].items()
    }


def test_a_table_is_kept_in_files_and_goes_on_where_it_was_interrupted(
    quick: RunOptions, monkeypatch: Patch, capsys: Output
) -> None:
    argv = ("/somewhere/specsot", "bench", "eagle", "--out", "kept")
    assert bench_command(replace(ASKED, plot=True), replace(quick, argv=argv)) == Code.OK
    out = capsys.readouterr().out
    measured: dict[str, Any] = json.loads(Path("kept/result.json").read_text())
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
    assert "4 of 4 branches equal" in out and "2 repeats: 4 rounds" in out
    assert rows["eagle"]["ms_per_visit"]["verify"] > 0
    # files and pictures
    lines = list(csv.DictReader(StringIO(Path("kept/table.csv").read_text())))
    assert [line["side"] for line in lines] == list(rows)
    assert float(lines[2]["tau_step"]) == pytest.approx(eagle["tau_step"][0], rel=1e-5)
    assert float(lines[0]["speedup_per_token"]) == 1.0 and lines[2]["reference"] == "A"
    setup = json.loads(Path("kept/setup.json").read_text())
    assert setup == measured["setup"] and setup["command"] == "specsot bench eagle --out kept"
    assert {"graphs", "prompts", "versions", "machine"} < setup.keys()
    page = Path("kept/table.md").read_text()
    assert page.startswith("# bench\n") and "B and A: 4 of 4 branches equal" in page
    assert "torch" in page
    assert "| C | eagle | 4/4 =A |" in page and "2 prompts, 2 repeats: 4 rounds" in page
    svg = Path("kept/bench-speedup_decode.svg").read_text()
    assert all(f">{name}</text>" in svg for name in rows)
    assert Path("kept/bench-speedup_decode.png").read_bytes().startswith(b"\x89PNG")
    assert bench_command(replace(ASKED, refs=("eagle",)), quick) == Code.USAGE
    assert "holds a comparison with other graphs" in capsys.readouterr().err
    # an interruption
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
    assert "1 of 4 rounds; the same command continues there" in err and "eagle" in out
    assert json.loads(Path("broken/result.json").read_text())["rounds"] == 1
    answered[0] = 100
    assert bench_command(broken, quick) == Code.OK
    result = json.loads(Path("broken/result.json").read_text())
    assert result["rounds"] == 4 and answered[0] == 100 + 3 * 4
    assert counted(result) == counted(measured)
    # With nothing left to measure the very same comes out.
    capsys.readouterr()
    assert bench_command(broken, quick) == Code.OK
    assert json.loads(Path("broken/result.json").read_text()) == result


def clocked(patch: Patch, seed: int, slower: str = "") -> None:
    answer, random = sides._answer, Random(seed)

    def timed(side: Any, *args: Any) -> Any:
        run = answer(side, *args)
        took = run.meter.forwards * 1e6 * (1 + random.random() / 10)
        run.meter.in_run = whole = int(took * (3 if side.title == slower else 1))
        return replace(run, first_token=whole // 8, last_token=whole)

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


def test_categories_have_figures_of_their_own(quick: RunOptions, capsys: Output) -> None:
    lines = ['{"prompt": "One?", "category": "a"}', '{"prompt": "Two?", "category": "a"}']
    Path("q.jsonl").write_text("\n".join([*lines, '{"prompt": "Three?"}']))
    asked = BenchOptions(("eagle",), against="autoregressive", repeats=2, out=Path("kept"))
    assert bench_command(asked, replace(quick, prompts=Path("q.jsonl"))) == Code.OK
    rows = json.loads(Path("kept/result.json").read_text())["rows"]
    found = rows["eagle"]["categories"]
    assert list(found) == ["a", ""] and set(found["a"]) >= {"speedup_decode", "tau_step"}
    low, high = sorted(found[category]["tau_step"] for category in found)
    assert low <= rows["eagle"]["figures"]["tau_step"][0] <= high
    out = capsys.readouterr().out
    table = out[out.index("tau step by category:") :].splitlines()
    assert table[2].split() == ["a", "none", "overall"] and table[4].split()[:2] == ["B", "eagle"]
    assert "tau step by category:" in Path("kept/table.md").read_text()


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


# -- figures ------------------------------------------------------------------------------------

MS = 1_000_000


def a_run(first: int, last: int, tokens: int = 11, digest: str = "", **meter: Any) -> SideRun:
    times = {"first_token": first * MS, "last_token": last * MS, "decoded": tokens - 1}
    own = Meter(tokens=tokens, in_run=last * MS, **meter)
    return SideRun(own, **times, host_reads=3, digest=digest)


def figure(name: str, mine: list[SideRun], theirs: list[SideRun] | None = None) -> Any:
    """[value, low, high] of rounds with a prompt each, or None."""
    return FIGURES[name].measure(mine, theirs or mine, range(len(mine)))


def test_speedups_are_medians_of_ratios_within_rounds() -> None:
    theirs = [a_run(10, 110), a_run(20, 220), a_run(5, 405, tokens=21)]
    mine = [a_run(10, 60), a_run(10, 60), a_run(5, 105, tokens=11)]
    assert figure("speedup_decode", mine, theirs) == (2, 2, 4)  # 2, 4 and, per token, 2
    assert figure("speedup_ttlt", mine, theirs).value == pytest.approx(220 / 60)
    by_prompt = (405 / 21 / (105 / 11), 110 / 60, 220 / 60)
    assert figure("speedup_by_prompt", mine, theirs) == pytest.approx(by_prompt)
    assert figure("length_ratio", mine, theirs).low == pytest.approx(11 / 21)


def test_what_was_not_finished_does_not_count() -> None:
    broken = replace(a_run(1, 9999), problems=["stopped"])
    twice = [a_run(1, 4), a_run(1, 4)]
    assert figure("speedup_ttlt", [a_run(1, 2), broken], twice) == (2, None, None)
    assert figure("speedup_ttlt", [broken], [a_run(1, 4)]) is None


def test_sums_peaks_and_what_only_we_can_tell() -> None:
    one = a_run(1, 2, rows=10, drafted=8, accepted=4, lengths=Counter({1: 2, 3: 1}))
    two = a_run(1, 2, rows=10, drafted=2, accepted=1, lengths=Counter({2: 2}))
    assert figure("acceptance_rate", [one, two]).value == 0.5
    assert figure("tau_step", [one, two]).value == 9 / 5
    assert figure("rows", [a_run(1, 2, lengths=Counter({1: 5}))]) is None
    held = SideRun(Meter(), kv={"held": 5 * MS, "allocated": 9 * MS})
    assert figure("kv_held_mb", [held, one]).value == 5
    one, two = (a_run(1, 2, digest=digest) for digest in "xy")
    assert figure("same_answer", [one, one], [one, two]).value == 0.5
    assert acceptance_by_depth(Counter({1: 2, 2: 1, 3: 1})) == [0.5, 0.5]


def test_draws_take_prompts_first_and_then_their_repeats() -> None:
    numbers = resampled([0, 0, 0, 1, 1])
    assert numbers.shape == (DRAWS, 6) and set(numbers.ravel()) == set(range(5))
    prompts = numbers[:, ::3] >= 3  # the first of each of the two drawn prompts
    pairs = set(product((False, True), repeat=2))
    assert {tuple(row) for row in prompts.tolist()} == pairs
    assert (resampled([0, 0, 0, 1, 1]) == numbers).all()


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random, hits = np.random.default_rng(3), 0
    for _ in range(60):
        values = random.normal(2.0, 0.3, 24)
        found = estimate(range(24), lambda at, own=values: own[at].mean(-1))
        assert found.low is not None and found.high is not None
        hits += found.low <= 2.0 <= found.high
    assert 51 <= hits <= 60


def result(**figures: list[float | None]) -> dict[str, Any]:
    return {"rows": {"eagle": {"figures": figures, "reference": "A"}}}


@pytest.mark.parametrize(
    "name, before, now, sign",
    [
        ("speedup_decode", [2.0, 1.9, 2.1], [1.5, 1.4, 1.6], -1),
        ("speedup_decode", [2.0, 1.9, 2.1], [1.8, 1.6, 2.0], 0),  # they overlap
        ("speedup_decode", [2.0, 1.99, 2.01], [1.95, 1.94, 1.96], 0),  # sure, and too small
        ("speedup_decode", [2.0, 1.9, 2.1], [2.5, 2.4, 2.6], 1),
        ("speedup_decode", [2.0, None, None], [1.0, None, None], 0),  # of single rounds
        ("ms_per_token", [2.0, 1.9, 2.1], [4.0, 3.9, 4.1], 0),  # another hour's
        ("tau_step", [3.0, 2.5, 3.5], [2.9, 2.4, 3.4], -1),  # counted: the interval says nothing
        ("kv_held_mb", [5.0, None, None], [5.2, None, None], -1),
        ("kv_held_mb", [5.0, None, None], [4.0, None, None], 1),
        ("tokens", [50.0, 50.0, 50.0], [20.0, 20.0, 20.0], 0),  # neither better nor worse
    ],
)
def test_a_change_is_what_noise_does_not_explain(
    name: str, before: list[float | None], now: list[float | None], sign: int
) -> None:
    worse, better = changes(result(**{name: before}), result(**{name: now}))
    assert (len(better) - len(worse)) == sign and len(better) + len(worse) == abs(sign)
    assert all(name in str(one) for one in (*worse, *better))


# -- bench --tune -------------------------------------------------------------------------------

Asked = list[tuple[list[str], Any]]


@pytest.fixture
def asked() -> Asked:
    return []


def scripted(monkeypatch: Patch, asked: Asked, speed: Mapping[str, float]) -> None:
    def measure(prepared: Any) -> Any:
        entries = prepared.entries
        asked.append(([one.side for one in entries], entries[0].varied.get("parts")))
        rows = {}
        for number, one in enumerate(entries):
            known = (value for word, value in speed.items() if word in f"{one.side},{one.varied}")
            rows[str(number)] = {"figures": {"speedup_decode": [next(known, 1.0), None, None]}}
        return {"exit_code": 0, "rows": rows}

    monkeypatch.setattr(comparison, "measure", measure)


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
    text = (out / "profile.yaml").read_text()
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


@pytest.mark.parametrize("kind", command.AXES)
def test_every_axis_is_one_of_the_kind(kind: str, quick: RunOptions) -> None:
    graphs = {"eagle3": "eagle", "vanilla": "speculative"}
    own = [f"drafter.{name}={one}" for name, one in command.AT_FIRST.get(kind, {}).items()]
    variants = [
        ",".join((f"{graphs.get(kind, kind)}@drafter.{name}={value}", *own))
        for name, values in command.AXES[kind].items()
        for value in values
    ]
    own_models = replace(quick, model=None, drafter_model=None)
    experiment = experiment_of_sides("bench", variants)
    assert len(prepare_experiment(experiment, own_models).jobs) == len(variants)


def test_it_runs(quick: RunOptions, capsys: Output) -> None:
    asked = BenchOptions(("ngram",), repeats=1, count=1)
    assert tune_command(asked, replace(quick, max_new_tokens=3)) == Code.OK
    (found,) = yaml.safe_load(capsys.readouterr().out)["profiles"].values()
    assert set(found["drafters"]["ngram"]) == {"model", "num_draft_tokens", "draft_depth"}
