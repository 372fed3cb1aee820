"""What reaches a run from outside, from any thread; it is taken in at the next `schedule`."""

from collections.abc import Iterable
from threading import Condition

from ..requests.branch import Finish, Request


class Inbox:
    """New requests, and those that somebody wants to end. A closed inbox takes no new ones.

    A run over a closed list has an inbox that is closed from the start.

    Args:
        stays: whether requests may still come.
        serves: whether answers are wanted one by one, not all of them at the end.
        sleeps: whether to wait for what comes; else whoever drives the run does.
    """

    def __init__(self, *, stays: bool = False, serves: bool = False, sleeps: bool = True) -> None:
        self._stays = stays
        self.serves = serves
        self.sleeps = sleeps
        self._changed = Condition()
        self._arrived: list[Request] = []
        self._ended: list[tuple[Request, Finish]] = []

    @property
    def stays(self) -> bool:
        """Whether requests may still come."""
        return self._stays

    @property
    def over(self) -> bool:
        """Nothing is left to be taken in, and nothing will come."""
        return not (self._stays or self._arrived or self._ended)

    def submit(self, requests: Iterable[Request]) -> bool:
        """Hand requests over; False if none are taken any more."""
        with self._changed:
            if self._stays:
                self._arrived += requests
                self._changed.notify_all()
            return self._stays

    def end(self, request: Request, finish: Finish) -> None:
        """End a request at the next step; what it has written until then is kept."""
        with self._changed:
            self._ended.append((request, finish))
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more requests."""
        with self._changed:
            self._stays = False
            self._changed.notify_all()

    def take(self) -> tuple[list[Request], list[tuple[Request, Finish]]]:
        """Everything since the last call: who came, and who is to end."""
        if not (self._arrived or self._ended):  # the usual case takes no lock
            return [], []
        with self._changed:
            taken = self._arrived, self._ended
            self._arrived = []
            self._ended = []
            return taken

    def wait(self, seconds: float | None = None) -> None:
        """Sleep until there is something to take, or nothing will come any more."""
        if not self.sleeps:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._stays or self._arrived or self._ended, seconds)
