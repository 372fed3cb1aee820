"""`specsot cluster up | status | down`: workers on this machine that stay, models loaded.
`specsot cluster scale`: how many replicas a server with --workers has."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import typer

from ..errors import ClusterError
from ..prepare.job import prepare, read_cluster
from ..prepare.options import LOCAL, SESSION, OptionText, RunOptions
from ..shell import complain, put
from ..workers.ray_cluster import (
    StandingCluster,
    end_cluster,
    set_up_ray,
    standing_cluster,
    start_head,
)
from ..workers.router import ask_router
from ..workers.start import check_cluster, divided
from .options import argument, option, takes

cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
NONE = "no cluster is up on this machine: specsot cluster up starts one"
NO_SERVER = "no server with --workers runs: specsot serve GRAPH --workers N"
MODELS = tuple(name for name in ("graph", *SESSION) if name != "outline")
Workers = Annotated[
    int | None, option("How many [specsot.yaml's `cluster`].", "--workers", min=1, max=1024)
]


@cluster.command()
@takes(*MODELS, graph=OptionText("What workers run [specsot.yaml's].", argument=True))
def up(options: RunOptions, workers: Workers = None) -> None:
    """Start Ray on this machine, and workers with their models loaded."""
    worker_options = replace(options, workers=workers)
    job = prepare(worker_options)
    block = read_cluster(worker_options)
    job = divided(replace(job, options=replace(job.options, workers=block.workers)))
    check_cluster(job, block)
    set_up_ray(LOCAL)
    head = start_head(block.workers, job.options.graph)
    try:
        set_up_ray(head.address)
        from ..workers.ray_workers import load_workers

        load_workers(job, block.model_copy(update={"address": head.address}))
    except BaseException:
        end_cluster(head)
        raise
    put(f"{head.address}\n")


@cluster.command()
def status() -> None:
    """Show the cluster of this machine, its workers, and its server."""
    there = _alive()
    fleet = ask_router("state", put)
    if there is None and fleet is None:
        raise ClusterError(NONE)
    if there is not None:
        _put_workers(there, serves=fleet is not None and fleet["address"] == there.address)
    if fleet is not None:
        _put_replicas(fleet)


@cluster.command()
def scale(count: Annotated[int, argument("The number of replicas.", min=1, max=1024)]) -> None:
    """Set the number of replicas of a server with --workers."""
    fleet = ask_router("scale", lambda line: put(f"{line}\n"), count=count)
    if fleet is None:
        raise ClusterError(NONE if _alive() is None else NO_SERVER)
    _put_replicas(fleet)


@cluster.command()
def down() -> None:
    """End all processes of the cluster of this machine."""
    there = standing_cluster()
    if there is None:
        raise ClusterError(NONE)
    fleet = ask_router("state", put)
    if fleet is not None and fleet["address"] == there.address:
        ask_router("end", put)
    end_cluster(there)
    complain(f"{there.address} is down")


def _alive() -> StandingCluster | None:
    there = standing_cluster()
    return there if there is not None and there.alive else None


def _put_workers(there: StandingCluster, *, serves: bool) -> None:
    """Workers for runs; of a cluster that is there for a server, only if it has some."""
    set_up_ray(there.address)
    from ..workers.ray_workers import worker_states

    states = [*worker_states(there.address)]
    if states or not serves:
        put(f"{there.address}: {there.graph}, {there.workers} workers\n")
    for name, state in states:
        put(f"  {name}: {state}\n")


def _put_replicas(fleet: Mapping[str, Any]) -> None:
    count = len(fleet["replicas"])
    put(f"{fleet['address']}: {', '.join(fleet['graphs'])}, {count} replicas\n")
    for replica in fleet["replicas"]:
        work = f"{replica['open']} requests, {replica['tokens']} tokens to write"
        work += f", {replica['written']} written"
        again = f", started again {replica['restarts']} times" if replica["restarts"] else ""
        put(f"  {replica['name']}: {replica['state']}, {work}{again}\n")
