"""Workers of a Ray cluster killed at random moments: SPECSOT_KILLS runs of them, identical answers.
Reports how long it took until what the lost worker had was in other hands.

SPECSOT_PAIRS pairs of runs at once on one cluster, and runs that get Ctrl-C while they wait."""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from time import monotonic, sleep

import pytest
from helpers import clusters
from helpers.commands import ended
from helpers.ray_clusters import BUDGET, GRAPH, SAMPLED, disturbed, ray_cluster
from helpers.support import SEED

from specsot.engine.workers.director import Director
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run

KILLS = int(os.environ.get("SPECSOT_KILLS", "50"))
PAIRS = int(os.environ.get("SPECSOT_PAIRS", "20"))
MOMENTS = {
    "outline": clusters.outline_begun,
    "prefill": clusters.branches_given,
    "regroup": clusters.before_regroup,
    "collective": clusters.before_regroup,
    "branch": clusters.mid_branch,
    "any": lambda director, run: run.steps > 1,
}
REGROUP = 0.012  # seconds that a regroup takes about, its orders included


def at_random(part: str, dice: random.Random) -> Callable[[Director, Run], bool]:
    """Holds at a random time within a part of the run; of a short part at its first."""
    times = count(1 if part in ("prefill", "regroup", "collective") else dice.randrange(1, 6), -1)
    return lambda director, run: MOMENTS[part](director, run) and next(times) <= 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lost_workers_change_nothing(number: signal.Signals, report: Callable[[str], None]) -> None:
    dice = random.Random(SEED)
    session = clusters.session_of(GRAPH, *SAMPLED, budget=BUDGET)
    prompts = [clusters.BEES, clusters.CAMPING]
    expected = clusters.alone(session, prompts)

    def any_worker(director: Director) -> RunWorker:
        return dice.choice(director.workers.ready)

    runs = KILLS if number is signal.SIGKILL else max(KILLS // 10, 1)
    seconds: dict[str, list[float]] = {part: [] for part in MOMENTS}
    losses = broken = 0
    with ray_cluster() as source:
        for run in range(runs):
            part = [*MOMENTS][run % len(MOMENTS)]
            delay = dice.uniform(0, REGROUP) if part == "collective" else 0.0
            when = at_random(part, dice)
            ran, took = disturbed(source, session, prompts, when, any_worker, number, delay)
            assert ran.digest == expected, f"run {run}, {part}, seed {SEED}"
            losses += ran.director.workers.losses
            broken += ran.director.figures["failed"]
            if took:
                seconds[part].append(took)
    for part, times in seconds.items():
        if times:
            shown = f"median {median(times):.2f} s, at most {max(times):.2f} s"
            report(f"{part}: {len(times)} recoveries, {shown}")
    what = f"{losses} workers lost, {broken} collectives broken"
    report(f"{runs} runs, {what}, {runs} identical answers")
    assert losses >= runs * 3 // 4


QUESTION = ("run", GRAPH, "Tell me about honey bees.", "--max-new-tokens", "16")


@contextmanager
def standing(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a cluster of another graph, with two processors, and the environment of its
    users."""
    more = {"SPECSOT_CLUSTER_FILE": str(folder / "cluster.json"), "SPECSOT_THREADS": "1"}
    up = ended(("cluster", "up", "bim_dflash", "--workers", "2"), folder, more)
    try:
        yield up.stdout.strip(), more
    finally:
        ended(("cluster", "down"), folder, more)


def begun(words: tuple[str, ...], folder: Path, more: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "specsot", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | more, stdout=pipe, stderr=pipe, text=True
    )


def digest_of(told: str) -> str:
    return re.findall(r"^digest (\w+)$", told, re.M)[0]


def test_pairs_of_runs_take_turns(tmp_path: Path, report: Callable[[str], None]) -> None:
    dice = random.Random(SEED)
    waited = 0
    seconds = list[float]()
    with standing(tmp_path) as (address, more):
        expected = digest_of(ended(QUESTION, tmp_path, more).stderr)
        words = (*QUESTION, "--workers", "2", "--cluster", address)
        for _ in range(PAIRS):
            begin = monotonic()
            first = begun(words, tmp_path, more)
            sleep(dice.uniform(0, 3))
            pair = (first, begun(words, tmp_path, more))
            told = [one.communicate(timeout=240)[1] for one in pair]
            assert [one.returncode for one in pair] == [0, 0], told
            assert {digest_of(text) for text in told} == {expected}
            waited += sum("waiting for the cluster" in text for text in told)
            seconds.append(monotonic() - begin)
    shown = f"median {median(seconds):.0f} s, at most {max(seconds):.0f} s"
    report(f"{PAIRS} pairs, {waited} runs waited, {2 * PAIRS} identical answers; a pair: {shown}")


def test_ctrl_c_ends_a_run_that_waits_or_starts_workers(
    tmp_path: Path, report: Callable[[str], None]
) -> None:
    (tmp_path / "specsot.yaml").write_text("cluster: {wait: 3}\n")
    with standing(tmp_path) as (address, more):
        words = (*QUESTION, "--workers", "2", "--cluster", address)
        for delay in (4.0, 6.0, 8.0):
            run = begun(words, tmp_path, more)
            sleep(delay)
            sent = monotonic()
            run.send_signal(signal.SIGINT)
            told = run.communicate(timeout=60)[1]
            report(f"Ctrl-C after {delay:g} s: ended after {monotonic() - sent:.1f} s")
            assert run.returncode == 130 and "fault" not in told, told
            assert monotonic() - sent < 10
        holder = begun((*words, "--max-new-tokens", "512"), tmp_path, more)
        late = begun(words, tmp_path, more)
        told = [one.communicate(timeout=120)[1] for one in (holder, late)]
        assert sorted((holder.returncode, late.returncode)) == [0, 1], told
        loser = told[0] if holder.returncode else told[1]
        assert "is in use: this run needs 2 CPU (0 of 2 free), not free within 3 s" in loser
