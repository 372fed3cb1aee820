"""`specsot cluster up | status | down`: workers on this machine that stay, models loaded."""

from dataclasses import replace
from typing import Annotated

import typer

from ..cluster.ray_environment import set_up_ray
from ..cluster.standing import StandingCluster, end, standing, start_head
from ..errors import ClusterError
from ..prepare.cluster_block import LOCAL
from ..prepare.job import prepare, read_cluster
from ..prepare.options import SESSION, OptionText, RunOptions
from ..shell import complain, put, user_errors
from .clustered import check, divided
from .options import takes

cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
NONE = "no cluster is up on this machine: specsot cluster up starts one"
MODELS = tuple(name for name in ("graph", *SESSION) if name != "outline")
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=1024, help="How many [specsot.yaml's `cluster`]."),
]


@cluster.command("up", help="Start Ray on this machine, and workers with their models loaded.")
@takes(*MODELS, graph=OptionText("What workers run [specsot.yaml's].", argument=True))
def up(options: RunOptions, workers: Workers = None) -> None:
    """Start Ray on this machine, and workers of one graph that stay until `specsot cluster down`.

    `specsot run GRAPH --workers N --cluster ADDRESS` decodes on them; the address is printed.
    """
    with user_errors():
        asked = replace(options, workers=workers)
        job, block = prepare(asked), read_cluster(asked)
        job = divided(replace(job, options=replace(job.options, workers=block.workers)))
        check(job)
        set_up_ray(LOCAL)
        head = start_head(block.workers, job.options.graph)
        try:
            from ..cluster.ray_workers import load_workers

            load_workers(job, block.model_copy(update={"address": head.address}), head.token)
        except BaseException:
            end(head)
            raise
        put(f"{head.address}\n")


@cluster.command("status", help="The cluster of this machine, and its workers.")
def status() -> None:
    """Where the cluster of this machine is, and what its workers do. Exit code 1 if none is up."""
    with user_errors():
        there = _alive()
        set_up_ray(there.address)
        from ..cluster.ray_workers import states_of

        put(f"{there.address}: {there.graph}, {there.workers} workers\n")
        for name, state in states_of(there.address):
            put(f"  {name}: {state}\n")


@cluster.command("down", help="End the cluster of this machine, all of its processes.")
def down() -> None:
    """End the cluster of this machine with all of its processes. Exit code 1 if none is up."""
    with user_errors():
        there = standing()
        if there is None:
            raise ClusterError(NONE)
        end(there)
        complain(f"{there.address} is down")


def _alive() -> StandingCluster:
    there = standing()
    if there is None or not there.alive:
        raise ClusterError(NONE)
    return there
