"""The page at `/`, its files, and what it alone asks for: pictures of the engines, kept runs."""

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
from ..api.problems import ApiError, overloaded

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
MOST_RUNS = 200
MOST_VIEWERS = 16
NO_STORE = {"cache-control": "no-cache"}


def page_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name, with their types; read once."""
    folder = files(__package__) / "files"
    found = {}
    for one in folder.iterdir():
        kind = KINDS.get(one.name.rpartition(".")[2])
        if kind is not None:
            found[one.name] = (one.read_bytes(), f"{kind}; charset=utf-8")
    return found


class PageRoutes:
    """What the page is given. link: None where runs are only played back; only: the run then."""

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
        return self._given("index.html")

    async def file(self, request: Request) -> Response:
        return self._given(request.path_params["name"])

    def _given(self, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, f"there is no file {name[:80]!r}")
        body, kind = self._files[name]
        return Response(body, headers={"content-type": kind, **NO_STORE})

    async def about(self, request: Request) -> Response:
        """What there is to be seen: graphs that can be asked, runs that can be played back."""
        graphs = [] if self._link is None else list(self._link.graphs.values())
        state = "" if self._link is None else str(self._link.state)
        runs = [self._only] if self._only is not None else self._kept()
        names = [one.path.name for one in runs]
        live = self._link is not None
        body = {"live": live, "state": state, "graphs": graphs, "runs": names}
        return JSONResponse(body, headers=NO_STORE)

    def _kept(self) -> list[SavedRun]:
        try:
            return saved_runs(self._runs)[:MOST_RUNS]
        except (UsageError, OSError):
            return []

    async def run(self, request: Request) -> Response:
        """A kept run, as the page plays it."""
        name = request.path_params["name"]
        runs = self._kept()
        if self._only is not None:
            runs = [self._only]
        run = next((one for one in runs if one.path.name == name), None)
        if run is None:
            raise ApiError(404, f"there is no run {name[:80]!r}")
        try:
            body = await asyncio.to_thread(_playback, run)
        except UsageError as error:
            raise ApiError(400, str(error)) from None
        text = json.dumps(body, separators=(",", ":"))
        return Response(text, headers={"content-type": "application/json", **NO_STORE})

    async def pictures(self, request: Request) -> Response:
        """The engines' pictures, as long as somebody looks."""
        link = self._link
        assert link is not None
        if len(link.watchers) >= MOST_VIEWERS:
            raise overloaded(f"{MOST_VIEWERS} pages are looking already", 429)
        return EventSourceResponse(_told(link), ping=15, sep="\n", send_timeout=10)


def _playback(run: SavedRun) -> dict[str, Any]:
    from .playback import playback_of  # torch comes with it

    return playback_of(run)


async def _told(link: Router) -> AsyncIterator[dict[str, Any]]:
    async for picture in link.pictures():
        yield {"data": encode(picture).decode().strip()}
