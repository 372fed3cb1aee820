"""`specsot serve`: graphs behind OpenAI's API, and a page where one sees answers being decoded.
`specsot view`: a kept run on that page, forwards and back, at any speed.
`specsot cluster up | status | down`: workers on this machine that stay, models loaded."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster.on_workers import check, divided
from ..cluster.ray_environment import set_up_ray
from ..cluster.standing import StandingCluster, end, standing, start_head
from ..errors import ClusterError, UsageError
from ..prepare.cluster_block import LOCAL
from ..prepare.job import prepare, read_cluster
from ..prepare.options import SESSION, OptionText, RunOptions
from ..record.kept_runs import find_run
from ..record.run_folder import LATEST
from ..shell import complain, put, user_errors
from .completing import graph_names_of
from .options import RUNS_DIR, Runs, Which, takes

GRAPHS = typer.Argument(
    metavar="[GRAPH...]",
    help="Shipped graphs or graph files [specsot.yaml's]; a request's `model` picks one.",
    show_default=False,
    autocompletion=graph_names_of,
)
LACKS = "the server needs more packages: pip install 'specsot[serve]'"
KEY = "SPECSOT_API_KEY"


@takes(*(name for name in SESSION if name != "outline"))
def serve(
    options: RunOptions,
    graphs: Annotated[list[str] | None, GRAPHS] = None,
    host: Annotated[str, typer.Option(envvar="SPECSOT_HOST", help="Address.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="SPECSOT_PORT", min=0, max=65535, help="0: any free one.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar=KEY, help="Who knows it may ask; may be repeated."),
    ] = None,
    insecure: Annotated[bool, typer.Option(help="Let others in without a key.")] = False,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that are open at once.")] = 256,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 1 << 20,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of a request.")] = 600.0,
    stall: Annotated[float, typer.Option(min=0.1, help="Seconds a stream may be unread.")] = 30.0,
    patience: Annotated[
        float, typer.Option(min=0.1, help="Seconds a client has to send a request.")
    ] = 20.0,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds for open requests.")] = 30.0,
    metrics_compat: Annotated[
        str | None, typer.Option(metavar="vllm", help="Metrics under vLLM's names too.")
    ] = None,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """Serve graphs over one target: OpenAI's API, metrics, and a page that shows the decoding.

    Examples: `specsot serve`, `specsot serve bim_dflash dflash autoregressive --port 8001`,
    `specsot serve bim_eagle --profile smollm2`. SIGTERM lets open requests end; docs/serving.md.
    """
    with user_errors():
        with _packages():
            from ..serve.api.app import ServerLimits
            from ..serve.server import ServeOptions
            from ..serve.server import serve as run
            from ..serve.wire.jobs import check_graphs
        if metrics_compat not in (None, "vllm"):
            raise UsageError(f"--metrics-compat {metrics_compat}: there is only `vllm`")
        limits = ServerLimits(max_queue, timeout, stall)
        keys, names = tuple(api_key or ()), graphs or []
        vllm, runs = metrics_compat == "vllm", str(runs_dir)
        listens = ServeOptions(
            host, port, keys, insecure, max_body, limits, grace, vllm, runs, patience
        )
        listens.check()
        check_graphs(names, options)
        code = asyncio.run(run(names, plain_options(options), listens))
    raise typer.Exit(code)


@contextmanager
def _packages() -> Iterator[None]:
    """What the server needs beside the rest; raises UsageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).split(".")[0] == "specsot":
            raise
        raise UsageError(f"{LACKS} ({error.name})") from None


def plain_options(options: RunOptions) -> dict[str, Any]:
    """The options that decide on models, as JSON can say them."""
    values = {name: asdict(options)[name] for name in SESSION}
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}


def view(
    run: Which = LATEST,
    host: Annotated[str, typer.Option(help="Address.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8001,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """Show a kept run in the browser: its branches side by side, its states, its memory.

    Examples: `specsot view`, `specsot view latest --port 8080`. Nothing is decoded again.
    """
    with user_errors():
        with _packages():
            from ..serve.server import ServeOptions
            from ..serve.viewer import view as show
        options = ServeOptions(host, port)
        options.check()
        code = asyncio.run(show(find_run(run.removeprefix("runs/"), runs_dir), options))
    raise typer.Exit(code)


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
