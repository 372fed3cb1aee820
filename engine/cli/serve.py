"""`specsot serve`, `view`, and `cluster up | status | scale | down`."""

import asyncio
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from ...states.yaml.source import number_of
from ..errors import ClusterError, UsageError
from ..prepare.job import prepare, prepare_graphs, read_cluster
from ..prepare.options import LOCAL, MODELS, SESSION, RunOptions, ServeOptions
from ..record.run_folder import find_run
from ..shell import complain, put
from ..workers import ray_workers
from ..workers.link import HangLimits, ProcessHost, WorkerSource
from ..workers.router import Router, ask_router
from ..workers.start import check_cluster, divided, replica_router
from .options import RUN, RUNS_DIR, argument, graph_argument, option, takes

GRAPHS = "Shipped graphs or graph files [specsot.yaml's]; a request's `model` picks one."
PACKAGES = ("fastapi", "h11", "sse_starlette", "uvicorn")
LACKS = "the server needs more packages: pip install 'specsot[serve]'"
WORKERS = "Replicas on a Ray cluster; without it one engine, and no Ray."
PLACE = "HOST:PORT of a Ray cluster that runs [one is started here]."


@takes(*MODELS, workers=WORKERS, cluster=PLACE)
def serve(
    options: RunOptions,
    server: ServeOptions,
    graphs: list[str] | None = graph_argument(GRAPHS, metavar="[GRAPH...]"),
) -> int:
    """Serve graphs over one target: OpenAI's API, metrics, and a page that shows the decoding.

    Examples: `specsot serve`, `specsot serve bim_dflash dflash autoregressive --port 8001`,
    `specsot serve bim_eagle --profile smollm2`. SIGTERM lets open requests end; docs/serving.md."""
    _check_packages()
    from ..serve.server import serve as run
    from ..workers.protocol import Start

    server.check()
    names = graphs or []
    jobs = prepare_graphs(names, options)
    start = Start(names, plain_options(options))
    if options.workers is None and options.cluster is None:
        limits = HangLimits(server.hang, server.step_limit, server.kill_after)
        source = WorkerSource(lambda number, part: ProcessHost(start))
        return asyncio.run(run(Router(source, limits=limits, single=True), server))
    with replica_router(jobs, start, read_cluster(options), server.step_limit) as router:
        return asyncio.run(run(router, server))


def _check_packages() -> None:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UsageError(f"{LACKS} ({missing[0]})")


def plain_options(options: RunOptions) -> dict[str, Any]:
    """The options that decide on models, as JSON can say them."""
    values = {name: getattr(options, name) for name in SESSION}
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def view(
    run: str = RUN,
    host: str = option("Address.", default="127.0.0.1"),
    port: int = option("0: any free one.", default=8001, min=0, max=65535),
    runs_dir: Path = RUNS_DIR,
) -> int:
    """Show a recorded run in the browser: its branches, states and memory.

    Examples: `specsot view`, `specsot view latest --port 8080`. Nothing is decoded again."""
    _check_packages()
    from ..serve.server import view as show

    options = ServeOptions(host=host, port=port)
    options.check()
    return asyncio.run(show(find_run(run.removeprefix("runs/"), runs_dir), options))


cluster = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
NONE = "no cluster is up on this machine: specsot cluster up starts one"
NO_SERVER = "no server with --workers runs: specsot serve GRAPH --workers N"


@cluster.command()
@takes("graph", *MODELS)
def up(
    options: RunOptions,
    workers: int | None = option(
        "How many [specsot.yaml's `cluster`].", "--workers", min=1, max=1024
    ),
) -> None:
    """Start Ray on this machine, and workers with their models loaded."""
    options = replace(options, workers=workers)
    job = prepare(options)
    block = read_cluster(options)
    job = divided(job, block.workers)
    check_cluster(job, block)
    ray_workers.set_up_ray(LOCAL)
    head = ray_workers.start_head(block.workers, job.options.graph)
    with ray_workers.ending_cluster(head):
        ray_workers.set_up_ray(head.address)
        block = block.model_copy(update={"address": head.address})
        from ..workers.worker_groups import WorkerGroups  # imports torch

        with (
            ray_workers.job_workers(job, block, detached=True) as source,
            closing(WorkerGroups(source, block)) as groups,
        ):
            groups.load_()
    put(f"{head.address}\n")


@cluster.command()
def status() -> None:
    """Show the cluster of this machine, its workers, and its server."""
    there = ray_workers.standing_cluster()
    if there is not None and not there.alive:
        there = None
    fleet = ask_router("state", put)
    if there is None and fleet is None:
        raise ClusterError(NONE)
    if there is not None:
        ray_workers.set_up_ray(there.address)
        states = [*ray_workers.worker_states(there.address)]
        # A cluster that is there for a server has workers of its own only after `up`.
        if states or fleet is None or fleet["address"] != there.address:
            put(f"{there.address}: {there.graph}, {number_of(there.workers, 'worker')}\n")
        for name, state in states:
            put(f"  {name}: {state}\n")
    if fleet is not None:
        _put_replicas(fleet)


@cluster.command()
def scale(count: int = argument("The number of replicas.", ..., min=1, max=1024)) -> None:
    """Set the number of replicas of a server with --workers."""
    fleet = ask_router("scale", lambda line: put(f"{line}\n"), count=count)
    if fleet is None:
        there = ray_workers.standing_cluster()
        raise ClusterError(NO_SERVER if there is not None and there.alive else NONE)
    _put_replicas(fleet)


@cluster.command()
def down() -> None:
    """End all processes of the cluster of this machine."""
    there = ray_workers.standing_cluster()
    if there is None:
        raise ClusterError(NONE)
    fleet = ask_router("state", put)
    if fleet is not None and fleet["address"] == there.address:
        ask_router("end", put)
    ray_workers.end_cluster(there)
    complain(f"{there.address} is down")


def _put_replicas(fleet: Mapping[str, Any]) -> None:
    replicas = number_of(len(fleet["replicas"]), "replica")
    put(f"{fleet['address']}: {', '.join(fleet['graphs'])}, {replicas}\n")
    for replica in fleet["replicas"]:
        work = f"{number_of(replica['open'], 'request')}, "
        work += f"{number_of(replica['tokens'], 'token')} to write"
        again = (
            f", started again {number_of(replica['restarts'], 'time')}"
            if replica["restarts"]
            else ""
        )
        state = f"{replica['state']}, {work}, {replica['written']} written{again}"
        put(f"  {replica['name']}: {state}\n")
