"""The workers of a run as its director has them: loaded, joined in process groups, replaced when
lost.

The director is not asynchronous: every call that waits runs the event loop of its workers.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ..errors import ClusterError
from ..prepare.options import ClusterBlock
from .link import Membership, WorkerLink, WorkerSource
from .process_groups import Store, ranks_of_groups
from .protocol import FormGroup, Grouped, Message, Order, Reply

MAX_FAILURES = 3  # workers in a row that are lost before they were in a group
RECEIVE_INTERVAL = 0.2  # seconds that one call waits for messages at most
NO_EPOCH = -1

Report = Callable[[Mapping[str, Any]], None]


@dataclass(eq=False)
class RunWorker(WorkerLink):
    """A worker, until it is lost. part: of the weights. epoch, rank: of its process group, or of
    none; proven: it was in one. single: its worker group of one."""

    part: int = 0
    epoch: int = NO_EPOCH
    rank: int = 0
    proven: bool = False
    single: "WorkerGroup" = field(init=False)

    def __post_init__(self) -> None:
        self.single = WorkerGroup((self,))


@dataclass(eq=False, slots=True)
class WorkerGroup:
    """Workers that decode together, as one; only the first sends replies. A group of one lives as
    long as its worker, one of several as long as the process group.

    place: its number among those of its size.
    """

    workers: tuple[RunWorker, ...]
    place: int = 0

    @property
    def leader(self) -> RunWorker:
        return self.workers[0]

    @property
    def tp(self) -> int:
        return len(self.workers)

    @property
    def number(self) -> int:
        """In orders."""
        return self.place if self.tp > 1 else self.leader.rank

    @property
    def name(self) -> str:
        return "+".join(worker.name for worker in self.workers)

    @property
    def max_branches(self) -> int:
        """Branches that it decodes concurrently."""
        greeting = self.leader.greeting
        return 0 if greeting is None else greeting.max_branches


Handler = Callable[[RunWorker, Reply], None]


class WorkerGroups:
    """A number of workers, and the process group that they form.

    report: takes what happens to workers, for the trace. workers: that are not lost. losses: number
    of lost workers. epoch: of the latest group. Raises UsageError: this machine does not have the
    block's interface.
    """

    def __init__(self, source: WorkerSource, block: ClusterBlock, report: Report) -> None:
        self.store = Store(block.interface, block.deadline)
        self.block = block
        self.report = report
        self.workers: list[RunWorker] = []
        self.epoch = NO_EPOCH
        self.losses = 0
        self._parts = source.parts
        self._num_started = 0
        self._failures = 0
        self._why = ""
        self._size = 0
        self._groups = dict[int, list[WorkerGroup]]()
        self._messages = deque[tuple[RunWorker, Message]]()
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._members = Membership[RunWorker](
            source, deadline=block.deadline, on_message=self._queue, on_state=self._moved
        )
        self._loop.run_until_complete(self._members.open())

    # -- names of the workers ---------------------------------------------------------------------

    @property
    def ready(self) -> list[RunWorker]:
        """Workers whose models are loaded."""
        return [worker for worker in self.workers if worker.ready]

    @property
    def eligible(self) -> list[RunWorker]:
        """Workers that can be in a group, by rank. With parts of the weights they are as many of
        each part as make whole groups, the first part first."""
        if self._parts == 1:
            return self.ready
        per_part = self.block.together // self._parts  # in a worker group
        by_part = [
            [worker for worker in self.ready if worker.part == part] for part in range(self._parts)
        ]
        count = min(map(len, by_part)) // per_part * per_part
        return [worker for workers in by_part for worker in workers[:count]]

    @property
    def group(self) -> list[RunWorker]:
        """Members of the process group, by rank."""
        members = [one for one in self.ready if one.epoch == self.epoch != NO_EPOCH]
        return sorted(members, key=lambda worker: worker.rank)

    @property
    def complete(self) -> bool:
        """Whether all members of the latest process group are in it."""
        return len(self.group) == self._size

    def groups(self, tp: int) -> list[WorkerGroup]:
        """Worker groups of a size."""
        if tp == 1:
            return [worker.single for worker in self.ready]
        return self._groups.get(tp, [])

    @property
    def writers(self) -> list[WorkerGroup]:
        """Groups that write outlines."""
        return self.groups(self.block.skeleton.tp)

    @property
    def decoders(self) -> list[WorkerGroup]:
        """Groups that decode branches."""
        return self.groups(self.block.branches.tp)

    @property
    def outdated(self) -> bool:
        """Whether a worker is missing, or eligible for the group and not in it."""
        return len(self.workers) < self.block.workers or self.group != self.eligible

    def send_all(self, order: Order) -> None:
        """Send an order to all members of the process group."""
        for worker in self.group:
            worker.post(order)

    # -- starting and losing workers --------------------------------------------------------------

    def fill_(self) -> None:
        """Start the workers that are missing; raises ClusterError."""
        while len(self.workers) < self.block.workers:
            if self._failures >= MAX_FAILURES:
                raise ClusterError(f"{MAX_FAILURES} workers in a row were lost: {self._why}")
            counts = Counter(worker.part for worker in self.workers)
            part = min(range(self._parts), key=lambda part: counts[part])
            spec = self._members.source.spec(self._num_started, part)
            worker = RunWorker(f"worker-{self._num_started}", spec, self._members, part=part)
            self._num_started += 1
            self._loop.run_until_complete(self._start(worker))
            self.workers.append(worker)

    async def _start(self, worker: RunWorker) -> None:
        self._members.start(worker)

    def load_(self) -> None:
        """Wait until all workers have loaded their models; raises ClusterError."""
        while len(self.ready) < self.block.workers:
            self.fill_()
            self.receive_(lambda worker, reply: None)  # there are no orders yet

    def _queue(self, worker: RunWorker, message: Message) -> None:
        self._messages.append((worker, message))
        self._changed.set()

    def _moved(self, worker: RunWorker) -> None:
        if worker.ready and self.epoch != NO_EPOCH:
            assert worker.greeting is not None
            self.report({"event": "worker", "worker": worker.name, "pid": worker.greeting.pid})
        self._changed.set()

    def receive_(self, handle: Handler, seconds: float = RECEIVE_INTERVAL) -> None:
        """Handle the messages of workers; waits up to `seconds` for the first."""
        self._loop.run_until_complete(self._wait(seconds))
        while self._messages:
            worker, message = self._messages.popleft()
            if worker not in self.workers:
                continue
            if isinstance(message, Grouped) and message.epoch == worker.epoch:
                worker.epoch = NO_EPOCH  # a collective failed: there has to be another group
                event = {"event": "group_lost", "worker": worker.name, "why": message.error}
                self.report(event)
            elif isinstance(message, Reply):
                handle(worker, message)
        for worker in [one for one in self.workers if one.dead or one.closed]:
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

    def receive_from_(
        self, workers: Sequence[RunWorker], replies: Mapping[RunWorker, Any], handle: Handler
    ) -> None:
        """Handle messages until each of these workers has a reply, or is lost."""
        while any(worker in self.workers and worker not in replies for worker in workers):
            self.receive_(handle)

    def close(self) -> None:
        """End all workers; those of a standing cluster are free again."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._members.close())
            self._loop.run_until_complete(self._members.ended())
            self._loop.close()

    # -- groups -----------------------------------------------------------------------------------

    def form_(self, handle: Handler) -> None:
        """Form a new group of all eligible workers, once there is one.

        handle: takes all other replies that arrive in the meantime. Raises ClusterError: all
        workers are ready, and parts of the weights are missing.
        """
        self.fill_()
        while not self.eligible:
            if len(self.ready) >= self.block.workers:
                parts = sorted(worker.part for worker in self.ready)
                raise ClusterError(f"incomplete tensor-parallel group: workers have parts {parts}")
            self.receive_(handle)
            self.fill_()
        self.epoch += 1
        start = monotonic()
        workers = self.eligible
        self._size = len(workers)
        self._groups = {}
        for rank, worker in enumerate(workers):
            worker.rank = rank
            order = FormGroup(
                epoch=self.epoch,
                rank=rank,
                size=len(workers),
                host=self.store.address,
                port=self.store.port,
                deadline=self.block.deadline,
                skeleton=self.block.skeleton.tp,
                branches=self.block.branches.tp,
            )
            worker.post(order)
        errors: dict[RunWorker, str] = {}

        def handle_group(worker: RunWorker, reply: Reply) -> None:
            if not isinstance(reply, Grouped):
                handle(worker, reply)
            elif reply.epoch == self.epoch:
                errors[worker] = reply.error

        self.receive_from_(workers, errors, handle_group)
        for worker, error in errors.items():
            worker.epoch = NO_EPOCH if error else self.epoch
        members = self.group
        for worker in members:
            self._failures = self._failures if worker.proven else 0
            worker.proven = True
        if self.complete:
            for tp in {self.block.skeleton.tp, self.block.branches.tp} - {1}:
                self._groups[tp] = [
                    WorkerGroup(tuple(members[rank] for rank in ranks), place)
                    for place, ranks in enumerate(
                        ranks_of_groups(len(members), tp, self.block.together)
                    )
                ]
        names = [worker.name for worker in members]
        seconds = monotonic() - start
        self.report({"event": "group", "epoch": self.epoch, "members": names, "seconds": seconds})
        if why := [f"{worker.name}: {error}" for worker, error in errors.items() if error]:
            self.report({"event": "no_group", "why": why})
