"""Runs alone and on workers in threads, which are lost, hang, or get orders by hand."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

from specsot.engine.events import OUTLINE
from specsot.engine.models import Models, load_models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.prepare.options import ClusterBlock, GroupSize
from specsot.engine.record.recorder import Record
from specsot.engine.run.session import Session, perform
from specsot.engine.run.writer import answers_of, output_digest
from specsot.engine.workers.director import Director, directed
from specsot.engine.workers.link import Pipe, WorkerSource
from specsot.engine.workers.process import WorkerProcess
from specsot.engine.workers.protocol import (
    MAX_LINE_BYTES,
    Assign,
    BranchEnded,
    Load,
    Output,
    Regroup,
    Regrouped,
    Start,
)
from specsot.engine.workers.worker_groups import RunWorker, WorkerGroups
from specsot.engine.workers.worker_loop import TensorParallelEngine, WorkerLoop
from specsot.states.machine import Run
from specsot.states.phases.merge import Answer
from specsot.states.request import MigratedRequest
from specsot.states.text.documents import Document
from specsot.states.text.outline import Outline


class ThreadHost:
    """A worker in a thread. first: message to it. serve: serves a connection until it is closed.
    on_output: takes the bytes that it sends. flows: its messages arrive; cleared, it hangs."""

    pid: int | None = None

    def __init__(
        self,
        first: Start | Load,
        serve: Callable[[socket.socket], object],
        on_output: Callable[[bytes], None] = lambda data: None,
    ) -> None:
        self.first = first
        self.flows = Event()
        self._serve = serve
        self._on_output = on_output
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
                    self._on_output(data)
                self.flows.wait()
                sink.sendall(data)
        _shut(ends)

    def end(self) -> None:
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
    """Workers of a run in threads of this process, without Ray; they share the weights and nothing
    else. sessions: with a part of the target each, or one with all of it. processes: in the order
    of their start."""

    def __init__(self, *sessions: Session) -> None:
        self.sessions = sessions
        self.processes: list[WorkerProcess] = []
        self.source = WorkerSource(self.host, len(sessions))

    def host(self, number: int, part: int) -> ThreadHost:
        process = WorkerProcess()
        process.loop = WorkerLoop(self.sessions[part])
        self.processes.append(process)
        return ThreadHost(Load("", {}), process.serve)

    def loop(self, worker: int) -> WorkerLoop:
        loop = self.processes[worker].loop
        assert loop is not None
        return loop


CAMP = "The lake is cold in spring and warm in summer. Bring wood, water, a map and a tent. "
READ = (Document("Note", CAMP),)
"""Long enough for a prefix that is brought to others instead of being read again."""
CAMPING = Prompt("1", "Plan a weekend camping trip.")
BEES = Prompt("2", "Tell me about honey bees.", documents=READ)
KINDS = {"eagle1": "eagle1", "eagle2": "eagle2", "dflash": "dflash", "vanilla": "vanilla"}
DEADLINE = 5.0
TURNS = 20_000  # transitions after which a run on a cluster is stuck


@cache
def models_for(kind: str, packed: bool = True, part: tuple[int, int] = (0, 1)) -> Models:
    """The embedded target, or a part of it, with the embedded drafter of a kind."""
    plain = kind in ("none", "ngram")
    drafter = None if plain else embedded_folder({"eagle1": "eagle2"}.get(kind, kind))
    used = "eagle3" if plain else kind
    return load_models(embedded_folder("target"), drafter, used, packed=packed, part=part)


def session_of(
    graph: str,
    *sets: str,
    budget: int | None = 24,
    outline: Outline | None = None,
    packed: bool = True,
    part: tuple[int, int] = (0, 1),
) -> Session:
    """A shipped graph over the embedded models; part: of the target. packed: not in groups."""
    program = open_graph(graph, sets=sets)
    models = models_for(program.graph.drafter.kind, packed, part)
    return Session(program, models, max_new_tokens=budget, outline=outline)


@dataclass
class Ran:
    digest: str
    answers: tuple[Answer, ...]
    director: Director
    memory: list[dict[str, Any]]
    records: list[Record]
    figures: dict[str, Any]

    def told(self, event: str) -> list[Record]:
        return [one for one in self.records if one.get("event") == event]


@dataclass
class Chaos:
    """Loses the worker `whom` once, as soon as `when` holds; `watch` sees every later
    transition."""

    when: Callable[[Director, Run], bool]
    whom: Callable[[Director], RunWorker]
    lose: Callable[[RunWorker], None] = field(default=lambda member: member.cut("was cut"))
    lost: list[str] = field(default_factory=list)
    watch: Callable[[Director, Run], None] = field(default=lambda director, run: None)

    def look(self, director: Director, run: Run) -> None:
        if self.lost:
            self.watch(director, run)
        elif self.when(director, run):
            member = self.whom(director)
            self.lost.append(member.name)
            self.lose(member)


def alone(session: Session, prompts: Sequence[Prompt]) -> str:
    run, _, _ = perform(session, prompts)
    return output_digest(answers_of(run.manager.requests, session.prompts))


def on_workers(
    session: Session,
    prompts: Sequence[Prompt],
    *,
    workers: int = 2,
    source: WorkerSource | None = None,
    chaos: Chaos | None = None,
    deadline: float = DEADLINE,
    skeleton: int = 1,
    branches: int = 1,
) -> Ran:
    """The same on workers, by default in threads of this process; so many of them write an outline
    together (skeleton), and so many a branch."""
    records: list[Record] = []
    sizes = {"skeleton": GroupSize(tp=skeleton), "branches": GroupSize(tp=branches)}
    block = ClusterBlock(workers=workers, deadline=deadline, **sizes)
    source = source or ThreadWorkers(session).source
    with closing(WorkerGroups(source, block)) as groups:
        groups.load_()
        run, recorder = directed(groups, session, prompts, records.append)
        director: Director = run.board["cluster"]
        while not run.finished:
            if chaos is not None:
                chaos.look(director, run)
            run.advance()
            assert run.steps < TURNS, f"stuck in {run.state}"
        recorder.flush()
        answers = answers_of(run.manager.requests, session.prompts)
        figures = recorder.figures(run.board)
        memory = [held for one in director.count_().values() for held in one.memory]
        return Ran(output_digest(answers), answers, director, memory, records, figures)


def checked_run(session: Session, prompts: Sequence[Prompt] = (CAMPING,), **settings: Any) -> Ran:
    """A run on workers whose digest is that of an ordinary run."""
    ran = on_workers(session, prompts, **settings)
    assert ran.digest == alone(session, prompts)
    return ran


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def listeners(port: int) -> set[str]:
    """Addresses of this machine at which a process listens on a port, in hexadecimal."""
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}", encoding="ascii") as table:
            rows = [line.split() for line in table][1:]
        listening = [row[1].split(":") for row in rows if row[3] == "0A"]
        found |= {address for address, number in listening if number == f"{port:04X}"}
    return found


def before_regroup(director: Director, run: Run) -> bool:
    return run.state == "parse"


def branches_given(director: Director, run: Run) -> bool:
    return run.state == "parallel"


def outline_begun(director: Director, run: Run) -> bool:
    roots = (one.request.root for one in director.states)
    return any(root is not None and not root.ended and root.tokens for root in roots)


def mid_branch(director: Director, run: Run) -> bool:
    branches = (b for one in director.states for b in one.request.branches)
    return any(len(b.tokens) > 4 and not b.ended for b in branches)


def decoder(director: Director) -> RunWorker:
    pairs = (pair for state in director.states for pair in state.assigned.items())
    return next(group.leader for index, group in pairs if index != OUTLINE)


def last(director: Director) -> RunWorker:
    """The worker that was ready last; of several that compute together never the first."""
    return director.workers.ready[-1]


class Together:
    """Each worker decodes branches; `tp` of them write outlines."""

    def __init__(self, graph: str, tp: int) -> None:
        self.tp = tp
        self.hosts = ThreadWorkers(session_of(graph, packed=tp == 1))
        block = ClusterBlock(workers=2, deadline=20.0, skeleton=GroupSize(tp=tp))
        self.workers = WorkerGroups(self.hosts.source, block)
        self.workers.load_()
        self.workers.on_output = self._took
        self._works, self._written = 0, list[int]()
        self._ended = list[BranchEnded]()

    def _took(self, member: RunWorker, output: Output) -> None:
        if isinstance(output, BranchEnded):
            self._ended.append(output)
        else:
            self._written += output.tokens

    def outlined(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """In a new group an outline is written, its end alone if it was before; ids of what is kept
        of it, and its rows."""
        self.workers.form_()
        self._works += 1
        self._written = self._written[:-2]
        handed = MigratedRequest(outline=tuple(self._written))
        order = Assign(f"{self._works}", BEES, handed, self.tp, 0)
        for member in self.workers.group[: self.tp]:
            member.send(order)
        until = monotonic() + 60
        while not self._ended and monotonic() < until:
            self.workers.receive_()
        ended = self._ended.pop()
        assert ended.rows
        cache = self.engine(0, self.tp).engine.manager.prefixes
        assert cache is not None
        kept = max(cache.nodes.values(), key=lambda one: one.end)
        path = cache.segments.path(kept.segment)[::-1]
        ids = [token for one in path for token in cache.nodes[one].tokens.tolist()]
        return tuple(ids[: ended.rows[0]]), ended.rows

    def forget(self, *workers: int) -> None:
        """These drop what they have for branches, so that they want it again."""
        for worker in workers:
            cache = self.engine(worker, 1).engine.manager.prefixes
            assert cache is not None
            cache.evict_to_(0)
            cache.check_integrity()
            cache.pools[0].check_integrity()

    def regroup(self, number: int, ids: tuple[int, ...], rows: tuple[int, ...]) -> list[Regrouped]:
        """Both replies; the first group of those that write outlines has the rows."""
        source = 0 if self.tp > 1 else self.workers.group[0].single.number
        order = Regroup(number, self.workers.epoch, self.tp, source, ids, rows)
        orders = dict.fromkeys(self.workers.group, order)
        replies = [*self.workers.collect_(Regrouped, orders).values()]
        assert len(replies) == 2
        return replies

    def weights(self) -> list[tuple[int, ...]]:
        """Where all weights lie that each of them computes with: its own, and those of a rank."""
        engines = [self.engine(worker, tp) for worker in range(2) for tp in {1, self.tp}]
        models = [one.session.models.target for one in engines]
        return [tuple(w.data_ptr() for w in model.parameters()) for model in models]

    def engine(self, worker: int, tp: int) -> TensorParallelEngine:
        return self.hosts.loop(worker).engines[tp]

    def close(self) -> None:
        self.workers.close()
