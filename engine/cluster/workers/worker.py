"""A worker of a cluster: one thread that lives on, and does parts of requests as it is told.

That thread does everything that touches models and pools, so that a collective is always between
two steps. Others only put orders in and take replies out, at any time.
"""

from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from ...errors import code_of, message_of
from ...run.session import Session
from .duty import Duty
from .messages import CannotStart, Reply, packed
from .orders import Orders


class ClusterWorker:
    """Takes orders and gives replies, as texts; a thread of its own does what they say.

    Args:
        open_session: loads the models, on that thread.
        address: where others reach this machine.

    Attributes:
        duty: what it does, once the models are loaded.
    """

    def __init__(self, open_session: Callable[[], Session], address: str) -> None:
        self._open = open_session
        self._address = address
        self._orders = Orders()
        self._replies: deque[str] = deque()
        self._changed = Condition()
        self._ended = False
        self._listener = ""
        self.duty: Duty | None = None
        self._thread = Thread(target=self._live, name="specsot-worker", daemon=True)
        self._thread.start()

    def ask(self, order: str) -> None:
        """Put an order in; never waits."""
        self._orders.put(order)

    def tell_only(self, who: str) -> None:
        """From now on there are replies for this listener alone; earlier ones are nobody's."""
        with self._changed:
            self._listener = who
            self._replies.clear()
            self._changed.notify_all()

    def hear(self, seconds: float, who: str = "") -> list[str]:
        """Replies since the last call, in order; waits so long for the first. None, and at once,
        for somebody who is not listened to any more: a call of an earlier driver may still wait."""

        def over() -> bool:
            return bool(self._replies or self._ended or self._listener != who)

        with self._changed:
            self._changed.wait_for(over, seconds)
            if self._listener != who:
                return []
            heard = [*self._replies]
            self._replies.clear()
        return heard

    def die(self) -> None:
        """Stop in the middle of whatever it does: nothing that it still does is heard of."""
        self._ended = True

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended."""
        self._thread.join(seconds)

    def _tell(self, reply: Reply) -> None:
        with self._changed:
            if not self._ended:
                self._replies.append(packed(reply))
                self._changed.notify_all()

    def _live(self) -> None:
        try:
            duty = self.duty = Duty(self._open(), self._orders, self._tell, self._address)
            duty.greet()
            while not self._ended and not duty.closed:
                duty.turn()
            duty.close()
        except Exception as error:
            self._tell(CannotStart(int(code_of(error)), message_of(error)))
