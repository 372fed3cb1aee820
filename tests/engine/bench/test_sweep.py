"""`specsot sweep` and `--out`: grids, gains within prompts, folders that comparisons go on in."""

import csv
import errno
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from specsot.engine.bench import sides as compare_sides
from specsot.engine.bench.command import compare_command, points, sweep_command
from specsot.engine.bench.comparison import Comparison
from specsot.engine.bench.sides import BranchAnswer, ComparedPrompt, SideRun, answer_all, letters
from specsot.engine.errors import Code, UsageError
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.options import RunOptions
from specsot.engine.record import run_folder
from specsot.engine.record.metrics import Meter
from specsot.engine.run.core import Status, StopSignal
from specsot.states.machine import Run

from .test_compare import settings_column

Patch = pytest.MonkeyPatch
Output = pytest.CaptureFixture[str]

GRID = ("drafter.num_draft_tokens=4,6", "layout.kind=bim,batching")


# -- the grid -----------------------------------------------------------------------------------


def test_a_grid_has_every_combination_and_the_last_path_changes_fastest() -> None:
    assert points("eagle", ["a.b=1,2", "c={x: [3,4]},5"]) == [
        "eagle@a.b=1,c={x: [3,4]}",
        "eagle@a.b=1,c=5",
        "eagle@a.b=2,c={x: [3,4]}",
        "eagle@a.b=2,c=5",
    ]
    assert points("eagle@z=1", ["a=2,3,2"]) == ["eagle@z=1,a=2", "eagle@z=1,a=3"]


@pytest.mark.parametrize(
    "vary, says",
    [
        (["drafter.num_draft_tokens"], "write path=value,value"),
        (["=1,2"], "write path=value,value"),
        (["a="], "write path=value,value"),
        (["a=1"], "from 2 to 256 points, not 1"),
        (["a=1,2", "a=3"], "a varies already"),
        (["a=" + ",".join(map(str, range(300)))], "not 300"),
    ],
)
def test_what_is_no_grid_is_refused(vary: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        points("eagle", vary)


def test_letters_go_on_behind_z() -> None:
    found = [letter for letter, _ in zip(letters(), range(28), strict=False)]
    assert found[:3] == ["A", "B", "C"] and found[25:] == ["Z", "AA", "AB"]


# -- gains --------------------------------------------------------------------------------------


def a_comparison(*prompts: dict[str, tuple[int, int, int]]) -> Comparison:
    """Of prompts with (nanoseconds, tokens, rounds) of each side."""
    sides: list[Any] = [SimpleNamespace(letter=k, name=f"side {k}") for k in prompts[0]]
    rounds = []
    for number, one in enumerate(prompts):
        meters = {k: Meter(in_run=ns, tokens=n, rounds=r) for k, (ns, n, r) in one.items()}
        runs = {k: SideRun(m, {}) for k, m in meters.items()}
        rounds.append(ComparedPrompt(Prompt(str(number), "?"), runs))
    return Comparison(Status.OK, sides, [], rounds)


def test_gains_are_medians_of_ratios_within_prompts() -> None:
    slow = {"A": (1000, 10, 10), "B": (500, 10, 5)}  # twice as fast
    slower = {"A": (90_000, 10, 10), "B": (30_000, 10, 5)}  # thrice, on a machine that got busy
    other = {"A": (1000, 10, 10), "B": (1000, 20, 10)}  # twice per token
    found = a_comparison(slow, slower, other)
    gains = found.gains(found.sides[1])
    medians = {name: median(ratios) for name, ratios in gains.items()}
    assert medians == {"speedup_per_token": 2, "fewer_rounds": 2, "more_tokens_per_round": 2}
    assert max(gains["speedup_per_token"]) == pytest.approx(3) and min(gains["fewer_rounds"]) == 1
    assert len(gains["fewer_rounds"]) == 3


def test_prompts_that_a_side_has_not_answered_tell_nothing() -> None:
    found = a_comparison({"A": (1000, 10, 10), "B": (0, 0, 0)})
    assert found.gains(found.sides[1]) == {} and found.best_line() == ""


def test_the_best_is_named_with_how_surely() -> None:
    one, two = {"A": (9, 1, 1), "B": (3, 1, 1), "C": (4, 1, 1)}, {}
    two = {"A": (9, 1, 1), "B": (5, 1, 1), "C": (4, 1, 1)}
    found = a_comparison(one, one, two)
    best = "best: B side B: 3.00 x A in time per token, faster than C in 2 of 3 prompts"
    assert found.best_line() == best
    pair: Any = SimpleNamespace(other=found.sides[1])
    wrong: Any = SimpleNamespace(pair=pair, result=BranchAnswer.DIFFERENT)
    found.prompts[0].results.append(wrong)
    assert found.best_line().startswith("best: C side C: 2.25 x A")


def test_who_begins_changes_from_prompt_to_prompt(monkeypatch: Patch) -> None:
    asked: list[str] = []
    run = SideRun(Meter(), {})
    monkeypatch.setattr(compare_sides, "_answer", lambda side, *_: run)
    sides: list[Any] = [SimpleNamespace(letter=letter, name="x") for letter in "ABC"]
    prompts = [Prompt(str(number), "?") for number in range(4)]
    rounds = list(
        answer_all(sides, prompts, StopSignal(), lambda text, _: asked.append(text.split()[-3]))
    )
    assert "".join(asked) == "ABCBCACABABC"
    assert all(list(one.runs) == ["A", "B", "C"] for one in rounds)


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def performed(monkeypatch: Patch) -> Iterator[list[str]]:
    asked: list[str] = []
    perform = compare_sides.perform

    def watched(session: Any, prompts: Any, **more: Any) -> Any:
        asked.extend(prompt.text for prompt in prompts if "max_rounds" not in more)
        return perform(session, prompts, **more)

    monkeypatch.setattr(compare_sides, "perform", watched)
    yield asked


def test_a_sweep_shows_each_cost_and_the_best(options: RunOptions, capsys: Output) -> None:
    assert sweep_command("bim_eagle@drafter.draft_depth=3", GRID, options) == Code.OK
    out, _ = capsys.readouterr()
    assert "D and A: 4 of 4 branches equal" in out and "time per token" in out
    assert "drafter.num_draft_tokens=6" in settings_column(out) and "batching" in out
    assert "What is a lake?" not in out, "a line for each point, not for each prompt"
    assert out.splitlines()[-1].startswith("best: ") and "of 2 prompts" in out


def test_an_interrupted_sweep_goes_on_where_it_was(
    options: RunOptions, performed: list[str], capsys: Output, monkeypatch: Patch
) -> None:
    advance = Run.advance

    def interrupted(run: Run) -> None:
        advance(run)
        if performed.count("What is a lake?") == 2 and run.steps == 4:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "advance", interrupted)
        assert sweep_command("bim_eagle", GRID[:1], options, Path("swept")) == Code.INTERRUPTED
    assert "goes on from there" in capsys.readouterr().err
    assert json.loads(Path("swept/result.json").read_text())["status"] == "interrupted"
    assert sorted(p.name for p in Path("swept").glob("round*")) == ["round-0001.json"]

    performed.clear()
    assert sweep_command("bim_eagle", GRID[:1], options, Path("swept")) == Code.OK
    assert performed == ["What is a lake?"] * 2, "the other prompt was kept"
    capsys.readouterr()
    performed.clear()
    more = replace(options, as_json=True)
    assert sweep_command("bim_eagle", GRID[:1], more, Path("swept")) == Code.OK
    assert performed == []
    made = json.loads(capsys.readouterr().out)
    assert made["best"].startswith("best: ") and len(made["prompts"]) == 2
    assert made["equality"][0]["equal"] == made["equality"][0]["branches"] == 4
    kept = json.loads(Path("swept/result.json").read_text())
    assert kept["prompts"] == made["prompts"] and kept["table"] == made["table"]


