"""Workers of a Ray cluster killed at random moments: SPECSOT_KILLS runs of them, identical answers.

Reports how long it took until what the lost worker had was in other hands.
"""

import os
import random
import signal
from collections.abc import Callable
from statistics import median

import pytest
from helpers.clusters import BEES, CAMPING, alone, session_of
from helpers.ray_clusters import BUDGET, GRAPH, SAMPLED, disturbed, ray_cluster
from helpers.support import SEED

from specsot.engine.workers.director import Director
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run

KILLS = int(os.environ.get("SPECSOT_KILLS", "50"))
MOMENTS = ("outline", "prefill", "regroup", "collective", "branch", "any")
REGROUP = 0.012  # seconds that a regroup takes about, its orders included


class Moment:
    """Holds once, at a random time within a part of the run."""

    def __init__(self, part: str, dice: random.Random) -> None:
        self.part, self.left = part, dice.randrange(1, 6)

    def __call__(self, director: Director, run: Run) -> bool:
        if self._within(director, run):
            self.left -= 1
        return self.left <= 0

    def _within(self, director: Director, run: Run) -> bool:
        roots = [one.request.root for one in director.states]
        branches = [b for one in director.states for b in one.request.branches]
        if self.part == "outline":
            return any(root is not None and root.tokens and not root.ended for root in roots)
        if self.part in ("regroup", "collective"):
            self.left = min(self.left, 1)
            return run.state == "parse"
        if self.part == "prefill":
            self.left = min(self.left, 1)
            return run.state == "parallel"
        if self.part == "branch":
            return any(b.tokens and not b.ended for b in branches)
        return run.steps > 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lost_workers_change_nothing(number: signal.Signals, report: Callable[[str], None]) -> None:
    dice = random.Random(SEED)
    session = session_of(GRAPH, *SAMPLED, budget=BUDGET)
    prompts = [BEES, CAMPING]
    expected = alone(session, prompts)
    runs = KILLS if number is signal.SIGKILL else max(KILLS // 10, 1)
    seconds: dict[str, list[float]] = {part: [] for part in MOMENTS}
    losses = broken = 0
    with ray_cluster() as hosts:
        for run in range(runs):
            part = MOMENTS[run % len(MOMENTS)]

            def anybody(director: Director) -> RunWorker:
                return dice.choice(director.workers.ready)

            delay = dice.uniform(0, REGROUP) if part == "collective" else 0.0
            when = Moment(part, dice)
            ran, took = disturbed(hosts, session, prompts, when, anybody, number, delay)
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
