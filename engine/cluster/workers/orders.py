"""What a worker was told and has not done yet."""

from collections import deque
from queue import Empty, SimpleQueue

from .messages import Order, is_shared, match_scores


class Orders:
    """Orders in the order in which they came; put in by any thread, taken by one."""

    def __init__(self) -> None:
        self._texts: SimpleQueue[str] = SimpleQueue()
        self._read: deque[Order] = deque()

    def put(self, text: str) -> None:
        """Never waits."""
        self._texts.put(text)

    def take(self, seconds: float = 0.0) -> Order | None:
        """The next one; waits so long for it. Raises MessageError for a text that is none."""
        if not self._read:
            try:
                self._read.append(match_scores(self._texts.get(timeout=seconds)))
            except Empty:
                return None
        return self._read.popleft()

    def take_own(self) -> Order | None:
        """The next one if others do not do the same with this worker; raises MessageError."""
        self._read_all()
        return self._read.popleft() if self._read and not is_shared(self._read[0]) else None

    def count_shared(self) -> int:
        """Orders that are there and are everybody's; raises MessageError."""
        self._read_all()
        return sum(map(is_shared, self._read))

    def _read_all(self) -> None:
        while not self._texts.empty():
            self._read.append(match_scores(self._texts.get()))
