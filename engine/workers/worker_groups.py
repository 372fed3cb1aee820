"""The workers of a run: loaded, joined in process groups, replaced when lost. Their user is not
asynchronous: every call that waits runs the event loop of the workers."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, TypeVar

from ..errors import ClusterError
from ..prepare.options import ClusterBlock
from .link import HangLimits, Membership, WorkerLink, WorkerSource
from .protocol import FormGroup, Grouped, Message, NumberedReply, Order, Output
from .worker_loop import open_store, ranks_of_groups

MAX_FAILURES = 3  # workers in a row that are lost before they were in a group
RECEIVE_INTERVAL = 0.2  # seconds that one call waits for messages at most
NO_GROUP = -1
Reply = TypeVar("Reply")


@dataclass(eq=False)
class RunWorker(WorkerLink):
    """A worker until it is lost. part: of the weights. proven: was in a group. single: its own."""

    part: int = 0
    proven: bool = False
    single: "WorkerGroup" = field(init=False)

    def __post_init__(self) -> None:
        self.single = WorkerGroup((self,))


@dataclass(eq=False, slots=True)
class WorkerGroup:
    """Workers that decode together; the first one sends replies. A group of one lives as long as
    its worker. number: among those of its size; of a single worker its rank."""

    workers: tuple[RunWorker, ...]
    number: int = 0

    @property
    def leader(self) -> RunWorker:
        return self.workers[0]

    @property
    def tp(self) -> int:
        return len(self.workers)

    @property
    def name(self) -> str:
        return "+".join(worker.name for worker in self.workers)


class WorkerGroups(Membership[RunWorker]):
    """Workers and the process group that they form. report: takes what happens to workers, for the
    trace; on_output: what they decode. workers: that are not lost. epoch: of the latest group;
    members: that have not left it. Raises UsageError: no such interface on this machine."""

    def __init__(self, source: WorkerSource, block: ClusterBlock) -> None:
        super().__init__(source, HangLimits(block.deadline))
        self._store = open_store(block.interface, block.deadline)
        self.block = block
        self.report: Callable[[Mapping[str, Any]], None] = lambda record: None
        self.on_output: Callable[[RunWorker, Output], None] = lambda worker, output: None
        self.workers: list[RunWorker] = []
        self.epoch = NO_GROUP
        self.members: set[RunWorker] = set()
        self.losses = 0
        self._numbers = count()
        self._failures = 0
        self._why = ""
        self._size = 0
        self._groups = dict[int, list[WorkerGroup]]()
        self._messages = deque[tuple[RunWorker, Message]]()
        self._expected = set[tuple[type[Any], int]]()  # kinds and numbers of replies
        self._replies = dict[RunWorker, Any]()
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self.open_services())

    @property
    def ready(self) -> list[RunWorker]:
        """Workers whose models are loaded."""
        return [worker for worker in self.workers if worker.ready]

    @property
    def eligible(self) -> list[RunWorker]:
        """Workers that can be in a group, by rank: equally many of each part of the weights."""
        parts = self.source.parts
        if parts == 1:
            return self.ready
        per_part = self.block.together // parts  # in a worker group
        by_part = [[one for one in self.ready if one.part == part] for part in range(parts)]
        length = min(map(len, by_part)) // per_part * per_part
        return [worker for workers in by_part for worker in workers[:length]]

    @property
    def group(self) -> list[RunWorker]:
        """Members of the process group, by rank."""
        return sorted(self.members & {*self.ready}, key=lambda worker: worker.single.number)

    @property
    def complete(self) -> bool:
        """Whether all members of the latest process group are in it."""
        return len(self.group) == self._size

    def groups(self, tp: int) -> list[WorkerGroup]:
        return [one.single for one in self.ready] if tp == 1 else self._groups.get(tp, [])

    @property
    def writers(self) -> list[WorkerGroup]:
        return self.groups(self.block.skeleton.tp)

    @property
    def decoders(self) -> list[WorkerGroup]:
        return self.groups(self.block.branches.tp)

    def fill_(self) -> None:
        """Start the workers that are missing; raises ClusterError."""
        while len(self.workers) < self.block.workers:
            if self._failures >= MAX_FAILURES:
                raise ClusterError(f"{MAX_FAILURES} workers in a row were lost: {self._why}")
            counts = Counter(worker.part for worker in self.workers)
            part = min(range(self.source.parts), key=lambda part: counts[part])
            number = next(self._numbers)
            worker = RunWorker(f"worker-{number}", self.source.host(number, part), self, part=part)
            self._loop.call_soon(self.start, worker)
            self.workers.append(worker)

    def load_(self) -> None:
        """Wait until all workers have loaded their models; raises ClusterError."""
        while len(self.ready) < self.block.workers:
            self.fill_()
            self.receive_()

    def on_message(self, link: RunWorker, message: Message) -> None:
        self._messages.append((link, message))
        self._changed.set()

    def on_state(self, link: RunWorker) -> None:
        if link.ready and self.epoch != NO_GROUP:
            self.report({"event": "worker", "worker": link.name, "pid": link.greeting.pid})
        self._changed.set()

    def receive_(self, seconds: float = RECEIVE_INTERVAL) -> None:
        """Handle the messages of workers; waits up to `seconds` for the first."""
        self._loop.run_until_complete(self._wait(seconds))
        while self._messages:
            worker, message = self._messages.popleft()
            if worker not in self.workers:
                continue
            if isinstance(message, Grouped) and worker in self.members:
                self.members.remove(worker)  # a collective failed: there has to be another group
                self.report({"event": "group_lost", "worker": worker.name, "why": message.error})
            elif isinstance(message, NumberedReply):
                if (type(message), message.number) in self._expected:
                    self._replies[worker] = message
            elif isinstance(message, Output):
                self.on_output(worker, message)
        for worker in [one for one in self.workers if one.ended]:
            self.workers.remove(worker)
            self.losses += 1
            self._why = worker.why
            self._failures += not worker.proven
            self.report({"event": "lost", "worker": worker.name, "why": self._why})

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(0)
        if not seconds:
            await asyncio.sleep(0)  # what the first one has read
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    def collect_(self, kind: type[Reply], orders: dict[RunWorker, Order]) -> dict[RunWorker, Reply]:
        """The replies to orders, without those of workers that are lost meanwhile."""
        self._expected = {(kind, order.number) for order in orders.values()}
        replies = self._replies = {}
        for worker, order in orders.items():
            worker.send(order)
        while any(worker in self.workers and worker not in replies for worker in orders):
            self.receive_()
        return replies

    def close(self) -> None:
        """End all workers; those of a standing cluster are free again."""
        if not self._loop.is_closed():
            self._loop.call_soon(self.end_all)
            self._loop.run_until_complete(self.ended())
            self._loop.close()

    def form_(self) -> None:
        """Form a new group, once some are eligible. Raises ClusterError: parts are missing."""
        self.fill_()
        while not self.eligible:
            if len(self.ready) >= self.block.workers:
                parts = sorted(worker.part for worker in self.ready)
                raise ClusterError(f"incomplete tensor-parallel group: workers have parts {parts}")
            self.receive_()
            self.fill_()
        self.epoch += 1
        self.members = set()
        start = monotonic()
        workers = self.eligible
        self._size = len(workers)
        self._groups = {}
        orders: dict[RunWorker, Order] = {}
        port = self._store.port
        for rank, worker in enumerate(workers):
            worker.single.number = rank
            orders[worker] = FormGroup(self.epoch, rank, self._size, port, block=self.block)
        replies = self.collect_(Grouped, orders)
        self.members = {worker for worker, reply in replies.items() if not reply.error}
        members = self.group
        for worker in members:
            self._failures = self._failures if worker.proven else 0
            worker.proven = True
        if self.complete:
            for tp in {self.block.skeleton.tp, self.block.branches.tp} - {1}:
                ranks_of = ranks_of_groups(len(members), tp, self.block.together)
                self._groups[tp] = [
                    WorkerGroup(tuple(members[rank] for rank in ranks), number)
                    for number, ranks in enumerate(ranks_of)
                ]
        names = [worker.name for worker in members]
        seconds = monotonic() - start
        self.report({"event": "group", "epoch": self.epoch, "members": names, "seconds": seconds})
        if why := [f"{worker.name}: {one.error}" for worker, one in replies.items() if one.error]:
            self.report({"event": "no_group", "why": why})
