"""The page at `/`, its files, and its data: pictures of the engines, saved runs frame by frame."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import UsageError
from ..events import Origin
from ..record.run_folder import SavedRun, saved_runs
from ..workers.protocol import encode
from ..workers.router import Router
from .requests import ApiError, overloaded

if TYPE_CHECKING:  # it imports torch: seconds
    from ..record.replay import Replay

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
MAX_RUNS = 200
MAX_VIEWERS = 16
MAX_FRAMES = 20_000
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


# -- saved runs -----------------------------------------------------------------------------------


def playback_of(run: SavedRun) -> dict[str, Any]:
    """The scene of a run, its requests and its frames, as JSON values; raises UsageError."""
    from ..record.replay import Replay
    from ..record.run_view import runs_of

    replay = Replay(run)
    if len(replay) > MAX_FRAMES:
        reason = f"{len(replay)} transitions, a page plays at most {MAX_FRAMES}"
        raise UsageError(f"{run.path}: {reason}")
    scene = replay.scene
    parsed: set[str] = set()

    def frame(number: int) -> dict[str, Any]:
        view = replay.view(number)
        pool = replay.pool(view)
        return {
            "t": replay.times[number] / 1e6,
            "state": view.state,
            "events": list(_events(replay, number, parsed)),
            "runs": runs_of(pool.codes),
            "used": pool.used,
            "capacity": pool.capacity,
        }

    ways = [[source, to, ""] for source, targets in scene.ways.items() for to in targets]
    return {
        "run": run.path.name,
        "graph": {
            "name": scene.graph,
            "layout": scene.layout,
            "drafter": scene.drafter,
            "model": scene.model,
            "states": list(scene.states),
            "ways": ways,
            "initial": ways[0][0],
        },
        "requests": [[request.key, request.question] for request in replay.requests],
        "lacks": replay.missing,
        "frames": [frame(number) for number in range(len(replay.times))],
    }


def _events(replay: "Replay", frame: int, parsed: set[str]) -> Iterator[list[Any]]:
    """[request, name, branch, details] of each event of a frame, as a live page gets it; parsed:
    keys of the requests whose outline was yielded."""
    from ..record.replay import trees_of
    from ..record.run_view import PARSE_OP

    view = replay.view(frame)
    branches = {b.name: (r.key, b) for r in replay.requests for b in r.branches}
    for record in replay.records_of(frame):
        if record["kind"] == "op" and record["op"] == PARSE_OP:
            for request in replay.requests:
                root = request.outline
                is_new = root is not None and request.key not in parsed
                if is_new and root is not None and view.rounds[root.name] >= root.rounds:
                    parsed.add(request.key)
                    titles = [part.title for part in request.parts if part.title != "combined"]
                    yield [request.key, "outline", -1, titles if len(titles) > 1 else []]
        elif record["kind"] == "round":
            forced = {tree.branch for tree in trees_of(record) if tree.forced}
            columns = (record[name] for name in ("branches", "committed", "accepted"))
            for name, count, accepted in zip(*columns, strict=True):
                key, branch = branches[name]
                if view.rounds[name] == 1:
                    yield [key, "opened", branch.index, branch.title]
                first = view.tokens[name] - count
                if tokens := branch.ids[first : first + count]:
                    drafts = min(accepted, len(tokens))
                    kind = Origin.FORCED if name in forced else Origin.DRAFT
                    letters = kind * drafts + Origin.TARGET * (len(tokens) - drafts)
                    if accepted < 0:
                        letters = Origin.PROMPT * len(tokens)
                    texts = map(replay.text_of, tokens)
                    pairs = [list(pair) for pair in zip(texts, letters, strict=True)]
                    yield [key, "wrote", branch.index, pairs]
                if view.rounds[name] >= branch.rounds:
                    yield [key, "ended", branch.index, branch.finish]
