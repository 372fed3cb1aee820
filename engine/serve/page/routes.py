"""The page at `/`, its files, and its data: pictures of the engines, saved runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...errors import UsageError
from ...record.run_folder import SavedRun, saved_runs
from ...workers.protocol import encode
from ...workers.router import Router
from ..api.errors import ApiError, overloaded

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
MAX_RUNS = 200
MAX_VIEWERS = 16
NO_STORE = {"cache-control": "no-cache"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name: (content, type)."""
    folder = files(__package__) / "files"
    contents = {}
    for file in folder.iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            contents[file.name] = (file.read_bytes(), f"{kind}; charset=utf-8")
    return contents


class PageRoutes:
    """The page's routes. link: None to play back runs only; only: the single run then."""

    def __init__(self, link: Router | None, runs: Path, only: SavedRun | None = None) -> None:
        self._link = link
        self._runs = runs
        self._only = only
        self._files = page_files()

    def add_to(self, app: FastAPI) -> None:
        routes = [
            ("/", self.start),
            ("/page/{name}", self.file),
            ("/specsot/about", self.about),
            ("/specsot/runs/{name}", self.run),
        ]
        if self._link is not None:
            routes.append(("/specsot/pictures", self.pictures))
        for path, function in routes:
            app.add_route(path, function, methods=["GET"], include_in_schema=False)

    async def start(self, request: Request) -> Response:
        return self._response("index.html")

    async def file(self, request: Request) -> Response:
        return self._response(request.path_params["name"])

    def _response(self, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, f"file not found: {name[:80]!r}")
        body, kind = self._files[name]
        return Response(body, headers={"content-type": kind, **NO_STORE})

    async def about(self, request: Request) -> Response:
        """The graphs that the server serves, and the saved runs."""
        graphs = [] if self._link is None else list(self._link.graphs.values())
        state = "" if self._link is None else str(self._link.state)
        runs = [self._only] if self._only is not None else self._saved_runs()
        names = [run.path.name for run in runs]
        live = self._link is not None
        body = {"live": live, "state": state, "graphs": graphs, "runs": names}
        return JSONResponse(body, headers=NO_STORE)

    def _saved_runs(self) -> list[SavedRun]:
        try:
            return saved_runs(self._runs)[:MAX_RUNS]
        except (UsageError, OSError):
            return []

    async def run(self, request: Request) -> Response:
        """A saved run, as the page plays it."""
        name = request.path_params["name"]
        runs = self._saved_runs()
        if self._only is not None:
            runs = [self._only]
        run = next((saved for saved in runs if saved.path.name == name), None)
        if run is None:
            raise ApiError(404, f"run not found: {name[:80]!r}")
        try:
            body = await asyncio.to_thread(_playback, run)
        except UsageError as error:
            raise ApiError(400, str(error)) from None
        text = json.dumps(body, separators=(",", ":"))
        return Response(text, headers={"content-type": "application/json", **NO_STORE})

    async def pictures(self, request: Request) -> Response:
        """The engines' pictures, as server-sent events."""
        link = self._link
        assert link is not None
        if len(link.watchers) >= MAX_VIEWERS:
            raise overloaded(f"{MAX_VIEWERS} pages are open already", 429)
        return EventSourceResponse(_picture_events(link), ping=15, sep="\n", send_timeout=10)


def _playback(run: SavedRun) -> dict[str, Any]:
    from .playback import playback_of

    return playback_of(run)


async def _picture_events(link: Router) -> AsyncIterator[dict[str, Any]]:
    async for picture in link.pictures():
        yield {"data": encode(picture).decode().strip()}
