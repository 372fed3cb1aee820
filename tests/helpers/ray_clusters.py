"""A Ray cluster of this machine for several runs, and its workers killed or stopped by signals."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep

import pytest

from helpers.clusters import Chaos, Ran, on_workers
from specsot.engine.cluster.director import Director
from specsot.engine.cluster.membership import ClusterMember
from specsot.engine.cluster.ray_environment import set_up_ray
from specsot.engine.prepare.cluster_block import LOCAL, ClusterBlock
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import Job, prepare
from specsot.engine.prepare.options import RunOptions
from specsot.engine.run.session import Session
from specsot.states.machine import Run

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)
set_up_ray(LOCAL)

from specsot.engine.cluster.ray_workers import RayLauncher  # noqa: E402  (reads the environment)

GRAPH, BUDGET, DEADLINE = "bim_eagle", 40, 4.0
SAMPLED = ("sampling.temperature=0.8",)


class Staying(RayLauncher):
    """Its workers are there for the next run too; `whole` ends them."""

    def close(self) -> None:
        self.release()

    def whole(self) -> None:
        super().close()


def job() -> Job:
    return prepare(RunOptions(GRAPH, sets=SAMPLED, threads=1, max_new_tokens=BUDGET))


@contextmanager
def ray_cluster(workers: int = 2) -> Iterator[Staying]:
    launcher = Staying(job(), ClusterBlock(workers=workers, deadline=DEADLINE))
    try:
        yield launcher
    finally:
        launcher.whole()


def pid_of(member: ClusterMember) -> int:
    assert member.loaded is not None
    return member.loaded.pid


def by_signal(number: signal.Signals) -> Callable[[ClusterMember], None]:
    """Sends it to the process of a worker."""
    return lambda member: os.kill(pid_of(member), number)


def disturbed(
    launcher: Staying,
    session: Session,
    prompts: list[Prompt],
    when: Callable[[Director, Run], bool],
    whom: Callable[[Director], ClusterMember],
    number: signal.Signals = signal.SIGKILL,
) -> tuple[Ran, float]:
    """A run of which a worker gets a signal once, and seconds from then until what it had was in
    other hands (0 where it had nothing)."""
    sent, again = list[float](), list[float]()

    def strike(member: ClusterMember) -> None:
        sent.append(monotonic())
        by_signal(number)(member)

    def watch(director: Director, run: Run) -> None:
        if director.membership.losses and run.state in ("parallel", "skeleton"):
            again.append(monotonic())

    chaos = Chaos(when, whom, strike, watch=watch)
    ran = on_workers(session, prompts, launcher=launcher, chaos=chaos, deadline=DEADLINE)
    return ran, again[0] - sent[0] if again else 0.0


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether all of these processes end in time."""
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
