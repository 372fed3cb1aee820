"""A saved run as the page plays it: one frame for each state, with the events in it."""

from collections.abc import Iterator
from typing import Any

from ..errors import UsageError
from ..events import Origin
from ..record.replay import Replay
from ..record.run_folder import SavedRun
from ..record.run_view import PARSE_OP, runs_of
from ..record.trace import trees_of

MAX_FRAMES = 20_000


def playback_of(run: SavedRun) -> dict[str, Any]:
    """The scene of a run, its requests and its frames, as JSON values; raises UsageError."""
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


def _events(replay: Replay, frame: int, parsed: set[str]) -> Iterator[list[Any]]:
    """[request, name, branch, details] of each event of a frame, as a live page gets it; parsed:
    keys of the requests whose outline was yielded."""
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
