"""A worker of a run: it executes orders between the steps of its engines.

Workers that compute together must start the same requests at the same step, as each of them decides
for itself all that follows from logits. So orders that concern several workers are sent to all in
one order, and before a common step the first rank says how many of these it has: every rank takes
exactly that many. A worker whose engines are all its own takes orders as they come.
"""

import gc
import json
import os
import resource
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any

from ...models.sharded import RankLost
from ...states.graph.load import load_program, op_table
from ...states.round import RoundSummary
from ...states.yaml.source import Source, decode
from ..errors import message_of
from ..models import has_parts
from ..prepare.job import Job
from ..prepare.options import SESSION, ClusterBlock, RunOptions
from ..prepare.repeat import graph_yaml
from ..record.metrics import Meter
from ..run.session import Session, load
from .prefix_exchange import PrefixExchange
from .process_groups import GroupMembership, ProcessGroup, StoreClient
from .protocol import (
    Assign,
    Cancel,
    CountWork,
    FormGroup,
    Grouped,
    GroupLost,
    Loaded,
    Order,
    Regroup,
    Regrouped,
    Reply,
    WorkCounts,
    WorkerSocket,
)
from .tensor_parallel import TensorParallelEngine
from .work_counts import counts_of

IDLE_INTERVAL = 0.2  # seconds between two checks whether an idle worker shall end


def parts_of(job: Job, block: ClusterBlock) -> int:
    """Parts of the weights, of which every worker loads one."""
    return block.parts if has_parts(job.options.weights) else 1


def job_values(job: Job, block: ClusterBlock, number: int, part: int) -> dict[str, Any]:
    """What a worker has to know, as JSON values: the graph, and the options that decide on models.

    Args:
        number: of the worker, which gets a device by it. part: of the weights, of `parts_of`.
    """
    options = {name: asdict(job.options)[name] for name in SESSION}
    options = {name: value for name, value in options.items() if name not in ("outline", "sets")}
    if block.devices:
        options["device"] = block.devices[number % len(block.devices)]
    options |= {"skip_scan": job.options.skip_scan, "profile": None, "graph": job.options.graph}
    values = {
        "graph": graph_yaml(job.program.graph),
        "options": options,
        "packed": block.together == 1,
        "part": (part, parts_of(job, block)),
    }
    return dict(json.loads(json.dumps(values)))


def load_job(values: Mapping[str, Any]) -> Session:
    """A worker's session; weights that several workers compute with are not packed."""
    name = str(values["options"]["graph"])
    source = Source(decode(values["graph"].encode(), name), name)
    job = Job(load_program(source, op_table()), RunOptions(**values["options"]), ())
    return load(job, packed=values["packed"], part=tuple(values["part"]))


def is_shared(order: Order) -> bool:
    """Whether all workers of the group get an order, in the same order among all of these."""
    together = isinstance(order, Assign) and order.tp > 1
    return together or isinstance(order, FormGroup | Regroup | Cancel)


class OrderQueue:
    """Orders in order of arrival; put in by one thread, taken by another."""

    def __init__(self) -> None:
        self._arrived: SimpleQueue[Order | None] = SimpleQueue()
        self._read: deque[Order] = deque()

    def put(self, order: Order | None) -> None:
        """Never waits; None wakes the thread that waits."""
        self._arrived.put(order)

    def pop(self, seconds: float = 0.0) -> Order | None:
        """The next order; waits up to `seconds` for it."""
        if not self._read:
            try:
                return self._arrived.get(timeout=seconds)
            except Empty:
                return None
        return self._read.popleft()

    def pop_unshared(self) -> Order | None:
        """The next order, unless it is shared."""
        self._read_all()
        return self._read.popleft() if self._read and not is_shared(self._read[0]) else None

    def count_shared(self) -> int:
        """Shared orders that have arrived."""
        self._read_all()
        return sum(map(is_shared, self._read))

    def _read_all(self) -> None:
        while not self._arrived.empty():
            if (order := self._arrived.get()) is not None:
                self._read.append(order)


