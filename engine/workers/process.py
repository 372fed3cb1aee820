"""The process of a worker: the engines of a server, or those of a run.

In a server's process one thread reads messages, the other drives all engines in turn. Several
graphs share one target, which is loaded once; each has its own drafter and pools.
"""

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from ...models.load.weights import model_hash
from ...states.machine import Event as TraceEvent
from ...states.machine import Moved
from ...states.round import RoundSummary
from ...states.text.tokens import PromptError
from ..errors import Code, code_of, message_of
from ..models import Models, with_drafter
from ..prepare.environment import model_folders
from ..prepare.job import prepare_graphs
from ..prepare.options import RunOptions
from ..record.run_view import pool_view, runs_of
from ..run.session import Session, load, tie
from ..shell import complain
from .protocol import (
    Admitted,
    Cancel,
    Counts,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failed,
    Heartbeat,
    Load,
    Message,
    Picture,
    ProtocolError,
    Ready,
    Refused,
    SnapshotRequest,
    Start,
    Submit,
    WorkerSocket,
)
from .served_request import Refusal, RequestBuilder, ServedRequest
from .worker_loop import WorkerEngine, WorkerLoop, load_job

REPORT_INTERVAL = 0.25  # seconds between two `Counts`
PICTURE_INTERVAL = 0.125  # seconds
HEARTBEAT_INTERVAL = 0.5  # seconds
MAX_MOVES = 24  # of a picture


class ServedGraph(WorkerEngine):
    """One graph's engine and its open requests. watched: record the transitions for `picture`."""

    def __init__(self, session: Session, send: Callable[[Message], None]) -> None:
        super().__init__(session, send, rounds=self._round_done, sink=self._happened)
        self.name = session.program.graph.name
        self.watched = False
        self.moves = deque[list[Any]](maxlen=MAX_MOVES)
        self._positions: list[int] = []  # drafts accepted at each depth
        self._builder = RequestBuilder(self.engine)

    def _happened(self, event: TraceEvent) -> None:
        if self.watched and isinstance(event, Moved):
            self.moves.append([event.source, event.target, event.guard or "", event.nanos / 1e6])

    def _round_done(self, summary: RoundSummary) -> None:
        for tree in summary.trees:
            drafted = sum(token >= 0 for token in tree.tokens[1:])
            accepted = len(tree.path) - 1
            self._positions += [0] * (accepted - len(self._positions))
            for depth in range(accepted):
                self._positions[depth] += 1
            request = self.requests.get(tree.branch.rpartition("/")[0])
            if isinstance(request, ServedRequest):
                request.rounds.append((accepted, drafted))

    def submit(self, message: Submit) -> None:
        try:
            prompt, settings, prompt_tokens = self._builder.build(message)
        except Refusal as error:
            self.send(Refused(message.id, str(error), error.param, error.code))
        except PromptError as error:
            param = "messages" if message.text is None else "prompt"
            self.send(Refused(message.id, str(error), param))
        except Exception as error:  # of a model's tokenizer
            self.send(Refused(message.id, message_of(error)))
        else:
            self.send(Admitted(message.id, prompt_tokens))
            handle = self.engine.submit(prompt, timeout=message.timeout, settings=settings)
            self.requests[message.id] = ServedRequest(self.engine, message, handle)

    def encode(self, message: Encode) -> Encoded | Refused:
        try:
            ids = self._builder.encode(message)
        except PromptError as error:
            return Refused(message.id, str(error), "prompt")
        return Encoded(message.id, ids, [self.engine.decode([token]) for token in ids])

    def counts(self) -> dict[str, Any]:
        return asdict(self.engine.stats()) | {"positions": list(self._positions)}

    def picture(self) -> Picture:
        pool = pool_view(self.engine.core.board)
        stats = self.engine.stats()
        moves = [*self.moves]
        self.moves.clear()
        return Picture(
            graph=self.name,
            state=self.engine.core.state,
            runs=runs_of(pool.codes),
            used=pool.used,
            capacity=pool.capacity,
            moves=moves,
            running=stats.running,
            waiting=stats.waiting,
        )

    def facts(self, model: str, digest: str) -> dict[str, Any]:
        """What the HTTP side knows of the graph.

        states, ways: of its machine. longest: tokens of prompt and answer together. budget: default
        tokens of an answer, or of each part.
        """
        session = self.session
        graph = session.program.graph
        target = session.models.target
        return {
            "name": graph.name,
            "doc": graph.doc,
            "model": model,
            "model_hash": digest,
            "layout": graph.layout.kind,
            "drafter": graph.drafter.kind,
            "skeleton": graph.skeleton is not None,
            "initial": graph.initial,
            "states": [*graph.states],
            "ways": [(s, e.to, e.when or "") for s in graph.states for e in graph.edges_from(s)],
            "longest": min(target.max_positions, graph.layout.kv_slots),
            "vocabulary": target.vocab_size,
            "budget": session.budget,
            "stop_ids": [*session.prompts.stop_ids],
            "sampling": {"temperature": graph.sampling.temperature},
        }


