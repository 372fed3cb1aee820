"""What a page is shown of the engines: their states, last moves and pools, a few times a second."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from ....states.trace import Event, Moved, Sink
from ...record.run_view import runs_of
from ...run.engine import Engine
from ..wire.protocol import Picture

OFTEN = 0.125  # seconds between two pictures
MOVES = 24


class PictureTaker:
    """Pictures of all engines, while somebody looks. on: whether somebody does."""

    def __init__(self) -> None:
        self.on = False
        self._engines: Mapping[str, Engine] = {}
        self._moves: dict[str, deque[tuple[str, str, str, float]]] = {}
        self._last = 0.0

    def watch(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    def sink(self, graph: str) -> Sink:
        """Takes in the moves of a graph's machine."""
        moves = self._moves[graph] = deque(maxlen=MOVES)

        def happened(event: Event) -> None:
            if self.on and isinstance(event, Moved):
                guard = event.guard or ""
                millis = event.nanos / 1e6
                moves.append((event.source, event.target, guard, millis))

        return happened

    def take(self, now: float, ended: Collection[str] = ()) -> Iterator[Picture]:
        """A picture of every engine that has moved, if the last ones are old enough; of those in
        which everybody has just ended, at once."""
        if not self.on:
            return
        due = now - self._last >= OFTEN
        self._last = now if due else self._last
        for graph, moves in self._moves.items():
            if moves and (due or graph in ended):
                engine = self._engines[graph]
                pool = engine.pool()
                told = [list(one) for one in moves]
                moves.clear()
                runs = runs_of(pool.codes)
                counts = engine.stats()
                yield Picture(
                    graph,
                    engine.state,
                    runs,
                    pool.used,
                    pool.capacity,
                    told,
                    counts.running,
                    counts.waiting,
                )
