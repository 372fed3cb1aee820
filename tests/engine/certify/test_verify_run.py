"""A run's folder held to plain transformers: what passes, what is found, what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import verify_command

from specsot.engine.cli.run_command import run_command
from specsot.engine.errors import Code
from specsot.engine.prepare.options import RunOptions

Output = pytest.CaptureFixture[str]

BEES = "Tell me about honey bees."
PROMPTS = '{"id": "a", "prompt": "Tell me about honey bees."}\n{"id": "b", "prompt": "2+2?"}\n'


def a_run(root: Path, **options: Any) -> Path:
    given = {"max_new_tokens": 24, **options}
    assert run_command(RunOptions(runs_dir=root / "runs", quiet=True, **given)) == Code.OK
    return (root / "runs" / "latest").resolve()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two requests, one with an outline."""
    root = tmp_path_factory.mktemp("verify")
    (root / "q.jsonl").write_text(PROMPTS)
    return a_run(root, graph="bim_eagle", prompts=root / "q.jsonl", max_new_tokens=9)


@pytest.fixture
def folder(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "run"))


def changed(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    text = (folder / name).read_text()
    first, rest = (text, "") if name.endswith(".json") else text.split("\n", 1)
    value = json.loads(first)
    change(value)
    (folder / name).write_text(json.dumps(value) + "\n" + rest)


def test_every_token_is_counted(folder: Path, capsys: Output) -> None:
    assert verify_command(str(folder), Path("runs"), True, 1) == Code.OK
    found = json.loads(capsys.readouterr().out)["branches"]
    lines = [json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines()]
    parts = [part for line in lines for part in line["parts"]]
    outlines = [line["outline_token_ids"] for line in lines]
    written = [*outlines, *(part["token_ids"] for part in parts)]
    ends = sum(part["finish_reason"] == "stop" for part in parts)
    ends += sum(line["outline_finish_reason"] == "stop" for line in lines)
    assert sum(one["tokens"] for one in found) == sum(map(len, written)) + ends
    assert all(one["own"] + one["grammar"] + one["ties"] == one["tokens"] for one in found)
    assert sum(one["own"] for one in found) > 40


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_target_has_the_same_weights(weights: str, tmp_path: Path) -> None:
    folder = a_run(tmp_path, graph="eagle", prompt=BEES, weights=weights)
    assert json.loads((folder / "manifest.json").read_text())["weights"] == weights
    assert verify_command(str(folder), Path("runs"), True, 1) == Code.OK


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda line: line["parts"][1]["token_ids"].insert(3, 1), "a, part 2: .* token 4 is 1"),
        (lambda line: line["parts"][0]["context_ids"].reverse(), "part 1: .* are not: "),
        (lambda line: line["parts"][0].update(finish_reason="stop"), "part 1: .* are not: "),
    ],
    ids=["another token", "another context", "an end that the target does not want"],
)
def test_what_is_not_the_targets_own_is_found(
    change: Callable[[Any], None], says: str, folder: Path, capsys: Output
) -> None:
    changed(folder, "outputs.jsonl", change)
    assert verify_command(str(folder), Path("runs"), False, 1) == Code.UNEQUAL
    assert re.search(says, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda m: m["graph"]["resolved"]["sampling"].update(temperature=0.7), 2, "draws"),
        (lambda m: m["graph"]["resolved"]["sampling"].update(banned=[5]), 2, "changes"),
        (lambda m: m["graph"]["resolved"].update(blend={}), 2, "may reuse rows"),
        (lambda m: m["graph"]["resolved"].update(beam={}), 2, "searches beams"),
        (lambda m: m["models"]["target"].update(hash="0"), 4, "its weights are others"),
        (lambda m: m["models"].pop("target"), 2, "cannot be verified: no 'target'"),
        (
            lambda m: m["graph"]["resolved"].update(sampling={"temperature": []}),
            2,
            "cannot be verified",
        ),
    ],
)
def test_what_cannot_be_verified_is_said(
    change: Callable[[Any], None], code: int, says: str, folder: Path, capsys: Output
) -> None:
    changed(folder, "manifest.json", change)
    assert verify_command(str(folder), Path("runs"), False, 1) == code
    assert says in capsys.readouterr().err


def test_a_folder_that_is_none(tmp_path: Path, capsys: Output) -> None:
    assert verify_command(str(tmp_path), tmp_path, False, 1) == Code.USAGE
    assert "no such run in" in capsys.readouterr().err
    for text in ("[]", "{"):
        (tmp_path / "manifest.json").write_text(text)
        assert verify_command(str(tmp_path), tmp_path, False, 1) == Code.USAGE
        assert "manifest.json: " in capsys.readouterr().err


@pytest.mark.parametrize("ids", [[], [1 << 40], [-1], ["a"], None])
def test_ids_that_are_none_are_refused(ids: Any, folder: Path, capsys: Output) -> None:
    changed(folder, "outputs.jsonl", lambda line: line["parts"][0].update(context_ids=ids))
    assert verify_command(str(folder), folder, False, 1) == Code.USAGE
    assert "part 1: not token ids of this model after a context" in capsys.readouterr().err


@pytest.fixture(scope="module")
def attended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tmp_path_factory.mktemp("attended"), graph="bim_attend_merge", prompt=BEES)


def test_a_combined_answer_under_its_mask(attended: Path, tmp_path: Path, capsys: Output) -> None:
    folder = Path(shutil.copytree(attended, tmp_path / "run"))
    assert verify_command(str(folder), Path("runs"), True, 1) == Code.OK
    found = json.loads(capsys.readouterr().out)["branches"]
    line = json.loads((folder / "outputs.jsonl").read_text())
    segments, parts = line["combined"]["context_segments"], line["parts"]
    assert len(found) == 1 + len(parts) + 1 and found[-1]["tokens"] >= 24
    sizes = [tokens for tokens, _, _ in segments]
    assert sum(sizes) == len(line["combined"]["context_ids"])
    assert [sees for _, _, sees in segments[1:-1]] == [[0]] * len(parts)
    assert segments[-1][1:] == [sizes[0] + max(sizes[1:-1]), [*range(len(parts) + 1)]]
    # what it saw decides: as one text the same ids make another answer
    changed(folder, "outputs.jsonl", lambda one: one["combined"].update(context_segments=None))
    assert verify_command(str(folder), Path("runs"), True, 1) == Code.UNEQUAL


def test_segments_that_cannot_be_are_refused(attended: Path, tmp_path: Path) -> None:
    for number, wrong in enumerate(([[1, 0, []]], [[1, 0, [0]]], [[-1, 0, []]], [["a", 0, []]])):
        folder = Path(shutil.copytree(attended, tmp_path / str(number)))
        changed(
            folder, "outputs.jsonl", lambda one, w=wrong: one["combined"].update(context_segments=w)
        )
        assert verify_command(str(folder), Path("runs"), True, 1) == Code.USAGE
