"""`specsot view`: a kept run in the browser, forwards and back, at any speed."""

import asyncio
from typing import Annotated

import typer

from ..errors import UsageError
from ..record.kept_runs import find_run
from ..record.run_folder import LATEST
from ..shell import user_errors
from .options import RUNS_DIR, Runs, Which
from .serve import LACKS


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
        try:
            from ..serve.server import ServeOptions
            from ..serve.viewer import view as show
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] == "specsot":
                raise
            raise UsageError(f"{LACKS} ({error.name})") from None
        options = ServeOptions(host, port)
        options.check()
        code = asyncio.run(show(find_run(run.removeprefix("runs/"), runs_dir), options))
    raise typer.Exit(code)
