"""Workers of a Ray cluster killed at random moments: SPECSOT_KILLS runs of them, identical answers.

Reports how long it took until what the lost worker had was in other hands."""

import os
import random
import signal
from collections.abc import Callable
from itertools import count
from statistics import median

import pytest
from helpers.clusters import (
    BEES,
    CAMPING,
    alone,
    before_regroup,
    branches_given,
    mid_branch,
    outline_begun,
    session_of,
)
from helpers.ray_clusters import BUDGET, GRAPH, SAMPLED, disturbed, ray_cluster
from helpers.support import SEED

from specsot.engine.workers.director import Director
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run

KILLS = int(os.environ.get("SPECSOT_KILLS", "50"))
MOMENTS = {
    "outline": outline_begun,
    "prefill": branches_given,
    "regroup": before_regroup,
    "collective": before_regroup,
    "branch": mid_branch,
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
    session = session_of(GRAPH, *SAMPLED, budget=BUDGET)
    prompts = [BEES, CAMPING]
    expected = alone(session, prompts)

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
