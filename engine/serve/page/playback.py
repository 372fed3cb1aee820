"""A kept run as a page plays it: one frame for each state, with what was new in it."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...errors import UsageError
from ...record.replay import PARSE, Replay, ReplayedBranch
from ...record.run_folder import SavedRun
from ...record.run_view import runs_of
from ...record.trace import Record, told_trees

MOST = 20_000  # frames that a page is given
# origins, as `engine.events.Origin`
PROMPT = "p"
DRAFT = "d"
FORCED = "f"
TARGET = "t"


def playback_of(run: SavedRun) -> dict[str, Any]:
    """The scene of a run, its requests and its frames, as JSON can say them; raises UsageError."""
    replay = Replay(run)
    if len(replay) > MOST:
        raise UsageError(f"{run.path}: {len(replay)} transitions, a page plays at most {MOST}")
    scene = replay.scene
    ways = [[source, to, ""] for source, targets in scene.ways.items() for to in targets]
    facts = {"name": scene.graph, "layout": scene.layout, "drafter": scene.drafter}
    told = {"model": scene.model, "states": list(scene.states), "ways": ways, "initial": ways[0][0]}
    return {
        "run": run.path.name,
        "graph": facts | told,
        "requests": [[one.key, one.question] for one in replay.requests],
        "lacks": replay.lacks,
        "frames": list(_frames(replay)),
    }


def _frames(replay: Replay) -> Iterator[dict[str, Any]]:
    news = _News(replay)
    for number in range(len(replay)):
        pool = replay.snapshot(number).pool
        records = replay.records_of(number)
        events = [event for record in records for event in news.of(record)]
        move = next((one for one in records if one["kind"] == "move"), {"to": "start"})
        yield {
            "t": replay.times[number] / 1e6,
            "state": move["to"],
            "events": events,
            "runs": runs_of(pool.codes),
            "used": pool.used,
            "capacity": pool.capacity,
        }


class _News:
    """What each record brings to the branches: [request, event, branch, more], as live events."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._of = {
            one.name: (request, one) for request in replay.requests for one in request.branches
        }
        self._rounds: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._parsed: set[str] = set()

    def of(self, record: Record) -> Iterator[list[Any]]:
        if record["kind"] == "op" and record["op"] == PARSE:
            yield from self._outlines()
        elif record["kind"] == "round":
            forced = {tree.branch for tree in told_trees(record) if tree.forced}
            lists = (record[name] for name in ("branches", "committed", "accepted"))
            for name, committed, accepted in zip(*lists, strict=True):
                if name in self._of:
                    yield from self._grown(name, committed, accepted, name in forced)

    def _outlines(self) -> Iterator[list[Any]]:
        for request in self._replay.requests:
            root = request.outline
            if root is None or request.key in self._parsed:
                continue
            if self._rounds[root.name] >= root.rounds:
                self._parsed.add(request.key)
                titles = [one.title for one in request.parts if one.title != "combined"]
                yield [request.key, "outline", -1, titles if len(titles) > 1 else []]

    def _grown(self, name: str, committed: int, accepted: int, forced: bool) -> Iterator[list[Any]]:
        request, branch = self._of[name]
        if not self._rounds[name]:
            yield [request.key, "opened", branch.index, branch.title]
        first = self._tokens[name]
        self._rounds[name] += 1
        self._tokens[name] += committed
        pieces = list(_pieces(self._replay, branch, first, committed, accepted, forced))
        if pieces:
            yield [request.key, "wrote", branch.index, pieces]
        if self._rounds[name] >= branch.rounds:
            yield [request.key, "ended", branch.index, branch.finish]


def _pieces(
    replay: Replay, branch: ReplayedBranch, first: int, count: int, accepted: int, forced: bool
) -> Iterator[list[str]]:
    """The new tokens' texts, each with how it came."""
    draft = FORCED if forced else DRAFT
    for place, token in enumerate(branch.ids[first : first + count]):
        own = PROMPT if accepted < 0 else draft if place < accepted else TARGET
        yield [replay.text_of(token), own]
