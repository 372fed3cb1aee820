"""Workers in threads of this process: the same messages by sockets, lost or hung on request."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread

from specsot.engine.run.session import Session
from specsot.engine.workers.link import Pipe, WorkerSource
from specsot.engine.workers.process import WorkerProcess
from specsot.engine.workers.protocol import MAX_LINE_BYTES, Load, Start
from specsot.engine.workers.worker_loop import WorkerLoop


class ThreadHost:
    """A worker in a thread.

    Args:
        first: message to the worker. serve: serves a connection until it is closed. first_output:
            is called with the first bytes that the worker sends.

    Attributes:
        flows: its messages arrive; cleared, it hangs.
    """

    pid: int | None = None

    def __init__(
        self,
        first: Start | Load,
        serve: Callable[[socket.socket], object],
        first_output: Callable[[], None] = lambda: None,
    ) -> None:
        self.first = first
        self.flows = Event()
        self._serve = serve
        self._first_output = first_output
        self._ends: list[socket.socket] = []
        self._worker: Thread | None = None

    async def start(self) -> Pipe:
        ours, relay = socket.socketpair()
        back, theirs = socket.socketpair()
        self._ends = ends = [ours, relay, back, theirs]
        self.flows.set()
        self._worker = Thread(target=self._serve, args=(theirs,), daemon=True)
        self._worker.start()
        for source, sink in ((back, relay), (relay, back)):
            Thread(target=self._pump, args=(source, sink, ends), daemon=True).start()
        return await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)

    def _pump(
        self, source: socket.socket, sink: socket.socket, ends: Sequence[socket.socket]
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if source is ends[2]:
                    self._first_output()
                self.flows.wait()
                sink.sendall(data)
        _shut(ends)

    def end(self) -> None:
        """Lose the worker, whatever it does."""
        _shut(self._ends)

    async def reap(self) -> None:
        self.flows.set()
        self.end()
        if self._worker is not None:
            await asyncio.to_thread(self._worker.join, 10)


def _shut(ends: Sequence[socket.socket]) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class ThreadWorkers:
    """Workers of a run in threads of this process: the same messages and collectives, without Ray.

    They share the models' weights and nothing else.

    Args:
        sessions: with a part of the target each, or one with all of it.

    Attributes:
        processes: one for each worker that was started, in this order.
    """

    def __init__(self, *sessions: Session) -> None:
        self.sessions = sessions
        self.processes: list[WorkerProcess] = []
        self.source = WorkerSource(self.host, len(sessions))

    def host(self, number: int, part: int) -> ThreadHost:
        process = WorkerProcess(lambda job: self.sessions[part])
        self.processes.append(process)
        return ThreadHost(Load({}), process.serve)

    def loop(self, worker: int) -> WorkerLoop:
        loop = self.processes[worker].loop
        assert loop is not None
        return loop
