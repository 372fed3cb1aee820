"""What a driver asks of workers, and of those who start them, whatever they are."""

from collections.abc import Sequence
from typing import Protocol


class WorkerPort(Protocol):
    """One worker, as the driver has it.

    Attributes:
        lost: why nothing will be heard of it any more; empty as long as it lives.
    """

    name: str
    lost: str

    def ask(self, order: str) -> None:
        """Give it an order; where that fails, it is lost."""

    def kill(self) -> None:
        """End it, whatever it does."""


class Launcher(Protocol):
    """Starts workers and hears what they say.

    Attributes:
        parts: of the target's weights; a worker has one of them.
    """

    parts: int

    def start(self, name: str, part: int) -> WorkerPort:
        """A worker that loads its models from now on, with such a part of the target.

        Raises:
            ClusterError: none can be started.
        """

    def wait(self, ports: Sequence[WorkerPort], seconds: float) -> list[tuple[WorkerPort, str]]:
        """What workers have said, in the order of each; waits so long for the first. Those that do
        not answer within the deadline are lost."""

    def close(self) -> None:
        """End all workers that are not to stay."""
