"""What `specsot serve` and `specsot run --workers` start: checked jobs, workers and their users.

Ray and torch are imported only by the functions that need them.
"""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from ..limits import usable_cpus
from ..prepare.cluster_block import LOCAL, ClusterBlock
from ..prepare.environment import threads_of
from ..prepare.job import Job
from .control import ReplicaControl
from .link import ProcessHost, WorkerListener, WorkerSpec
from .membership import WorkerSource
from .protocol import Start
from .ray_cluster import end_cluster, ray_driver, set_up_ray, start_head
from .router import Router


def divided(job: Job) -> Job:
    """The job with the threads of one of its workers: those of the machine, divided."""
    workers = job.options.workers or 1
    options = job.options
    threads = max((options.threads or usable_cpus()) // workers, 1)
    if options.threads is None:
        threads = min(threads, threads_of(job))
    return replace(job, options=replace(options, threads=threads))


# -- a server -------------------------------------------------------------------------------------


def engine_router(start: Start) -> Router:
    """One engine in a child process."""
    return Router(WorkerSource(lambda number, part: WorkerSpec(start, ProcessHost())), single=True)


@contextmanager
def replica_router(jobs: Sequence[Job], start: Start, block: ClusterBlock) -> Iterator[Router]:
    """Replicas on the cluster that the block names, or on one that is started on this machine and
    ends with them.

    Args:
        jobs: of the served graphs. start: first message of a server's only engine.

    Raises:
        UsageError: Ray is not installed, or another server with --workers runs here.
        ClusterError: there is no such cluster, or one is up here.
    """
    set_up_ray(block.address)
    with ExitStack() as stack:
        address = block.address
        if address == LOCAL:
            names = ", ".join(job.program.graph.name for job in jobs)
            head = start_head(block.workers, names)
            stack.callback(end_cluster, head)
            address = head.address
            set_up_ray(address)
        stack.enter_context(ray_driver(address))
        caller = stack.enter_context(ThreadPoolExecutor(1))
        listener = WorkerListener(block.interface)
        spec = _replica_spec(jobs[0], start, block, listener, caller)
        router = Router(WorkerSource(spec, services=[listener]), block.workers, block.deadline)
        router.services.append(ReplicaControl(router, address))
        # Another signal must not leave a cluster behind; what remains takes seconds.
        stack.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        yield router


def _replica_spec(
    job: Job,
    start: Start,
    block: ClusterBlock,
    listener: WorkerListener,
    caller: ThreadPoolExecutor,
) -> Callable[[int, int], WorkerSpec]:
    """What replicas are started with: their share of the machine's threads, and a device each."""
    from .ray_workers import RayHost

    shared = replace(job, options=replace(job.options, workers=block.workers))
    options: Mapping[str, Any] = {**start.options, "threads": divided(shared).options.threads}

    def spec(number: int, part: int) -> WorkerSpec:
        device = block.devices[number % len(block.devices)] if block.devices else None
        own_options = {**options, "device": device} if device else options
        gpus = int(str(own_options["device"]).startswith("cuda"))
        host = RayHost(listener, caller, gpus=gpus)
        return WorkerSpec(Start(start.graphs, own_options), host)

    return spec
