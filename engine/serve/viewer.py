"""`specsot view`: the page with one kept run, and nothing that decodes."""

from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from ..errors import Code
from ..record.run_folder import SavedRun
from ..shell import complain
from .api.app import http_error, told_error
from .api.gate import Gate
from .api.meters import Meters
from .api.problems import ApiError
from .page.playback import playback_of
from .page.routes import PageRoutes
from .server import ServeOptions, address_of, config_of, listen, run_alone


async def view(run: SavedRun, options: ServeOptions) -> int:
    """Show a run until a signal ends it; raises UsageError where it cannot be played."""
    playback_of(run)
    listener = listen(options)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, told_error)
    app.add_exception_handler(HTTPException, http_error)
    PageRoutes(None, Path(), run).add_to(app)
    complain(f"{run.path.name} is shown at {address_of(listener)} (Ctrl-C ends)")
    await run_alone(config_of(Gate(app, options.rules(), Meters(None)), options.patience), listener)
    return int(Code.OK)