def test_the_folder_has_tables_and_what_reproduces_them(options: RunOptions) -> None:
    argv = ("/somewhere/specsot", "compare", "bim_plain", "bim_eagle", "--out", "kept")
    own = replace(options, argv=argv)
    pair = ("bim_plain", "bim_eagle@drafter.num_draft_tokens=6")
    assert compare_command(pair, own, Path("kept")) == Code.OK
    page, rows = Path("kept/table.md").read_text(), Path("kept/table.csv").read_text()
    table = list(csv.DictReader(StringIO(rows)))
    assert [row["graph"] for row in table] == ["bim_plain", "bim_eagle"]
    assert [row["drafter.num_draft_tokens"] for row in table] == ["", "6"]
    assert float(table[0]["speedup_per_token"]) == 1.0 and table[1]["equal"] == "4/4 =A"
    assert page.startswith("# specsot compare\n") and "| B | bim_eagle | 6 | 4/4 =A |" in page
    assert "B and A: 4 of 4 branches equal" in page and "- torch: " in page
    setup = json.loads(Path("kept/setup.json").read_text())
    assert setup["command"] == "specsot compare bim_plain bim_eagle --out kept"
    assert {"graphs", "prompts", "versions", "machine"} < setup.keys()
    assert {"graph_hash", "model_hash", "drafter_hash"} < setup["graphs"]["B"].keys()
    assert json.loads(Path("kept/result.json").read_text())["setup"] == setup


def test_a_folder_of_another_comparison_is_refused_and_a_damaged_round_made_again(
    options: RunOptions, performed: list[str], capsys: Output
) -> None:
    pair = ("bim_plain", "bim_eagle")
    assert compare_command(pair, options, Path("kept")) == Code.OK
    (Path("kept") / "round-0002.json").write_text('{"runs": {')
    performed.clear()
    assert compare_command(pair, options, Path("kept")) == Code.OK
    assert performed == ["What is a lake?"] * 2
    capsys.readouterr()
    assert compare_command(pair, replace(options, seed=3), Path("kept")) == Code.USAGE
    assert "kept: holds a comparison with other graphs: name another" in capsys.readouterr().err
    Path("file").write_text("")
    assert compare_command(pair, options, Path("file")) == Code.USAGE
    assert "file: no folder can be made there" in capsys.readouterr().err


class Full(StringIO):
    """A stream whose disk is full."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disks_lose_no_table(options: RunOptions, capsys: Output, monkeypatch: Patch) -> None:
    pair = ("bim_plain", "bim_eagle")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full())
        assert compare_command(pair, options, Path("kept")) == Code.FAILED
        err = capsys.readouterr().err
        assert "No space left on device; the result is in kept" in err and "Equality" not in err
        assert compare_command(pair, options) == Code.FAILED
        err = capsys.readouterr().err
        assert "the result follows here" in err and "B and A: 4 of 4 branches equal" in err

    def full(file: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_whole", full)
    assert compare_command(pair, options, Path("other")) == Code.FAILED
    out, err = capsys.readouterr()
    assert "B and A: 4 of 4 branches equal" in out
    assert "other/table.csv: No space left on device" in err
