"""Progress without a live view: a line per landmark on stderr, never one per round."""

from collections.abc import Callable
from time import monotonic
from typing import Any

from ...states.machine import Run
from ...states.requests.branch import Stage
from ...states.trace import Event, Moved
from ..record.recorder import Recorder
from ..record.text_stream import printable

EVERY = 10.0  # seconds between two lines when nothing else happens
LOOK = 0.1  # seconds between two looks at the branches: a run makes hundreds of moves in one


class PlainView:
    """Says when an outline is there and when a branch ends; otherwise one line every 10 s.

    It says nothing of a run that it is not attached to.
    """

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        self.recorder, self.say = recorder, say
        self._run: Run | None = None
        self._announced: set[int] = set()
        self._parsed: set[str] = set()
        self._last = self._looked = monotonic()

    def attach(self, run: Run) -> None:
        self._run = run

    def __call__(self, event: Event) -> None:
        now = monotonic()
        if self._run is None or not isinstance(event, Moved) or now - self._looked < LOOK:
            return
        self._looked = now
        self.look()
        if now - self._last >= EVERY:
            meter = self.recorder.meter
            self._say(f"{event.target}: round {meter.rounds}, {meter.tokens} tokens")

    def look(self) -> None:
        """Announce what is new."""
        if self._run is not None and self._run.board:
            for request in self._run.board["branches"].requests:
                self._look(request)

    def _look(self, request: Any) -> None:
        if request.outline is not None and request.key not in self._parsed:
            self._parsed.add(request.key)
            count = len(request.outline.points)
            what = f"{count} parts" if count else f"no parts ({request.outline.status})"
            self._say(f"{self._name(request)}outline: {what}")
        for branch in request.branches:
            if branch.stage is Stage.DONE and branch.owner not in self._announced:
                self._announced.add(branch.owner)
                self._say(
                    f"{self._name(request)}{branch.index + 1}. {printable(branch.title, '')}: "
                    f"{len(branch.tokens)} tokens, {branch.finish}"
                )

    def _name(self, request: Any) -> str:
        assert self._run is not None
        alone = len(self._run.board["branches"].requests) == 1
        return "" if alone else f"[{request.key}] "

    def _say(self, line: str) -> None:
        self._last = monotonic()
        self.say(f"{self.recorder.now / 1e9:6.1f} s  {line}\n")
