"""The page at `/`, its files, and its data: pictures of the engines, saved runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import UsageError
from ..record.run_folder import SavedRun, saved_runs
from ..workers.protocol import encode
from ..workers.router import Router
from .requests import ApiError, overloaded

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
MAX_RUNS = 200
MAX_VIEWERS = 16
NO_STORE = {"cache-control": "no-cache"}
STATIC = files(__package__) / "static"


def page_files() -> dict[str, tuple[bytes, str]]:
    kinds = {file: KINDS.get(file.name.rpartition(".")[2]) for file in STATIC.iterdir()}
    return {
        file.name: (file.read_bytes(), f"{kind}; charset=utf-8")
        for file, kind in kinds.items()
        if kind is not None
    }


class PageRoutes:
    """The page's routes. router: None to play back runs only; only: the single run then."""

    def __init__(
        self, app: FastAPI, router: Router | None, runs: Path, only: SavedRun | None = None
    ) -> None:
        self._router = router
        self._runs = runs
        self._only = only
        self._files = page_files()
        routes = {
            "/": self.file,
            "/page/{name}": self.file,
            "/specsot/about": self.about,
            "/specsot/runs/{name}": self.run,
        }
        if self._router is not None:
            routes["/specsot/pictures"] = self.pictures
        for path, function in routes.items():
            app.add_route(path, function, methods=["GET"], include_in_schema=False)

    async def file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise ApiError(404, f"file not found: {name[:80]!r}")
        body, kind = self._files[name]
        return Response(body, headers={"content-type": kind, **NO_STORE})

    async def about(self, request: Request) -> Response:
        router = self._router
        body = {
            "live": router is not None,
            "state": "" if router is None else str(router.state),
            "graphs": [] if router is None else list(router.graphs.values()),
            "runs": [run.path.name for run in self._saved_runs()],
        }
        return JSONResponse(body, headers=NO_STORE)

    def _saved_runs(self) -> list[SavedRun]:
        if self._only is not None:
            return [self._only]
        try:
            return saved_runs(self._runs)[:MAX_RUNS]
        except (UsageError, OSError):
            return []

    async def run(self, request: Request) -> Response:
        name = request.path_params["name"]
        run = next((saved for saved in self._saved_runs() if saved.path.name == name), None)
        if run is None:
            raise ApiError(404, f"run not found: {name[:80]!r}")
        from ..record.replay import playback_of  # imports torch: seconds

        try:
            body = await asyncio.to_thread(playback_of, run)
        except UsageError as error:
            raise ApiError(400, str(error)) from None
        text = json.dumps(body, separators=(",", ":"))
        return Response(text, headers={"content-type": "application/json", **NO_STORE})

    async def pictures(self, request: Request) -> Response:
        """The engines' pictures, as server-sent events."""
        router = self._router
        assert router is not None
        if len(router.watchers) >= MAX_VIEWERS:
            raise overloaded(f"{MAX_VIEWERS} pages are open already", 429)

        async def events() -> AsyncIterator[dict[str, str]]:
            async for picture in router.pictures():
                yield {"data": encode(picture).decode().strip()}

        return EventSourceResponse(events(), ping=15, sep="\n", send_timeout=10)
