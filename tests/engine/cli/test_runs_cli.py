"""`specsot runs`, `trace` and `replay`: what is kept, how runs differ, what goes, other formats,
and runs that are made to wait."""

import csv
import io
import json
import os
import shutil
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.commands import CommandLine

from specsot.engine.cli import live_run
from specsot.engine.errors import Code, UsageError
from specsot.engine.record.run_folder import find_run, saved_runs
from specsot.engine.run.core import Status, StopSignal, delay

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture
def two(shell: Any) -> Any:
    """A run of `bim_eagle` and one of `bim_plain`, whose tokens are the same."""
    assert shell.run() == Code.OK
    assert shell.run(graph="bim_plain") == Code.OK
    return shell


def test_runs_are_listed_shown_exported_compared_and_cleaned(
    two: Any, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs/notes").mkdir()
    monkeypatch.setenv("COLUMNS", "300")
    assert cli("runs", "list") == Code.OK
    head, *lines, last = cli.out.splitlines()
    assert head.split() == ["run", "status", "tokens", "seconds", "model", "digest", "prompt"]
    assert last == "2 runs in runs" and "-bim_eagle-" in lines[0] and "-bim_plain-" in lines[1]
    rows = cli.json("runs", "list")["runs"]
    pairs = zip(lines, rows, strict=True)
    assert all(" ok " in line and two.digest[:8] in line for line in lines)
    assert all(row["prompt"] and line.endswith(row["prompt"]) for line, row in pairs)
    monkeypatch.setenv("COLUMNS", "60")
    assert cli("runs", "list") == Code.OK
    assert {len(line) for line in cli.out.splitlines()[:-1]} == {60}
    assert [row["graph"] for row in rows] == ["bim_eagle", "bim_plain"]
    assert all(row["digest"] == two.digest and row["tokens"] > 0 for row in rows)
    assert cli("runs", "list", "--runs-dir", "none") == Code.OK and cli.out.startswith("0 runs")
    # a run by any of its names
    runs = Path("runs")
    first, second = saved_runs(runs)
    name = first.path.name
    for ref in (name, f"runs/{name}", "bim_eagle", name[-6:]):
        assert find_run(ref, runs).path.name == name
    assert find_run("latest", runs).path.name == second.path.name
    with pytest.raises(UsageError, match="2 runs match"):
        find_run("2", runs)
    with pytest.raises(UsageError, match="no such run in runs"):
        find_run("eagle", runs)
    # a trace as a table, and for Perfetto
    run = find_run("bim_eagle", Path("runs"))
    records = [json.loads(line) for line in run.text("trace.jsonl").splitlines()]
    assert cli("trace", "export", "bim_eagle", "--format", "csv") == Code.OK
    rows = list(csv.DictReader(io.StringIO(cli.out)))
    rounds = [row for row in rows if row["kind"] == "round"]
    assert len(rows) == len(records)
    assert rounds[0]["round"] == "1" and all(row["branches"] for row in rounds)
    assert cli("trace", "export", "bim_eagle", "--out", "t.json") == Code.OK
    assert "wrote t.json, " in cli.err and cli.out == ""
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    ops = [event for event in spans if event["tid"] == 2]
    assert len(ops) == sum(one["kind"] == "op" for one in records)
    tokens = sum(event["args"]["committed"] for event in spans if event["tid"] >= 10)
    assert tokens == sum(sum(one["committed"]) for one in records if one["kind"] == "round")
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"states", "ops", "branch 1/outline"} <= tracks or {"states", "ops"} < tracks
    # what differs, and the first token that does
    assert cli("runs", "show", "bim_eagle") == Code.OK
    assert cli.out.startswith("# Run bim_eagle\n")
    assert cli("runs", "diff", "bim_eagle", "bim_plain") == Code.OK
    out = cli.out
    assert "drafter.kind: eagle3 | none\n" in out and "tokens: all equal\n" in out
    assert "tau_step: " in out and "layout.kind" not in out
    file = two.latest / "outputs.jsonl"
    (line,) = (json.loads(one) for one in file.read_text().splitlines())
    part = line["parts"][1]
    assert len(part["token_ids"]) > 3
    other = part["token_ids"][2] + 1
    part["token_ids"][2], part["text"] = other, part["text"][:4] + "@" + part["text"][5:]
    file.write_text(json.dumps(line) + "\n")
    assert cli("runs", "diff", "bim_eagle", "--json") == Code.UNEQUAL
    first = json.loads(cli.out)["first"]
    assert (first["where"], first["token"]) == ("part 2", 3) and first["ids"][1] == other
    assert first["before"] == part["text"][:4] and first["texts"][1].startswith("@")
    assert cli("runs", "diff", "bim_eagle") == Code.UNEQUAL
    assert f"part 2, token 3: {first['ids'][0]} | {other}" in cli.out
    # only old runs go
    assert cli("runs", "clean") == Code.USAGE
    assert cli("runs", "clean", "--older-than", "1") == Code.OK
    assert cli("runs", "clean", "--keep", "1", "--dry-run") == Code.OK
    assert len(saved_runs(Path("runs"))) == 2
    assert cli("runs", "clean", "--keep", "1") == Code.OK
    assert "-bim_eagle-" in cli.out and "specsot: 1 run removed, " in cli.err
    assert cli("runs", "list") == Code.OK and cli.out.endswith("\n1 run in runs\n")
    assert [one.manifest["graph"]["name"] for one in saved_runs(Path("runs"))] == ["bim_plain"]
    manifest = two.latest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"status": "ok"', '"status": "running"'))
    assert cli("runs", "clean", "--keep", "0") == Code.OK
    assert len(saved_runs(Path("runs"))) == 1 and Path("runs/notes").is_dir()