class WorkerLoop:
    """Engines of a worker and the thread that drives them, for one driver after another.

    Attributes:
        engines: by tp. The one with tp 1 stays; the others start and end with their group.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.engines: dict[int, TensorParallelEngine] = {}
        self.groups: GroupMembership | None = None
        self.meter = Meter()
        self._client = StoreClient()
        self._orders = OrderQueue()
        self._pipe: WorkerSocket | None = None

    def serve(self, pipe: WorkerSocket) -> None:
        """Serve a driver until its connection is closed."""
        self._pipe = pipe
        self._orders = OrderQueue()
        self.meter = Meter()
        weights = [*self.session.models.target.parameters()]
        loaded = Loaded(
            pid=os.getpid(),
            max_branches=self.session.program.graph.layout.max_num_branches,
            weights=(weights[0].data_ptr(), sum(one.nbytes for one in weights)),
        )
        pipe.send(loaded)
        Thread(target=self._listen, args=(pipe, self._orders), daemon=True).start()
        while not pipe.closed:
            self._turn()
        self._leave()
        for engine in self.engines.values():
            engine.drop()

    def _listen(self, pipe: WorkerSocket, orders: OrderQueue) -> None:
        for message in pipe:
            if isinstance(message, Order):
                orders.put(message)
        orders.put(None)

    def _send(self, reply: Reply) -> None:
        assert self._pipe is not None
        self._pipe.send(reply)

    # -- a turn -----------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Execute orders, then make a step with every busy engine; waits a little if none is."""
        common = self._common
        try:
            if common is None:
                self._take_orders()
            else:
                self._take_orders_with(common)
            if self._common is common:  # else the other ranks must be asked first
                for engine in [*self.engines.values()]:
                    engine.step()
        except RankLost as error:
            self._lose_group(str(error))

    @property
    def _common(self) -> TensorParallelEngine | None:
        """The largest busy engine of several ranks, which make the next step together."""
        busy = [engine for engine in self.engines.values() if engine.busy and engine.ranks]
        return busy[0] if busy else None

    def _take_orders(self) -> None:
        """Execute all orders, up to one that starts common work."""
        busy = any(engine.busy for engine in self.engines.values())
        order = self._orders.pop(0.0 if busy else IDLE_INTERVAL)
        while order is not None:
            self._execute(order)
            order = self._orders.pop() if self._common is None else None

    def _take_orders_with(self, common: TensorParallelEngine) -> None:
        """Execute as many shared orders as the first rank has, and all others.

        Raises:
            RankLost: the other ranks did not come, or the orders that they have.
        """
        assert self.groups is not None
        count = common.agree(self._orders.count_shared())
        while count and self._common is common:
            order = self._orders.pop(self.groups.order.deadline)
            if order is None:
                raise RankLost("orders of the other ranks did not come")
            count -= is_shared(order)
            self._execute(order)
        while self._common is common and (order := self._orders.pop_unshared()) is not None:
            self._execute(order)

    def _execute(self, order: Order) -> None:
        match order:
            case FormGroup():
                self._send(self._form_group(order))
            case Assign():
                self._assign(order)
            case Regroup():
                self._send(self._regroup(order))
            case Cancel():
                for engine in self.engines.values():
                    engine.cancel(order.id)
            case CountWork():
                self._send(self._count(order.number))

    def _assign(self, order: Assign) -> None:
        """Start a part of a request; an order for a group that has ended is void."""
        if order.tp == 1:
            self._engine(1).assign(order)
        elif order.tp in self.engines and self._number(order.tp) == order.group:
            self.engines[order.tp].assign(order)

    def _engine(self, tp: int, group: ProcessGroup | None = None) -> TensorParallelEngine:
        """The engine of a tp; starts it if there is none."""
        if tp not in self.engines:
            ranks = None if group is None else group.ranks
            engine = TensorParallelEngine(self.session, self._send, self._round_done, ranks)
            self.engines[tp] = engine
            self.engines = {tp: self.engines[tp] for tp in sorted(self.engines, reverse=True)}
        return self.engines[tp]

    def _number(self, tp: int) -> int | None:
        return None if self.groups is None else self.groups.number_of(tp)

    # -- groups -----------------------------------------------------------------------------------

    def _form_group(self, order: FormGroup) -> Grouped:
        assert self._pipe is not None
        start = perf_counter()
        error = ""
        self._leave()
        try:
            groups = GroupMembership(order, self._client, self._pipe.address)
            for tp, (_, group) in groups.groups.items():
                self._engine(tp, group)
            self.groups = groups
        except RuntimeError as failure:
            self._leave()
            error = message_of(failure)
        return Grouped(order.epoch, perf_counter() - start, error)

    def _leave(self) -> None:
        """Leave all groups, and drop what was computed in them."""
        self.groups = None
        shared = [tp for tp, engine in self.engines.items() if engine.ranks]
        for tp in shared:
            self.engines.pop(tp).close()
        if shared:
            gc.collect()  # pools are large, and sockets few

    def _lose_group(self, error: str) -> None:
        assert self.groups is not None
        epoch = self.groups.order.epoch
        self._leave()
        self._send(GroupLost(epoch, error))

    def _regroup(self, order: Regroup) -> Regrouped:
        groups = self.groups
        start = perf_counter()
        failed = Regrouped(
            number=order.number,
            bytes=0,
            stored=False,
            seconds=0.0,
            collective=0.0,
            error="is not in this group",
        )
        if groups is None or groups.order.epoch != order.epoch:
            return failed
        try:
            is_source = self._number(order.tp) == order.group
            exchange = PrefixExchange(
                order,
                self.session,
                groups,
                source=self.engines.get(order.tp) if is_source else None,
                destination=self.engines.get(groups.order.branches),
            )
            reply = exchange.perform()
        except RuntimeError as failure:
            self._leave()
            seconds = perf_counter() - start
            error = message_of(failure)
            return replace(failed, seconds=seconds, collective=seconds, error=error)
        return replace(reply, seconds=perf_counter() - start)

    # -- counters ---------------------------------------------------------------------------------

    def _round_done(self, summary: RoundSummary) -> None:
        self.meter.forward_done(summary, 0)

    def _count(self, number: int) -> WorkCounts:
        meter = self.meter
        self.meter = Meter()
        return WorkCounts(
            number=number,
            counts=counts_of(meter),
            memory=[engine.figures(meter) for engine in reversed(self.engines.values())],
            open_files=len(os.listdir("/dev/fd")),
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
