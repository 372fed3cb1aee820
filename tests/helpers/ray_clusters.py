"""A Ray cluster of this machine for several runs, and its workers killed or stopped by signals."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from time import monotonic, sleep

import pytest

from helpers.clusters import Chaos, Ran, on_workers
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import prepare
from specsot.engine.prepare.options import LOCAL, ClusterBlock, GroupSize, RunOptions
from specsot.engine.run.session import Session
from specsot.engine.workers.director import Director
from specsot.engine.workers.link import WorkerSource
from specsot.engine.workers.ray_workers import job_workers, set_up_ray
from specsot.engine.workers.worker_groups import RunWorker
from specsot.states.machine import Run

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)
set_up_ray(LOCAL)

GRAPH, BUDGET, DEADLINE = "bim_eagle", 40, 4.0
SAMPLED = ("sampling.temperature=0.8",)


def ray_cluster(together: int = 1, branches: int = 1) -> AbstractContextManager[WorkerSource]:
    """Two workers for several runs, of which so many may write an outline together, and so many a
    branch."""
    sizes = {"skeleton": GroupSize(tp=together), "branches": GroupSize(tp=branches)}
    job = prepare(RunOptions(GRAPH, sets=SAMPLED, threads=1, max_new_tokens=BUDGET))
    return job_workers(job, ClusterBlock(**sizes, deadline=DEADLINE), detached=True)


def disturbed(
    source: WorkerSource,
    session: Session,
    prompts: list[Prompt],
    when: Callable[[Director, Run], bool],
    whom: Callable[[Director], RunWorker],
    number: signal.Signals = signal.SIGKILL,
    delay: float = 0.0,
    **sizes: int,
) -> tuple[Ran, float]:
    """A run of which a worker gets a signal once, so many seconds (delay) after `when` holds; and
    seconds from then until what it had was in other hands (0 where it had nothing). sizes: as for
    `on_workers`."""
    sent, again = list[float](), list[float]()

    def strike(member: RunWorker) -> None:
        sent.append(monotonic())
        with suppress(ProcessLookupError):  # the run may be over by now
            os.kill(member.greeting.pid, number)

    def watch(director: Director, run: Run) -> None:
        if sent and director.workers.losses and run.state in ("parallel", "skeleton"):
            again.append(monotonic())

    chaos = Chaos(when, whom, lambda one: Timer(delay, strike, (one,)).start(), watch=watch)
    ran = on_workers(session, prompts, source=source, chaos=chaos, deadline=DEADLINE, **sizes)
    return ran, again[0] - sent[0] if again else 0.0


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    until = monotonic() + seconds
    while any(_lives(pid) for pid in pids):
        if monotonic() > until:
            return False
        sleep(0.05)
    return True


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