def test_runs_of_one_second_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for end, started in (("ffffff", "2026-01-01T00:00:00.1"), ("000000", "2026-01-01T00:00:00.2")):
        folder = tmp_path / f"20260101T000000Z-fast-{end}"
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({"started": started}))
    assert [one.path.name[-6:] for one in saved_runs(tmp_path)] == ["ffffff", "000000"]
    assert find_run("fast", tmp_path).path.name.endswith("000000")


def test_a_damaged_folder_is_named(two: Any, cli: CommandLine) -> None:
    for file, text, words in (
        ("trace.jsonl", "{}\n", ["trace", "export"]),
        ("trace.jsonl", "x", ["trace", "export"]),
        ("trace.jsonl", DEEP, ["trace", "export"]),
        ("trace.jsonl", '{"kind": "move", "t": 1}\n', ["trace", "export"]),
        ("trace.jsonl", '{"kind": "move", "t": 1}\n', ["replay"]),
        ("outputs.jsonl", "{}", ["runs", "diff", "bim_eagle"]),
        ("outputs.jsonl", DEEP, ["runs", "diff", "bim_eagle"]),
        ("metrics.json", DEEP, ["runs", "diff", "bim_eagle"]),
        ("manifest.json", DEEP, ["runs", "diff", "bim_eagle"]),
        ("manifest.json", '{"graph": {"resolved": 1}}', ["runs", "diff", "bim_eagle"]),
    ):
        before = (two.latest / file).read_text()
        (two.latest / file).write_text(text)
        assert cli(*words) == Code.USAGE and cli.err.count("\n") == 1
        (two.latest / file).write_text(before)
        assert file in cli.err or "not a valid run folder" in cli.err
    # broken runs are named, and the others listed
    runs = Path("runs")
    good = [run.path.name for run in saved_runs(runs)]
    manifest = (two.latest / "manifest.json").read_text()
    broken: dict[str, tuple[str, str | None, str]] = {
        "000001": ("manifest.json", manifest[:200], "JSONDecodeError"),
        "000002": ("manifest.json", DEEP, "manifest.json: it is nested too deeply"),
        "000003": ("manifest.json", '{"graph": []}', "not a valid run folder"),
        "000004": ("manifest.json", '{"digest": 7}', "digest is a int"),
        "000005": ("metrics.json", DEEP, "metrics.json: it is nested too deeply"),
        "000006": ("metrics.json", '{"seconds": {"total": "x"}}', "seconds is a str"),
        "000007": ("manifest.json", None, "manifest.json: cannot be read: not a regular file"),
        "000008": ("metrics.json", None, "metrics.json: cannot be read: not a regular file"),
    }
    for end, (file, text, _) in broken.items():
        folder = shutil.copytree(two.latest, runs / f"202001{end[-2:]}T000000Z-odd-{end}")
        (folder / file).unlink()
        if text is None:
            os.mkfifo(folder / file)
        else:
            (folder / file).write_text(text)
    for words in (["runs", "list"], ["runs", "list", "--json"]):
        assert cli(*words) == Code.FAILED
        lines = cli.err.splitlines()
        assert len(lines) == len(broken)
        for line, (end, (_, _, reason)) in zip(lines, broken.items(), strict=True):
            assert line.startswith("specsot: broken run: runs/202001")
            assert f"-odd-{end}" in line and reason in line
    document = json.loads(cli.out)
    assert [row["name"] for row in document["runs"]] == good
    assert [name[-6:] for name in document["broken"]] == [*broken]
    assert cli("runs", "clean", "--keep", "0", "--dry-run") == Code.OK
    assert cli.out.splitlines() == good
    large = runs / "20200101T000000Z-odd-000001" / "manifest.json"
    with large.open("ab") as file:
        file.truncate(65 << 20)
    assert cli("runs", "list") == Code.FAILED and "more than 64 MiB" in cli.err


