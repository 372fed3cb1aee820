"""The engine process of a server: one thread reads messages, the other drives all engines in turn.

Several graphs share one target, which is loaded once; each has its own drafter and pools.
"""

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from ...models.load.checkpoint import model_hash
from ...states.machine import Event as TraceEvent
from ...states.machine import Moved, Sink
from ...states.round import RoundSummary
from ...states.text.tokens import PromptError
from ..errors import Code, code_of, message_of
from ..models import Models, with_drafter
from ..prepare.environment import model_folders
from ..prepare.job import Job, prepare_graphs
from ..prepare.options import RunOptions
from ..record.run_view import runs_of
from ..run.engine import Engine
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
from .served_request import Refusal, RequestBuilder, ServedRequest, Speculation
from .worker_loop import WorkerLoop, load_job

REPORT_INTERVAL = 0.25  # seconds between two `Counts`
PICTURE_INTERVAL = 0.125  # seconds
HEARTBEAT_INTERVAL = 0.5  # seconds
MAX_MOVES = 24  # of a picture


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """A served graph.

    states, ways: of its machine. longest: tokens of prompt and answer together. budget: default
    tokens of an answer, or of each part.
    """

    name: str
    doc: str
    model: str
    model_hash: str
    layout: str
    drafter: str
    skeleton: bool
    initial: str
    states: tuple[str, ...]
    ways: tuple[tuple[str, str, str], ...]
    longest: int
    vocabulary: int
    budget: int
    stop_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)


def open_graphs(
    graphs: Sequence[str], options: RunOptions
) -> Iterator[tuple[str, Session, GraphFacts]]:
    """Every graph with its session; the first one loads the target."""
    models: Models | None = None
    for job in prepare_graphs(graphs, options):
        if models is None:
            session = load(job)
            models = session.models
        else:
            folder = model_folders(job)[1]
            kind = job.program.graph.drafter.kind
            target = replace(models, drafter=None)
            session = tie(job, target if folder is None else with_drafter(target, folder, kind))
        yield session.program.graph.name, session, _facts(job, session)


def _facts(job: Job, session: Session) -> GraphFacts:
    graph = session.program.graph
    target = session.models.target
    return GraphFacts(
        name=graph.name,
        doc=graph.doc,
        model=job.options.model,
        model_hash=model_hash(model_folders(job)[0]),
        layout=graph.layout.kind,
        drafter=graph.drafter.kind,
        skeleton=graph.skeleton is not None,
        initial=graph.initial,
        states=tuple(graph.states),
        ways=tuple((s, e.to, e.when or "") for s in graph.states for e in graph.edges_from(s)),
        longest=min(target.max_positions, graph.layout.kv_slots),
        vocabulary=target.vocab_size,
        budget=session.budget,
        stop_ids=tuple(session.prompts.stop_ids),
        sampling={"temperature": graph.sampling.temperature},
    )


class PictureTaker:
    """Pictures of all engines, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self._moves: dict[str, deque[tuple[str, str, str, float]]] = {}
        self._last_time = 0.0

    def sink(self, graph: str) -> Sink:
        """Takes the events of a graph's machine."""
        moves = self._moves[graph] = deque(maxlen=MAX_MOVES)

        def happened(event: TraceEvent) -> None:
            if self.on and isinstance(event, Moved):
                moves.append((event.source, event.target, event.guard or "", event.nanos / 1e6))

        return happened

    def take(
        self, engines: Mapping[str, Engine], now: float, ended: Collection[str] = ()
    ) -> Iterator[Picture]:
        """A picture of every engine that has moved, at most every `PICTURE_INTERVAL`; of the
        graphs `ended`, whose last request has just ended, at once."""
        if not self.on:
            return
        due = now - self._last_time >= PICTURE_INTERVAL
        self._last_time = now if due else self._last_time
        for graph, moves in self._moves.items():
            if moves and (due or graph in ended):
                engine = engines[graph]
                pool = engine.pool()
                stats = engine.stats()
                yield Picture(
                    graph=graph,
                    state=engine.state,
                    runs=runs_of(pool.codes),
                    used=pool.used,
                    capacity=pool.capacity,
                    moves=[list(move) for move in moves],
                    running=stats.running,
                    waiting=stats.waiting,
                )
                moves.clear()


class ServedGraph:
    """One graph's engine and its open requests."""

    def __init__(self, session: Session, sink: Sink) -> None:
        self.positions: list[int] = []  # drafts accepted at each depth
        self.requests: dict[str, ServedRequest] = {}
        self._speculation: dict[str, Speculation] = {}
        self.engine = Engine(session, threaded=False, rounds=self._round_done, sink=sink)
        self._builder = RequestBuilder(self.engine)

    def _round_done(self, summary: RoundSummary) -> None:
        for tree in summary.trees:
            drafted = sum(token >= 0 for token in tree.tokens[1:])
            accepted = len(tree.path) - 1
            self.positions += [0] * (accepted - len(self.positions))
            for depth in range(accepted):
                self.positions[depth] += 1
            speculation = self._speculation.get(tree.branch.rpartition("/")[0])
            if speculation is not None:
                speculation.accepted.append(accepted)
                speculation.drafted.append(drafted)

    def submit(self, message: Submit, send: Callable[[Message], None]) -> None:
        """Check a request and hand it to the engine, or refuse it."""
        try:
            ready = self._builder.build(message)
        except Refusal as error:
            send(Refused(message.id, str(error), error.param, error.code))
        except PromptError as error:
            param = "messages" if message.text is None else "prompt"
            send(Refused(message.id, str(error), param))
        except Exception as error:  # of a model's tokenizer
            send(Refused(message.id, message_of(error)))
        else:
            send(Admitted(message.id, ready.prompt_tokens))
            speculation = self._speculation[message.id] = Speculation()
            handle = self.engine.submit(
                ready.prompt, timeout=message.timeout, settings=ready.settings
            )
            request = ServedRequest(self.engine, message, handle, speculation)
            self.requests[message.id] = request

    def encode(self, message: Encode) -> Encoded | Refused:
        try:
            ids = self._builder.encode(message)
        except PromptError as error:
            return Refused(message.id, str(error), "prompt")
        decode = self.engine.decode
        return Encoded(message.id, ids, [decode([token]) for token in ids])

    def step(self, send: Callable[[Message], None]) -> bool:
        """A step of the engine, if it has requests, and what it brought; whether any remain."""
        requests = [*self.requests.values()]
        if not requests:
            return False
        busy = self.engine.step()
        for request in requests:
            for message in request.output():
                send(message)
            if request.done:
                self.requests.pop(request.message.id, None)
                self._speculation.pop(request.message.id, None)
        return busy

    def counts(self) -> dict[str, Any]:
        return asdict(self.engine.stats()) | {"positions": list(self.positions)}


