"""Every finished answer is in the run folder at once. A run that did not end goes on from there,
with the answers, the digest and the lines of a run that was never stopped."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import CommandLine
from helpers.tiny import write_tiny_target

from specsot.engine.errors import Code
from specsot.engine.record.run_folder import RunFolder
from specsot.engine.shell import printable
from specsot.states.machine import Run

Patch = pytest.MonkeyPatch
NAMES = ("killed", "whole")
QUESTIONS = ["Why is the sky blue?", "What is tea?", "Who sings?", "What is tea?", "Is it late?"]
KINDS: dict[str, Any] = {
    "outlines": {"graph": "bim_eagle"},
    "rows": {"graph": "batching_eagle", "outline": None, "sets": ["skeleton.max_tokens=12"]},
    "sampled": {
        "graph": "eagle",
        "outline": None,
        "sets": ["sampling.temperature=0.9", "limits.n=2", "layout.max_num_branches=4"],
        "seed": 7,
    },
}


@pytest.fixture
def many(shell: Any) -> Any:
    """Runs of five prompts, two of which have one text, that are not all decoded at once."""
    lines = [{"id": f"q{n}", "prompt": text} for n, text in enumerate(QUESTIONS)]
    lines[1]["max_new_tokens"] = 5
    Path("five.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shell.defaults |= {"prompt": None, "prompts": Path("five.jsonl"), "max_new_tokens": 9}
    shell.defaults |= {"sets": ["layout.max_num_branches=3"], "quiet": True}
    return shell


def killed(shell: Any, monkeypatch: Patch, **options: Any) -> list[Path]:
    """Copies of the run folder, each as the death of the process at that moment would leave it: one
    after each number of finished answers."""
    copies: dict[int, Path] = {}
    advance = Run.advance

    def copying(run: Run) -> None:
        folder = shell.latest.resolve()
        count = (folder / "outputs.jsonl").read_bytes().count(b"\n")
        if count not in copies:
            copies[count] = shutil.copytree(folder, Path("runs") / f"killed-{count}")
        advance(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", copying)
        assert shell.run(**options) == Code.OK
    return [copies[count] for count in sorted(copies)]


def resume(shell: Any, folder: Path, **options: Any) -> int:
    given = dict.fromkeys(shell.defaults) | {"argv": (), "quiet": True, "sets": ()}
    code: int = shell.run(**{**given, "resume": folder, **options})
    return code


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name != "seconds"} for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_has_its_answers_and_goes_on(kind: str, many: Any, monkeypatch: Patch) -> None:
    copies = killed(many, monkeypatch, **KINDS[kind])
    whole = many.latest.resolve()
    out, digest = many.out, many.digest
    wanted = lines_of(whole)
    assert [line["id"] for line in wanted] == [f"q{n}" for n in range(5)]
    assert len(copies) > 2, "answers are written one by one, not all at the end"
    for folder in (copies[1], copies[-1]):
        kept = lines_of(folder)
        assert all(line in wanted for line in kept)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["status"] == "running" and "digest" not in manifest
        assert resume(many, folder) == Code.OK
        assert many.out == out and lines_of(folder) == wanted
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["digest"] == digest and manifest["status"] == "ok"
        assert [entry["kept"] for entry in manifest["resumed"]] == [len(kept)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def folder(many: Any, kept: Path, monkeypatch: Patch) -> Path:
    """Of a run that died after two answers; `runs/whole` is that of a run that did not."""
    if not (kept / "whole").exists():
        shutil.copytree(killed(many, monkeypatch)[2], kept / "killed")
        shutil.copytree(many.latest.resolve(), kept / "whole")
    shutil.copytree(kept, "runs", dirs_exist_ok=True)
    return Path("runs/killed")


def test_a_cut_line_is_harmless(many: Any, folder: Path, cli: CommandLine) -> None:
    whole = Path("runs/whole")
    wanted = lines_of(whole)
    with (folder / "outputs.jsonl").open("a") as file:
        file.write((whole / "outputs.jsonl").read_text()[:200])
    (folder / "trace.jsonl").write_text((whole / "trace.jsonl").read_text()[:-20])
    assert cli("replay", str(folder)) == Code.OK
    assert resume(many, folder) == Code.OK and lines_of(folder) == wanted
    assert cli("replay", str(folder)) == Code.OK
    assert cli("runs", "diff", str(folder), str(whole)) == Code.OK


def test_all_answers_without_an_end_are_a_whole_run(many: Any, folder: Path) -> None:
    shutil.copy("runs/whole/outputs.jsonl", folder)
    assert resume(many, folder) == Code.OK and many.out.count("[q") == 5
    digests = [
        json.loads(Path(f"runs/{name}/manifest.json").read_text())["digest"] for name in NAMES
    ]
    assert digests[0] == digests[1]


def test_answers_are_printed_when_they_are_finished(many: Any, monkeypatch: Patch) -> None:
    printed: list[str] = []
    advance = Run.advance

    def reading(run: Run) -> None:
        printed.append(many.capsys.readouterr().out)
        advance(run)

    monkeypatch.setattr(Run, "advance", reading)
    assert many.run() == Code.OK
    assert sum(map(bool, printed)) > 1
    text = "".join([*printed, many.out])
    assert [line[:4] for line in text.splitlines() if line.startswith("[q")] == [
        f"[q{n}]" for n in range(5)
    ]
    texts = [line["text"] for line in lines_of(many.latest)]
    assert text == "\n".join(
        f"[q{n}] {question}\n\n{printable(texts[n])}\n" for n, question in enumerate(QUESTIONS)
    )


def test_an_interrupted_run_goes_on(many: Any, folder: Path, monkeypatch: Patch) -> None:
    wanted = lines_of(Path("runs/whole"))
    advance = Run.advance

    def interrupted(run: Run) -> None:
        if (many.latest / "outputs.jsonl").read_bytes().count(b"\n") > 1:
            signal.raise_signal(signal.SIGINT)
        advance(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", interrupted)
        assert many.run() == Code.INTERRUPTED
    folder = many.latest
    marks = [line.get("unfinished", False) for line in lines_of(folder)]
    assert len(marks) == 5 and {True, False} == set(marks)
    assert resume(many, folder) == Code.OK and lines_of(folder) == wanted


# -- what cannot be resumed ------------------------------------------------------------------------


def test_a_finished_run_or_another_folder(many: Any, folder: Path) -> None:
    for other, reason in (
        (Path("runs/whole"), "the run is finished (ok)"),
        (Path("nowhere"), "not a run folder: it has no manifest.json"),
        (Path("runs"), "not a run folder: it has no manifest.json"),
    ):
        assert resume(many, other) == Code.USAGE
        assert many.err == f"specsot: --resume {other}: {reason}\n"
    (folder / "manifest.json").write_text("{}")
    assert resume(many, folder) == Code.USAGE and "not a run folder\n" in many.err


def test_a_run_that_goes_on(many: Any, folder: Path) -> None:
    running = RunFolder(folder)
    running.lock()
    assert resume(many, folder) == Code.USAGE
    assert many.err == f"specsot: {folder}: this run is still going on\n"
    running.close()
    assert resume(many, folder) == Code.OK


@pytest.mark.parametrize("options", [{"seed": 3}, {"graph": "eagle"}, {"prompt": "Why?"}])
def test_a_run_goes_on_as_it_was_started(options: Any, many: Any, folder: Path) -> None:
    assert resume(many, folder, **options) == Code.USAGE
    assert many.err.startswith("specsot: --resume continues a run as it was started: ")


@pytest.mark.parametrize(
    "file, old, new, reason",
    [
        ("run.yaml", "draft_depth: 3", "draft_depth: 2", "another graph"),
        ("run.yaml", "seed: 0", "seed: 1", "another seed"),
        ("prompts.jsonl", "What is tea", "Was", "outputs.jsonl answers another question"),
        ("outputs.jsonl", '"outline_token_ids"', '"ids"', "outline_token_ids: Field required"),
    ],
)
def test_a_changed_folder(
    file: str, old: str, new: str, reason: str, many: Any, folder: Path
) -> None:
    path = folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert resume(many, folder) == Code.USAGE
    assert reason in many.err and many.err.count("\n") == 1


def test_another_model(many: Any, folder: Path) -> None:
    model = Path(many.defaults["model"])
    kept = shutil.copytree(model, Path("kept"))
    try:
        write_tiny_target(model, "qwen3", seed=5, vocab=4096)
        before = (folder / "outputs.jsonl").read_bytes()
        assert resume(many, folder) == Code.USAGE
        assert "specsot: --resume: model weights changed: " in many.err
        assert (folder / "outputs.jsonl").read_bytes() == before
    finally:
        shutil.copytree(kept, model, dirs_exist_ok=True)
