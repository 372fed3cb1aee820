"""Runs that get a signal at a random moment, from the first import to the exit of the program: no
signal is swallowed, no finished answer is lost, and each run can be resumed to the digest of a run
that was never stopped. By name: pytest tests/full/test_killed_runs.py; about 12 minutes."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep

import pytest
from helpers.support import SEED

from specsot.engine.cli.run_command import run_command
from specsot.engine.prepare.options import RunOptions

RUNS = int(os.environ.get("SPECSOT_TEST_KILLS", "60"))
PROMPTS = 32
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
LIMIT = 90.0  # seconds until a program that got a signal must have ended
WORDS = ["run", "autoregressive", "--prompts", "many.txt", "--max-new-tokens", "16", "--no-tui"]


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run that got a signal. announced: answers that stderr names as finished; before: at the
    moment of the signal. late: seconds from the signal to the end."""

    code: int
    announced: frozenset[str]
    before: int
    late: float
    folder: Path | None


def announced(errors: Path) -> frozenset[str]:
    lines = errors.read_text().splitlines()
    return frozenset(line.split("[")[1].split("]")[0] for line in lines if "] 1. answer: " in line)


def stopped(folder: Path, number: signal.Signals, moment: float, *, begun: bool = False) -> Stopped:
    """A run in a folder of its own, with a signal so many seconds after the start of the program,
    or of its decoding (`begun`)."""
    folder.mkdir()
    questions = [f"What is {n} and {n}?\n" for n in range(PROMPTS)]
    (folder / "many.txt").write_text("".join(questions))
    errors = folder / "err.txt"
    with (folder / "out.txt").open("w") as out, errors.open("w") as err:
        program = subprocess.Popen(
            [sys.executable, "-m", "specsot", *WORDS, "--threads", "1"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            # A shell's background job starts with Ctrl-C ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while begun and program.poll() is None and not [*folder.glob("runs/2*/run.yaml")]:
            sleep(0.01)
        until = monotonic() + moment
        while monotonic() < until and program.poll() is None:
            sleep(0.01)
        before = len(announced(errors))
        program.send_signal(number)
        start = monotonic()
        try:
            code = program.wait(LIMIT)
        except subprocess.TimeoutExpired:
            program.kill()
            code = program.wait()
        late = monotonic() - start
    made = [*folder.glob("runs/2*/manifest.json")]
    run = made[0].parent if made else None
    return Stopped(code, announced(errors), before, late, run)


def saved(folder: Path | None) -> set[str]:
    """Keys of the finished answers in a run folder; the last line of a killed run can be cut."""
    file = None if folder is None else folder / "outputs.jsonl"
    if file is None or not file.exists():
        return set()
    lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    return {line["id"] for line in lines if not line.get("unfinished")}


def manifest_of(folder: Path) -> dict[str, str]:
    manifest: dict[str, str] = json.loads((folder / "manifest.json").read_text())
    return manifest


def test_signals_at_random_moments(
    tmp_path: Path, report: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = monotonic()
    whole = stopped(tmp_path / "whole", signal.SIGTERM, 1000.0)
    seconds = monotonic() - start
    assert whole.code == 0 and whole.folder is not None and len(whole.announced) == PROMPTS
    digest = manifest_of(whole.folder)["digest"]
    metrics = json.loads((whole.folder / "metrics.json").read_text())
    decoding = float(metrics["seconds"]["total"])
    draw = Random(SEED)
    tally: Counter[str] = Counter()
    wrong = []
    for at in range(RUNS):
        number = SIGNALS[at % len(SIGNALS)]
        begun = at % 2 == 1
        moment = draw.uniform(0.0, 1.05 * decoding if begun else seconds - decoding)
        one = stopped(tmp_path / f"{at}", number, moment, begun=begun)
        complete = one.code == 0 and len(one.announced) == PROMPTS
        swallowed = number != signal.SIGKILL and one.code == 0 and one.before < PROMPTS
        lost = one.announced - saved(one.folder)
        when = f"{moment:.2f} s after the {'run' if begun else 'program'} began"
        words = [f"{at}: {number.name} {when}: code {one.code} after {one.late:.1f} s"]
        words.append(f"{len(one.announced)} finished, {len(lost)} lost")
        tally[number.name] += 1
        tally["answers that were finished"] += len(one.announced)
        tally["answers lost"] += len(lost)
        tally["swallowed"] += swallowed
        tally["too late"] += complete and not swallowed
        good = not lost and not swallowed and (complete or one.code == CODES[number])
        if one.folder is None:
            tally["ended before there was a run folder"] += 1
            good = good and not one.announced
        elif not complete:
            monkeypatch.chdir(one.folder.parents[1])
            run_command(RunOptions(resume=one.folder, quiet=True, as_json=True, threads=1))
            reached = manifest_of(one.folder).get("digest") == digest
            tally["resumed to the same digest"] += reached
            words.append("resumed" if reached else "NOT RESUMED")
            good = good and reached
        report(", ".join(words) + ("" if good else "  <- wrong"))
        wrong += [] if good else [at]
    report(
        f"{RUNS} runs of {seconds:.1f} s, {decoding:.1f} s of them decoding: "
        + ", ".join(f"{n} {k}" for k, n in tally.items())
    )
    assert not wrong
