"""`specsot runs` and `specsot trace`: what is kept, how runs differ, what goes, other formats."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import call

from specsot.engine.errors import Code, UsageError
from specsot.engine.record.run_folder import find_run, saved_runs

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def two(shell: Any) -> Any:
    """A run of `bim_eagle` and one of `bim_plain`, whose tokens are the same."""
    assert shell.run() == Code.OK
    assert shell.run(graph="bim_plain") == Code.OK
    return shell


def test_a_list_of_runs(two: Any, capsys: Captured) -> None:
    Path("runs/notes").mkdir()
    assert call("runs", "list") == Code.OK
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "2 runs in runs" and "-bim_eagle-" in lines[0] and "-bim_plain-" in lines[1]
    assert all("  ok  " in line and two.digest[:12] in line for line in lines)
    assert call("runs", "list", "--json") == Code.OK
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["graph"] for row in rows] == ["bim_eagle", "bim_plain"]
    assert all(row["digest"] == two.digest and row["tokens"] > 0 for row in rows)


def test_no_runs_at_all(tmp_path: Path, capsys: Captured) -> None:
    assert call("runs", "list", "--runs-dir", str(tmp_path / "none")) == Code.OK
    assert capsys.readouterr().out.startswith("0 runs")


def test_a_run_by_any_of_its_names(two: Any) -> None:
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


def test_runs_of_one_second_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for end, started in (("ffffff", "2026-01-01T00:00:00.1"), ("000000", "2026-01-01T00:00:00.2")):
        folder = tmp_path / f"20260101T000000Z-fast-{end}"
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({"started": started}))
    assert [one.path.name[-6:] for one in saved_runs(tmp_path)] == ["ffffff", "000000"]
    assert find_run("fast", tmp_path).path.name.endswith("000000")


def test_the_summary_of_a_run(two: Any, capsys: Captured) -> None:
    assert call("runs", "show", "bim_eagle") == Code.OK
    assert capsys.readouterr().out.startswith("# Run bim_eagle\n")


def test_equal_tokens_and_what_differs_beside_them(two: Any, capsys: Captured) -> None:
    assert call("runs", "diff", "bim_eagle", "bim_plain") == Code.OK
    out = capsys.readouterr().out
    assert "drafter.kind: eagle3 | none\n" in out and "tokens: all equal\n" in out
    assert "tau_step: " in out and "layout.kind" not in out


def test_the_first_token_that_differs(two: Any, capsys: Captured) -> None:
    file = two.latest / "outputs.jsonl"
    (line,) = (json.loads(one) for one in file.read_text().splitlines())
    part = line["parts"][1]
    assert len(part["token_ids"]) > 3
    other = part["token_ids"][2] + 1
    part["token_ids"][2], part["text"] = other, part["text"][:4] + "@" + part["text"][5:]
    file.write_text(json.dumps(line) + "\n")
    assert call("runs", "diff", "bim_eagle", "--json") == Code.UNEQUAL
    first = json.loads(capsys.readouterr().out)["first"]
    assert (first["where"], first["token"]) == ("part 2", 3) and first["ids"][1] == other
    assert first["before"] == part["text"][:4] and first["texts"][1].startswith("@")
    assert call("runs", "diff", "bim_eagle") == Code.UNEQUAL
    assert f"part 2, token 3: {first['ids'][0]} | {other}" in capsys.readouterr().out


def test_only_old_runs_go(two: Any, capsys: Captured) -> None:
    Path("runs/notes").mkdir()
    assert call("runs", "clean") == Code.USAGE
    assert call("runs", "clean", "--older-than", "1") == Code.OK
    assert call("runs", "clean", "--keep", "1", "--dry-run") == Code.OK
    assert len(saved_runs(Path("runs"))) == 2
    capsys.readouterr()
    assert call("runs", "clean", "--keep", "1") == Code.OK
    assert "-bim_eagle-" in capsys.readouterr().out
    assert [one.manifest["graph"]["name"] for one in saved_runs(Path("runs"))] == ["bim_plain"]
    manifest = two.latest / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"status": "ok"', '"status": "running"'))
    assert call("runs", "clean", "--keep", "0") == Code.OK
    assert len(saved_runs(Path("runs"))) == 1 and Path("runs/notes").is_dir()


def test_a_trace_as_a_table(two: Any, capsys: Captured) -> None:
    assert call("trace", "export", "bim_eagle", "--format", "csv") == Code.OK
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    records = (find_run("bim_eagle", Path("runs")).path / "trace.jsonl").read_text().splitlines()
    assert len(rows) == len(records)
    rounds = [row for row in rows if row["kind"] == "round"]
    assert rounds[0]["round"] == "1" and all(row["branches"] for row in rounds)


def test_a_trace_for_perfetto(two: Any) -> None:
    assert call("trace", "export", "bim_eagle", "--out", "t.json") == Code.OK
    events = json.loads(Path("t.json").read_text())["traceEvents"]
    run = find_run("bim_eagle", Path("runs"))
    records = [json.loads(line) for line in run.text("trace.jsonl").splitlines()]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    ops = [event for event in spans if event["tid"] == 2]
    assert len(ops) == sum(one["kind"] == "op" for one in records)
    tokens = sum(event["args"]["committed"] for event in spans if event["tid"] >= 10)
    assert tokens == sum(sum(one["committed"]) for one in records if one["kind"] == "round")
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"states", "ops", "branch 1/outline"} <= tracks or {"states", "ops"} < tracks


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("manifest.json", "{", ["runs", "list"]),
        ("manifest.json", "[]", ["runs", "list"]),
        ("outputs.jsonl", "{}", ["runs", "diff", "bim_eagle"]),
        ("trace.jsonl", "{}\n", ["trace", "export"]),
        ("trace.jsonl", "x", ["trace", "export"]),
    ],
)
def test_a_damaged_folder_is_named(
    file: str, text: str, words: list[str], two: Any, capsys: Captured
) -> None:
    (two.latest / file).write_text(text)
    assert call(*words) == Code.USAGE
    assert file in capsys.readouterr().err
