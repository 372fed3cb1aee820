"""`specsot run --workers N`: the same run, decoded by workers. Imports Ray only when it must."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..prepare.cluster_block import ClusterBlock
from ..prepare.job import Job, read_cluster
from ..workers.ray_cluster import set_up_ray

if TYPE_CHECKING:
    from ..run.session import Session
    from .run import DirectedRun

ALONE = {"step": "--step", "breaks": "--break", "trace": "--trace", "slow": "--slow"}
ALONE |= {"explain_rounds": "--explain-rounds", "probe_blend": "--probe-blend"}


def check(job: Job) -> None:
    """Raise UsageError for what only one machine does."""
    options = job.options
    graph = job.program.graph
    for name, flag in ALONE.items():
        if getattr(options, name):
            raise UsageError(f"{flag} looks into one engine: not with --workers")
    merges = graph.skeleton is not None and graph.skeleton.merge != "concat"
    alone = {"beam": graph.beam is not None, "blend": graph.blend is not None}
    alone["skeleton.merge"] = merges
    if why := [name for name, there in alone.items() if there]:
        raise UsageError(f"--workers: graph {graph.name!r} has {why[0]}, which one engine does")


def check_groups(job: Job, block: ClusterBlock) -> None:
    """Raise UsageError for workers that cannot compute together as the block says."""
    skeleton = block.skeleton.tp
    branches = block.branches.tp
    if block.together == 1:
        return
    if block.together > block.workers:
        name = "skeleton" if skeleton == block.together else "branches"
        raise UsageError(f"cluster.{name}.tp {block.together}: there are {block.workers} workers")
    if block.together % min(skeleton, branches):
        both = f"cluster.skeleton.tp {skeleton} and branches.tp {branches}"
        raise UsageError(f"{both}: one of them must be a multiple of the other")
    graph = job.program.graph
    outlines = None if graph.skeleton is None else graph.skeleton.drafter
    for drafter in (graph.drafter, outlines):
        if drafter is not None and drafter.chooses and getattr(drafter, "costs", None) is None:
            why = "each of them would measure what forwards cost, and decide differently"
            raise UsageError(f"cluster.*.tp: {why}: give drafter.costs, or fixed sizes")


def checked(job: Job) -> ClusterBlock:
    """Where a job's workers are; raises UsageError if it cannot be decoded there."""
    check(job)
    block = read_cluster(job.options)
    check_groups(job, block)
    set_up_ray(block.address)
    return block


@contextmanager
def on_workers(job: Job) -> Iterator[tuple["Session", "DirectedRun"]]:
    """The session of a driver, and what begins its runs, while the workers are there.

    Raises:
        UsageError: Ray is not there, or the graph is not for workers.
    """
    block = checked(job)
    from .ray_workers import RayLauncher
    from .run import directed, driver_session

    session = driver_session(job)
    launcher = RayLauncher(job, block)
    try:
        yield session, partial(directed, launcher, block)
    finally:
        launcher.close()
