"""Folders of runs: names, atomic files, the link to the latest."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from specsot.engine.record.run_folder import RunFolder


def test_a_folder_per_run_and_a_link_to_the_latest(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "runs", "a")
    second = RunFolder.create(tmp_path / "runs", "b")
    assert first.path != second.path
    stamp, graph, short = second.path.name.split("-")
    assert graph == "b" and len(short) == 6 and stamp.endswith("Z") and stamp[8] == "T"
    assert (tmp_path / "runs" / "latest").resolve() == second.path.resolve()


def test_files_appear_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, "g")
    folder.write_json("a.json", {"x": "é\ud800"})
    assert json.loads((folder.path / "a.json").read_text())["x"].startswith("é")

    def fails(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fails)
    folder.write_json("a.json", {"x": "new"})
    assert folder.faults == [f"{folder.path / 'a.json'}: disk full"]
    assert "new" not in (folder.path / "a.json").read_text()


def test_the_trace_grows_line_by_line(tmp_path: Path) -> None:
    with closing(RunFolder.create(tmp_path, "g")) as folder:
        folder.append("trace.jsonl", {"kind": "move", "to": "a\nb"})
        folder.append("trace.jsonl", {"kind": "op"})
    lines = (folder.path / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["move", "op"]


def test_a_run_goes_on_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = RunFolder.create(tmp_path / "file", "g")
    folder.write_json("a.json", {})
    folder.append("trace.jsonl", {})
    folder.close()
    assert not folder.exists and len(folder.faults) == 1 and "--runs-dir" in folder.faults[0]


@pytest.mark.parametrize("records", [3, 3000])
def test_a_trace_that_finds_no_room_is_told_once(records: int, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "g")
    (folder.path / "trace.jsonl").symlink_to("/dev/full")
    for number in range(records):
        folder.append("trace.jsonl", {"number": number})
    folder.write_json("a.json", {"x": 1})
    folder.close()
    assert folder.faults == [f"{folder.path / 'trace.jsonl'}: No space left on device"]
    assert json.loads((folder.path / "a.json").read_text()) == {"x": 1}
