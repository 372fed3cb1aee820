"""Where workers live: what the driver asks of a launcher, whatever its workers are."""

from collections.abc import Sequence
from threading import Event
from time import monotonic
from typing import Protocol

from ..run.session import Session
from .worker import ClusterWorker

LOOK = 0.002  # seconds between two looks at workers of this process


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
    """Starts workers and hears what they say."""

    def start(self, name: str) -> WorkerPort:
        """A worker that loads its models from now on.

        Raises:
            ClusterError: none can be started.
        """

    def wait(self, ports: Sequence[WorkerPort], seconds: float) -> list[tuple[WorkerPort, str]]:
        """What workers have said, in the order of each; waits so long for the first. Those that do
        not answer within the deadline are lost."""

    def close(self) -> None:
        """End all workers that are not to stay."""


class ThreadPort:
    """A worker in a thread of this process."""

    def __init__(self, name: str, worker: ClusterWorker) -> None:
        self.name, self.worker = name, worker
        self.lost = ""

    def ask(self, order: str) -> None:
        self.worker.ask(order)

    def kill(self) -> None:
        self.worker.die()


class ThreadLauncher:
    """Workers in threads of this process: the same messages and collectives, without Ray.

    They share the models' weights and nothing else.
    """

    def __init__(self, session: Session, address: str = "127.0.0.1") -> None:
        self.session, self.address = session, address
        self.ports: list[ThreadPort] = []

    def start(self, name: str) -> ThreadPort:
        port = ThreadPort(name, ClusterWorker(lambda: self.session, self.address))
        self.ports.append(port)
        return port

    def wait(self, ports: Sequence[WorkerPort], seconds: float) -> list[tuple[WorkerPort, str]]:
        until = monotonic() + seconds
        while True:
            heard: list[tuple[WorkerPort, str]] = []
            for port in self.ports:
                if port in ports:
                    heard += [(port, text) for text in port.worker.hear(0)]
                    port.lost = port.lost or ("" if port.worker.alive else "its thread has ended")
            if heard or monotonic() >= until or any(port.lost for port in ports):
                return heard
            Event().wait(LOOK)

    def close(self) -> None:
        for port in self.ports:
            port.kill()
        for port in self.ports:
            port.worker.join(10)
