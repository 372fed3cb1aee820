"""A fleet on a Ray cluster: what `specsot serve --workers N` starts, and ends again."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ...cluster.on_workers import divided
from ...cluster.ray_environment import set_up_ray
from ...cluster.standing import end, start_head
from ...prepare.cluster_block import LOCAL, ClusterBlock
from ...prepare.job import Job
from ..wire.protocol import Start
from .control import Control
from .fleet import Fleet
from .members import Berth
from .reception import Reception


@contextmanager
def opened_fleet(jobs: Sequence[Job], start: Start, block: ClusterBlock) -> Iterator[Fleet]:
    """As many replicas as the block says, on the cluster that it names, or on one that is started
    on this machine and ends with them.

    Args:
        jobs: of the graphs that are served. start: what a server's only engine would be told.

    Raises:
        UsageError: Ray is not installed, or another fleet is told at this place.
        ClusterError: there is no such cluster, or one is up here.
    """
    set_up_ray(block.address)
    names = ", ".join(one.program.graph.name for one in jobs)
    with _cluster(block, names) as address, _connected(address) as caller:
        reception = Reception(block.interface)
        berths = _berths(jobs[0], start, block, reception, caller)
        fleet = Fleet(berths, block.workers, block.deadline)
        fleet.beside += [reception, Control(fleet, address)]
        try:
            yield fleet
        finally:  # one more signal must not leave a cluster behind; what is left takes seconds
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)


@contextmanager
def _cluster(block: ClusterBlock, graphs: str) -> Iterator[str]:
    """The address of the cluster; one that is started here ends."""
    if block.address != LOCAL:
        yield block.address
        return
    head = start_head(block.workers, graphs)
    try:
        set_up_ray(head.address)
        yield head.address
    finally:
        end(head)


@contextmanager
def _connected(address: str) -> Iterator[ThreadPoolExecutor]:
    """The thread that calls Ray, as long as this process is a driver there."""
    from ...cluster.ray_connection import connect, disconnect

    connect(address)
    try:
        with ThreadPoolExecutor(1) as caller:
            yield caller
    finally:
        disconnect()


def _berths(
    job: Job,
    start: Start,
    block: ClusterBlock,
    reception: Reception,
    caller: ThreadPoolExecutor,
) -> Callable[[int], Berth]:
    """What replicas are started with: their share of the machine's threads, and a device each."""
    from .ray_host import RayHost

    alone = replace(job, options=replace(job.options, workers=block.workers))
    options: Mapping[str, Any] = {**start.options, "threads": divided(alone).options.threads}

    def berth(number: int) -> Berth:
        device = block.devices[number % len(block.devices)] if block.devices else None
        own = {**options, "device": device} if device else options
        gpus = int(str(own["device"]).startswith("cuda"))
        return Berth(Start(start.graphs, own), RayHost(reception, caller, gpus))

    return berth
