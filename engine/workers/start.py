"""What `specsot serve` and `specsot run --workers` start: checked jobs, workers and their users."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..limits import usable_cpus
from ..prepare.job import Job, read_cluster, threads_of
from ..prepare.options import LOCAL, ClusterBlock, flag_of
from ..signals import ending_with, let_close
from .link import HangLimits
from .protocol import Start
from .ray_workers import end_cluster, job_workers, ray_workers, set_up_ray, start_head
from .router import Router, replica_control

if TYPE_CHECKING:
    from ..record.recorder import Recorder
    from ..run.core import EngineCore
    from ..run.session import Session

    Starts = Callable[..., tuple[EngineCore, Recorder]]  # as `recorded`


def divided(job: Job, workers: int | None = None) -> Job:
    """The job with the threads of one of its workers: those of the machine, divided."""
    options = job.options
    threads = max((options.threads or usable_cpus()) // (workers or options.workers or 1), 1)
    if options.threads is None:
        threads = min(threads, threads_of(job))
    return replace(job, options=replace(options, threads=threads))


def check_cluster(job: Job, block: ClusterBlock) -> None:
    """Raise UsageError for what only one engine does, and for groups that cannot be formed."""
    for name in ("step", "breaks", "step_delay", "explain_rounds", "probe_blend"):
        if getattr(job.options, name):
            raise UsageError(f"{flag_of(name)} looks into one engine: not with --workers")
    graph = job.program.graph
    skeleton = graph.skeleton
    blocks = {
        "beam": graph.beam is not None,
        "blend": graph.blend is not None,
        "skeleton.merge": skeleton is not None and skeleton.merge != "concat",
    }
    if names := [name for name, present in blocks.items() if present]:
        raise UsageError(f"--workers: graph {graph.name!r} has {names[0]}, which one engine does")
    if block.together == 1:
        return
    sizes = {"skeleton": block.skeleton.tp, "branches": block.branches.tp}
    if block.together > block.workers:
        name = max(sizes, key=lambda name: sizes[name])
        raise UsageError(f"cluster.{name}.tp {block.together}: there are {block.workers} workers")
    if block.together % block.parts:
        both = f"cluster.skeleton.tp {sizes['skeleton']} and branches.tp {sizes['branches']}"
        raise UsageError(f"{both}: one of them must be a multiple of the other")
    for drafter in (graph.drafter, None if skeleton is None else skeleton.drafter):
        if drafter is not None and drafter.chooses and getattr(drafter, "costs", None) is None:
            why = "each worker would measure the cost of forwards, and decide differently"
            raise UsageError(f"cluster.*.tp: {why}: give drafter.costs, or fixed sizes")


def checked_block(job: Job) -> ClusterBlock:
    """The block `cluster` of a job; raises UsageError if workers cannot decode it."""
    block = read_cluster(job.options)
    check_cluster(job, block)
    set_up_ray(block.address)
    return block


@contextmanager
def on_workers(job: Job) -> Iterator[tuple["Session", "Starts"]]:
    """The session of a director, and what starts its runs, while there are workers. Raises
    UsageError: Ray is not installed, or the graph is not for workers."""
    block = checked_block(job)
    from ..run.session import load
    from .director import directed
    from .worker_groups import WorkerGroups

    # The director decodes nothing: its models are checked, and have no weights.
    options = replace(job.options, device="meta", threads=1, no_nan_check=True)
    session = load(replace(job, options=options))
    with job_workers(job, block) as source, closing(WorkerGroups(source, block)) as workers:
        workers.load_()  # here a signal still raises
        yield session, partial(directed, workers)


@contextmanager
def replica_router(
    jobs: Sequence[Job], start: Start, block: ClusterBlock, step_limit: float
) -> Iterator[Router]:
    """Replicas on the cluster that the block names, or on one that is started on this machine and
    ends with them; each has a device, and its share of the machine's threads. jobs: of the served
    graphs. start: first message of a server's only engine. step_limit: of `HangLimits`; a replica
    that hangs is lost at once. Raises UsageError: Ray is not installed, or another server runs
    here. ClusterError: the cluster does not exist, or another one runs here."""
    set_up_ray(block.address)
    with ExitStack() as stack:
        if block.address == LOCAL:
            names = ", ".join(job.program.graph.name for job in jobs)
            head = start_head(block.workers, names, stays=False)
            stack.callback(end_cluster, head)
            stack.enter_context(ending_with(partial(end_cluster, head)))
            block = block.model_copy(update={"address": head.address})
            set_up_ray(block.address)
        options = {**start.options, "threads": divided(jobs[0], block.workers).options.threads}

        def start_of(number: int, part: int) -> Start:
            return Start(start.graphs, options | block.device_of(number))

        source = stack.enter_context(ray_workers(block, start_of))
        router = Router(source, block.workers, HangLimits(block.deadline, step_limit))
        source.services.append(replica_control(router, block.address))
        # Another signal must not leave a cluster behind; what remains takes seconds.
        stack.callback(let_close)
        yield router
