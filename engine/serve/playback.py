"""A saved run as the page plays it: one frame for each state, with the events in it."""

from typing import Any

from ..errors import UsageError
from ..events import BranchFinished, BranchOpened, Committed, OutlineRead, TokenEvent
from ..record.replay import Replay, ReplayedEvents
from ..record.run_folder import SavedRun
from ..record.run_view import runs_of

MAX_FRAMES = 20_000


def playback_of(run: SavedRun) -> dict[str, Any]:
    """The scene of a run, its requests and its frames, as JSON values; raises UsageError."""
    replay = Replay(run)
    if len(replay) > MAX_FRAMES:
        reason = f"{len(replay)} transitions, a page plays at most {MAX_FRAMES}"
        raise UsageError(f"{run.path}: {reason}")
    scene = replay.scene
    replayed = ReplayedEvents(replay)
    frames = []
    for number, at in enumerate(replay.times):
        events = [
            [key, *_page_event(replay, event)]
            for record in replay.records_of(number)
            for key, event in replayed.of(record)
        ]
        pool = replay.pool(replayed.view)
        frame = {
            "t": at / 1e6,
            "state": replayed.view.state,
            "events": events,
            "runs": runs_of(pool.codes),
            "used": pool.used,
            "capacity": pool.capacity,
        }
        frames.append(frame)
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
        "frames": frames,
    }


def _page_event(replay: Replay, event: TokenEvent) -> list[Any]:
    """[name, branch, details], as a live page gets it."""
    match event:
        case OutlineRead(titles):
            return ["outline", -1, list(titles)]
        case BranchOpened(index, title):
            return ["opened", index, title]
        case BranchFinished(index, finish):
            return ["ended", index, finish]
        case Committed(branch=index, tokens=tokens, origins=origins):
            texts = map(replay.text_of, tokens)
            return ["wrote", index, [list(pair) for pair in zip(texts, origins, strict=True)]]
    raise TypeError(f"{type(event).__name__} is not an event of a saved run")