class EngineProcess:
    """Engines of several graphs over one target, fed through a socket until it is closed."""

    def __init__(self, pipe: WorkerSocket) -> None:
        self._pipe = pipe
        self._orders: SimpleQueue[Cancel | SnapshotRequest] = SimpleQueue()
        self._wake = Event()
        self._graphs: dict[str, ServedGraph] = {}
        self._pictures = PictureTaker()
        self._report_time = 0.0

    def run(self, start: Start) -> int:
        """Load, serve, end; the exit code."""
        try:
            facts = self._open(start)
        except Exception as error:
            self._pipe.send(Failed(int(code_of(error)), message_of(error)))
            return int(code_of(error))
        self._pipe.send(Ready({name: asdict(facts[name]) for name in facts}))
        Thread(target=self._listen, name="specsot-listen", daemon=True).start()
        while not self._pipe.closed:
            self._turn()
        return int(Code.OK)

    def _open(self, start: Start) -> dict[str, GraphFacts]:
        options = RunOptions(**{**start.options, "graph": None})
        facts: dict[str, GraphFacts] = {}
        for name, session, fact in open_graphs(start.graphs, options):
            self._graphs[name] = ServedGraph(session, self._pictures.sink(name))
            facts[name] = fact
        return facts

    def _listen(self) -> None:
        """Tokenizes on this thread, so that a long prompt does not delay the engines."""
        for message in self._pipe:
            if isinstance(message, Encode):
                self._pipe.send(self._graphs[message.graph].encode(message))
            elif isinstance(message, Decode):
                graph = next(iter(self._graphs.values()))
                self._pipe.send(Decoded(message.id, graph.engine.decode(message.token_ids)))
            elif isinstance(message, Submit):
                self._graphs[message.graph].submit(message, self._pipe.send)
            elif isinstance(message, Cancel | SnapshotRequest):
                self._orders.put(message)
            self._wake.set()
        self._wake.set()

    def _turn(self) -> None:
        """A step of every engine that has requests."""
        self._take_orders()
        busy = False
        ended = set[str]()
        for name, graph in self._graphs.items():
            before = len(graph.requests)
            busy |= graph.step(self._pipe.send)
            if before and not graph.requests:
                ended.add(name)
        self._report(ended)
        if not busy and not any(graph.requests for graph in self._graphs.values()):
            self._wake.wait(REPORT_INTERVAL)
            self._wake.clear()

    def _take_orders(self) -> None:
        while True:
            try:
                order = self._orders.get_nowait()
            except Empty:
                return
            if isinstance(order, SnapshotRequest):
                self._pictures.on = order.on
                continue
            for graph in self._graphs.values():
                if request := graph.requests.get(order.id):
                    request.handle.cancel()

    def _report(self, ended: Collection[str]) -> None:
        now = monotonic()
        engines = {name: graph.engine for name, graph in self._graphs.items()}
        for picture in self._pictures.take(engines, now, ended):
            self._pipe.send(picture)
        if now - self._report_time >= REPORT_INTERVAL:
            self._report_time = now
            self._pipe.send(Counts({name: one.counts() for name, one in self._graphs.items()}))


class WorkerProcess:
    """A worker's process: it serves one connection after another. The models of a run stay loaded.

    Args:
        load_session: loads the models of a run's job.
    """

    def __init__(self, load_session: Callable[[Mapping[str, Any]], Session] = load_job) -> None:
        self._load_session = load_session
        self.loop: WorkerLoop | None = None

    def serve(self, connection: socket.socket) -> int:
        """Serve a connection until it is closed; the exit code. Raises ProtocolError."""
        pipe = WorkerSocket(connection)
        start = pipe.receive()
        try:
            if isinstance(start, Start):
                return EngineProcess(pipe).run(start)
            if isinstance(start, Load):
                return self._serve_run(pipe, start)
        finally:
            pipe.close()
        raise ProtocolError(f"the first message is not a Start: {type(start).__name__}")

    def _serve_run(self, pipe: WorkerSocket, start: Load) -> int:
        Thread(target=_send_heartbeats, args=(pipe,), daemon=True).start()
        try:
            if self.loop is None:
                self.loop = WorkerLoop(self._load_session(start.job))
            self.loop.serve(pipe)
        except Exception as error:
            pipe.send(Failed(int(code_of(error)), message_of(error)))
            self.loop = None
            return int(code_of(error))
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