# -- replay ---------------------------------------------------------------------------------------


@pytest.fixture
def kept(shell: Any) -> Any:
    shell.defaults["max_new_tokens"] = 8
    assert shell.run() == Code.OK
    return shell


def test_the_last_picture_without_a_terminal(
    kept: Any, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "25")
    assert cli("replay") == Code.OK and cli.err == ""
    lines = cli.out.splitlines()
    assert len(lines) == 24 and max(map(len, lines)) <= 80 and "\x1b" not in cli.out
    assert "? How do bees make honey?" in cli.out and "drafts" in lines[2]
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    assert cli("replay", "latest") == Code.OK
    lines = cli.out.splitlines()
    assert len(lines) == 39 and 100 < max(map(len, lines)) <= 120 and "◆" in cli.out
    for words, told in (
        (["nothing"], "no such run"),
        (["--speed", "0"], "--speed takes"),
        (["--speed", "nan"], "--speed takes"),
    ):
        assert cli("replay", *words) == Code.USAGE
        assert told in cli.err and cli.err.count("\n") == 1
    # what a run that was killed lacks is said
    path = kept.latest / "trace.jsonl"
    lines = [line for line in kept.lines("trace.jsonl") if line["kind"] != "texts"]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli("replay") == Code.OK and cli.err.count("note: ") == 1
    assert "the texts of single tokens are not in this run folder" in cli.err


# -- --step-delay ---------------------------------------------------------------------------------


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
    assert kept.run(step_delay=0.05) == Code.OK
    metrics, records = kept.read("metrics.json"), kept.lines("trace.jsonl")
    waited = 0.05 * sum(one["kind"] == "move" for one in records)
    limit = took[0] - waited / 2  # the run itself takes less than what is left
    assert kept.digest == digest and took[0] > waited > 0.5
    assert metrics["seconds"]["total"] < limit and records[-1]["t"] / 1e9 < limit
    assert sum(state["milliseconds"] for state in metrics["states"].values()) / 1e3 < limit
    times = [one["t"] for one in records]
    assert times == sorted(times)


def test_a_halt_ends_the_wait() -> None:
    class Asked(SimpleNamespace):
        def take_snapshot(self) -> None:
            self.looks += 1
            if self.looks == 2:
                halt.status = Status.INTERRUPTED

    halt, recorder = StopSignal(), Asked(looks=0, snapshot_requested=False)
    began = monotonic()
    assert delay(60.0, recorder, halt)(None)  # type: ignore[arg-type]
    assert monotonic() - began < 5 and recorder.looks == 2 and recorder.snapshot_requested