class EngineProcess:
    """Engines of several graphs over one target, fed through a socket until it is closed. Raises
    Exception: what prevents loading."""

    def __init__(self, pipe: WorkerSocket, start: Start) -> None:
        self._pipe = pipe
        self._orders: SimpleQueue[Cancel | SnapshotRequest] = SimpleQueue()
        self._wake = Event()
        self._graphs: dict[str, ServedGraph] = {}
        self._report_time = 0.0
        self._picture_time = 0.0
        pipe.send(Ready(self._open(start)))

    def serve(self) -> None:
        Thread(target=self._listen, name="specsot-listen", daemon=True).start()
        while not self._pipe.closed:
            self._turn()

    def _open(self, start: Start) -> dict[str, dict[str, Any]]:
        """Facts of the graphs by name; the first graph loads the target."""
        models: Models | None = None
        facts = {}
        for job in prepare_graphs(start.graphs, RunOptions(**{**start.options, "graph": None})):
            target_folder, drafter_folder = model_folders(job)
            if models is None:
                session = load(job)
                models = replace(session.models, drafter=None)
            elif drafter_folder is None:
                session = tie(job, models)
            else:
                kind = job.program.graph.drafter.kind
                session = tie(job, with_drafter(models, drafter_folder, kind))
            graph = ServedGraph(session, self._pipe.send)
            self._graphs[graph.name] = graph
            facts[graph.name] = graph.facts(job.options.model, model_hash(target_folder))
        return facts

    def _listen(self) -> None:
        """Tokenizes on this thread, so that a long prompt does not delay the engines."""
        for message in self._pipe:
            match message:
                case Encode():
                    self._pipe.send(self._graphs[message.graph].encode(message))
                case Decode():
                    graph = next(iter(self._graphs.values()))
                    self._pipe.send(Decoded(message.id, graph.engine.decode(message.token_ids)))
                case Submit():
                    self._graphs[message.graph].submit(message)
                case Cancel() | SnapshotRequest():
                    self._orders.put(message)
            self._wake.set()
        self._wake.set()

    def _turn(self) -> None:
        """A step of every engine that has requests; pictures and counts when they are due."""
        graphs = self._graphs.values()
        while not self._orders.empty():
            order = self._orders.get()
            for graph in graphs:
                if isinstance(order, SnapshotRequest):
                    graph.watched = order.on
                elif order.id in graph.requests:
                    graph.requests[order.id].handle.cancel()
        now = monotonic()
        due = now - self._picture_time >= PICTURE_INTERVAL
        self._picture_time = now if due else self._picture_time
        for graph in graphs:
            before = len(graph.requests)
            graph.step()
            ended = before and not graph.requests  # its last picture is sent at once
            if graph.watched and graph.moves and (due or ended):
                self._pipe.send(graph.picture())
        if now - self._report_time >= REPORT_INTERVAL:
            self._report_time = now
            self._pipe.send(Counts({graph.name: graph.counts() for graph in graphs}))
        if not any(graph.requests for graph in graphs):
            self._wake.wait(REPORT_INTERVAL)
            self._wake.clear()


# -- any worker -----------------------------------------------------------------------------------


class WorkerProcess:
    """A worker's process: it serves one connection after another. The models of a run stay loaded.
    load_session: loads the models of a run's job."""

    def __init__(self, load_session: Callable[[Mapping[str, Any]], Session] = load_job) -> None:
        self._load_session = load_session
        self.loop: WorkerLoop | None = None

    def serve(self, connection: socket.socket) -> int:
        """Serve a connection until it is closed; the exit code. Raises ProtocolError."""
        pipe = WorkerSocket(connection)
        with closing(pipe):
            start = next(iter(pipe), None)
            if not isinstance(start, Start | Load):
                raise ProtocolError(f"the first message is not a Start: {type(start).__name__}")
            try:
                if isinstance(start, Load):
                    Thread(target=_send_heartbeats, args=(pipe,), daemon=True).start()
                    self.loop = self.loop or WorkerLoop(self._load_session(start.job))
                    self.loop.serve(pipe)
                    return int(Code.OK)
                engines = EngineProcess(pipe, start)
            except Exception as error:
                pipe.send(Failed(int(code_of(error)), message_of(error)))
                self.loop = None
                return int(code_of(error))
            engines.serve()
        return int(Code.OK)


def _send_heartbeats(pipe: WorkerSocket) -> None:
    while not pipe.closed:
        pipe.send(Heartbeat())
        sleep(HEARTBEAT_INTERVAL)


def main() -> None:
    """Entry of a child process: its only argument is the number of its end of the socket."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = int(Code.FAILED)
    try:
        code = WorkerProcess().serve(connection)
    except Exception as error:
        complain(f"the engine's process ends: {message_of(error)}")
    finally:
        os._exit(code)  # a thread may still be reading
