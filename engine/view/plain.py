"""Progress without a live view: a line per landmark on stderr, never one per round."""

from collections.abc import Callable
from time import monotonic

from ...states.machine import Run
from ...states.requests.branch import Request, Stage
from ...states.trace import Event, Moved
from ..record.recorder import Recorder
from ..record.text_stream import printable

EVERY = 10.0  # seconds between two lines when nothing else happens
LOOK = 0.1  # seconds between two looks at the branches: a run makes hundreds of moves in one


class PlainView:
    """Says when an outline is there and when a branch ends; otherwise one line every 10 s."""

    def __init__(self, recorder: Recorder, run: Run, say: Callable[[str], None]) -> None:
        self.recorder, self.run, self.say = recorder, run, say
        self._announced: set[int] = set()
        self._parsed: set[str] = set()
        self._last = self._looked = monotonic()

    def __call__(self, event: Event) -> None:
        now = monotonic()
        if not isinstance(event, Moved) or now - self._looked < LOOK:
            return
        self._looked = now
        self.look()
        if now - self._last >= EVERY:
            meter = self.recorder.meter
            self._say(f"{event.target}: round {meter.rounds}, {meter.tokens} tokens")

    def look(self) -> None:
        """Announce what is new."""
        requests = self.run.board["branches"].requests if self.run.board else ()
        for request in requests:
            self._look(request, "" if len(requests) == 1 else f"[{request.key}] ")

    def _look(self, request: Request, name: str) -> None:
        if request.outline is not None and request.key not in self._parsed:
            self._parsed.add(request.key)
            count = len(request.outline.points)
            what = f"{count} parts" if count else f"no parts ({request.outline.status})"
            self._say(f"{name}outline: {what}")
        for branch in request.branches:
            if branch.stage is Stage.DONE and branch.owner not in self._announced:
                self._announced.add(branch.owner)
                title = f"{name}{branch.index + 1}. {printable(branch.title, '')}"
                self._say(f"{title}: {len(branch.tokens)} tokens, {branch.finish}")

    def _say(self, line: str) -> None:
        self._last = monotonic()
        self.say(f"{self.recorder.now / 1e9:6.1f} s  {line}\n")
