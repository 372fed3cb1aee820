"""`specsot serve`: graphs behind OpenAI's API, and a page where one sees answers being decoded.
`specsot view`: a kept run on that page, forwards and back, at any speed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Exit

from ..errors import UsageError
from ..prepare.job import prepare_graphs, read_cluster
from ..prepare.options import SESSION, OptionText, RunOptions
from ..record.run_folder import LATEST, find_run
from .completing import graph_names_of
from .options import RUNS_DIR, Runs, Which, argument, option, takes

GRAPHS = argument(
    "Shipped graphs or graph files [specsot.yaml's]; a request's `model` picks one.",
    metavar="[GRAPH...]",
    show_default=False,
    autocompletion=graph_names_of,
)
LACKS = "the server needs more packages: pip install 'specsot[serve]'"
KEY = "SPECSOT_API_KEY"


WORKERS = OptionText("Replicas on a Ray cluster; without it one engine, and no Ray.")
PLACE = OptionText("HOST:PORT of a Ray cluster that runs [one is started here].", metavar="ADDRESS")
MODELS = tuple(name for name in SESSION if name != "outline")


@takes(*MODELS, workers=WORKERS, cluster=PLACE)
def serve(
    options: RunOptions,
    graphs: Annotated[list[str] | None, GRAPHS] = None,
    host: Annotated[str, option("Address.", envvar="SPECSOT_HOST")] = "127.0.0.1",
    port: Annotated[
        int, option("0: any free one.", envvar="SPECSOT_PORT", min=0, max=65535)
    ] = 8000,
    api_key: Annotated[
        list[str] | None, option("Who knows it may ask; may be repeated.", envvar=KEY)
    ] = None,
    insecure: Annotated[bool, option("Let others in without a key.")] = False,
    max_queue: Annotated[int, option("Requests that are open at once.", min=1)] = 256,
    max_body: Annotated[int, option("Bytes of a request.", min=1024)] = 1 << 20,
    timeout: Annotated[float, option("Seconds of a request.", min=0.1)] = 600.0,
    stall: Annotated[float, option("Seconds a stream may be unread.", min=0.1)] = 30.0,
    patience: Annotated[float, option("Seconds a client has to send a request.", min=0.1)] = 20.0,
    grace: Annotated[float, option("Seconds for open requests.", min=0.0)] = 30.0,
    metrics_compat: Annotated[
        str | None, option("Metrics under vLLM's names too.", metavar="vllm")
    ] = None,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """Serve graphs over one target: OpenAI's API, metrics, and a page that shows the decoding.

    Examples: `specsot serve`, `specsot serve bim_dflash dflash autoregressive --port 8001`,
    `specsot serve bim_eagle --profile smollm2`. SIGTERM lets open requests end; docs/serving.md.
    """
    with _packages():
        from ..serve.middleware import ServeOptions
        from ..serve.server import serve as run
        from ..workers.protocol import Start
        from ..workers.start import engine_router, replica_router
    if metrics_compat not in (None, "vllm"):
        raise UsageError(f"--metrics-compat {metrics_compat}: there is only `vllm`")
    listens = ServeOptions(
        host=host,
        port=port,
        keys=tuple(api_key or ()),
        insecure=insecure,
        body=max_body,
        queue=max_queue,
        timeout=timeout,
        stall=stall,
        grace=grace,
        vllm_names=metrics_compat == "vllm",
        runs_dir=str(runs_dir),
        patience=patience,
    )
    listens.check()
    names = graphs or []
    jobs = prepare_graphs(names, options)
    start = Start(names, plain_options(options))
    on_cluster = options.workers is not None or options.cluster is not None
    with (
        replica_router(jobs, start, read_cluster(options))
        if on_cluster
        else nullcontext(engine_router(start))
    ) as router:
        code = asyncio.run(run(router, listens))
    raise Exit(code)


@contextmanager
def _packages() -> Iterator[None]:
    """Report a missing optional package as UsageError."""
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
    host: Annotated[str, option("Address.")] = "127.0.0.1",
    port: Annotated[int, option("0: any free one.", min=0, max=65535)] = 8001,
    runs_dir: Runs = RUNS_DIR,
) -> None:
    """Show a kept run in the browser: its branches side by side, its states, its memory.

    Examples: `specsot view`, `specsot view latest --port 8080`. Nothing is decoded again.
    """
    with _packages():
        from ..serve.middleware import ServeOptions
        from ..serve.server import view as show
    options = ServeOptions(host=host, port=port)
    options.check()
    code = asyncio.run(show(find_run(run.removeprefix("runs/"), runs_dir), options))
    raise Exit(code)
