"""Workers in threads of one process."""

from collections.abc import Sequence
from threading import Event
from time import monotonic

from specsot.engine.cluster.driver.ports import WorkerPort
from specsot.engine.cluster.workers.worker import ClusterWorker
from specsot.engine.run.session import Session

LOOK = 0.002  # seconds between two looks at workers of this process


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

    Args:
        sessions: with a part of the target each, or one with all of it.
    """

    def __init__(self, *sessions: Session, address: str = "127.0.0.1") -> None:
        self.sessions, self.parts, self.address = sessions, len(sessions), address
        self.ports: list[ThreadPort] = []

    def start(self, name: str, part: int) -> ThreadPort:
        port = ThreadPort(name, ClusterWorker(lambda: self.sessions[part], self.address))
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
