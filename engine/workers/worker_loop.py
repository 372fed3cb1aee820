"""A worker of a run: it executes orders between the steps of its engines.

Workers that compute together must start the same requests at the same step, as each of them decides
for itself all that follows from logits. So orders that concern several workers are sent to all in
one order, and before a common step the first rank says how many of these it has: every rank takes
exactly that many.
"""

import gc
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from queue import Empty, Queue
from threading import Thread
from time import perf_counter
from typing import Any, Protocol

from ...models.sharded import RankLost, Ranks, ShardedDecoder, sharded
from ...states.graph.load import load_program, op_table
from ...states.machine import Sink
from ...states.round import RoundSummary
from ...states.yaml.source import Source, decode
from ..errors import message_of
from ..events import OUTLINE, BranchFinished, Committed
from ..models import has_parts
from ..prepare.job import Job
from ..prepare.options import SESSION, ClusterBlock, RunOptions
from ..prepare.repeat import graph_yaml
from ..record.metrics import Meter, held_figures
from ..request_settings import RequestSettings
from ..run.engine import Engine, EngineError, Handle
from ..run.session import Session, load
from . import protocol
from .process_groups import GroupMembership, connect, exchange_prefix

IDLE_INTERVAL = 0.2  # seconds between two checks whether an idle worker shall end


def parts_of(job: Job, block: ClusterBlock) -> int:
    """Parts of the weights, of which every worker loads one."""
    return block.parts if has_parts(job.options.weights) else 1


def job_values(job: Job, block: ClusterBlock, number: int, part: int) -> dict[str, Any]:
    """The graph, and the options that decide on models, as JSON values. number: of the worker,
    which gets a device by it. part: of the weights, of `parts_of`."""
    names = [name for name in SESSION if name not in ("outline", "sets")]
    options = {name: asdict(job.options)[name] for name in names}
    if block.devices:
        options["device"] = block.devices[number % len(block.devices)]
    options |= {"skip_scan": job.options.skip_scan, "profile": None, "graph": job.options.graph}
    return {
        "graph": graph_yaml(job.program.graph),
        "options": options,
        "packed": block.together == 1,
        "part": [part, parts_of(job, block)],
    }


def load_job(values: Mapping[str, Any]) -> Session:
    """A worker's session; weights that several workers compute with are not packed."""
    name = str(values["options"]["graph"])
    source = Source(decode(values["graph"].encode(), name), name)
    job = Job(load_program(source, op_table()), RunOptions(**values["options"]), ())
    return load(job, packed=values["packed"], part=tuple(values["part"]))


class AssignedPart:
    """A part of a request in an engine: its new tokens, the ends of its branches, or the end of its
    outline with the rows of the prefix that others can get, once these are retained."""

    def __init__(self, order: protocol.Assign, handle: Handle, engine: Engine) -> None:
        assert handle.request is not None
        self.handle = handle
        self.done = False
        self._id = order.id
        self._engine = engine
        self._request = handle.request
        self._writes_outline = not order.part.branches
        self._num_read = 0  # events of the handle
        self._resumed = {branch.index: len(branch.tokens) for branch in order.part.branches}
        self._resumed[OUTLINE] = len(order.part.outline)
        self._last: protocol.BranchEnded | None = None

    def output(self) -> Iterator[protocol.Output]:
        self._request = self.handle.request or self._request  # another one, if it was run again
        events = self.handle.since(self._num_read)
        self._num_read += len(events)
        for event in events:
            if isinstance(event, Committed):  # at first also what another worker wrote
                if tokens := event.tokens[self._resumed.pop(event.branch, 0) :]:
                    yield replace(event, request=self._id, tokens=tokens)
            elif isinstance(event, BranchFinished):
                self._last = protocol.BranchEnded(self._id, event.index, event.finish, event.note)
                if not self._writes_outline:
                    yield self._last
        self.done = self.handle.done
        if self.done and self._writes_outline and self._last is not None:
            ids = self._request.body.ids
            cache = self._engine.manager.prefixes
            rows = () if cache is None else cache.movable_rows(ids, self._request.cache_salt)
            yield self._last._replace(branch=OUTLINE, rows=rows)


class OpenRequest(Protocol):
    """A request in an engine. output: what is new since the last call. done: it has ended, and
    `output` has said so."""

    handle: Handle
    done: bool

    def output(self) -> Iterator[protocol.Message]: ...


class WorkerEngine:
    """An engine of a worker and its open requests by id. send: sends what the requests bring.
    rounds, sink: as of `Engine`."""

    def __init__(
        self,
        session: Session,
        send: Callable[[protocol.Message], None],
        *,
        rounds: Callable[[RoundSummary], None] | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.session = session
        self.send = send
        self.engine = Engine(session, threaded=False, rounds=rounds, sink=sink)
        self.requests: dict[str, OpenRequest] = {}

    def advance(self) -> None:
        """A step of the engine alone."""
        self.engine.step()

    def step(self) -> None:
        """A step of the engine, if it has requests, and what it brought."""
        requests = [*self.requests.items()]
        if requests:
            self.advance()
        for id, request in requests:
            for message in request.output():
                self.send(message)
            if request.done:
                self.requests.pop(id, None)


class TensorParallelEngine(WorkerEngine):
    """One engine of a worker of a run. Workers that compute a decoder together have one each, which
    do the same; only the first rank sends, and counts `rounds`. ranks: None for this worker alone.
    Raises RankLost: the other ranks did not come. ModelError, ValueError: the models cannot be
    sharded."""

    def __init__(
        self,
        session: Session,
        send: Callable[[protocol.Message], None],
        rounds: Callable[[RoundSummary], None],
        ranks: Ranks | None,
    ) -> None:
        leads = ranks is None or ranks.index == 0
        self.ranks = ranks
        if ranks is not None:
            target = sharded(session.models.target, ranks.group, ranks.index, ranks.count)
            self.ranks = target.ranks if isinstance(target, ShardedDecoder) else None
            session = copy(session)
            session.models = replace(session.models, target=target)
        super().__init__(
            session, send if leads else lambda message: None, rounds=rounds if leads else None
        )

    def assign(self, order: protocol.Assign) -> None:
        try:
            handle = self.engine.submit(order.prompt, settings=RequestSettings(handed=order.part))
        except Exception as error:  # of a model's tokenizer, or a grammar
            note = message_of(error)
            self.send(protocol.BranchEnded(order.id, OUTLINE, finish="failed", note=note))
        else:
            self.requests[order.id] = AssignedPart(order, handle, self.engine)

    def advance(self) -> None:
        """The same; raises RankLost if the other ranks are lost: the parts cannot continue here."""
        try:
            super().advance()
        except EngineError:
            if self.ranks is None or not self.ranks.lost:
                raise
        if self.ranks is not None and self.ranks.lost:
            raise RankLost(self.ranks.lost)

    def close(self) -> None:
        self.requests.clear()
        if self.ranks is not None:  # the other ranks do not do its next step
            self.ranks.lost = self.ranks.lost or "this group has ended"
        self.engine.close(cancel=True)


class OrderQueue(Queue[protocol.Order | None]):
    """Orders in order of arrival, put in by one thread and taken by another; None wakes it."""

    def pop(self, seconds: float = 0.0) -> protocol.Order | None:
        """The next order; waits up to `seconds` for it."""
        with suppress(Empty):
            return self.get(timeout=seconds)
        return None

    @staticmethod
    def is_shared(order: protocol.Order | None) -> bool:
        """Whether all workers of the group get an order, in the same order among all of these."""
        together = isinstance(order, protocol.Assign) and order.tp > 1
        return together or isinstance(order, protocol.FormGroup | protocol.Regroup)

    def pop_unshared(self) -> protocol.Order | None:
        """The next order, unless it is shared."""
        return self.get() if self.queue and not self.is_shared(self.queue[0]) else None

    def count_shared(self) -> int:
        with self.mutex:
            return sum(map(self.is_shared, self.queue))


class WorkerLoop:
    """Engines of a worker and the thread that drives them, for one driver after another. engines:
    by tp. The one with tp 1 stays; the others start and end with their group."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.engines: dict[int, TensorParallelEngine] = {}
        self.groups: GroupMembership | None = None
        self.meter = Meter()
        self._store: Any = None  # of the driver
        self._orders = OrderQueue()
        self._pipe: protocol.WorkerSocket | None = None

    def serve(self, pipe: protocol.WorkerSocket) -> None:
        """Serve a driver until its connection is closed."""
        self._pipe = pipe
        self._orders = orders = OrderQueue()
        self._store = None
        self.meter = Meter()

        def listen() -> None:
            for message in pipe:
                if isinstance(message, protocol.Order):
                    orders.put(message)
            orders.put(None)

        weights = [*self.session.models.target.parameters()]
        ready = protocol.Ready(
            pid=os.getpid(),
            max_branches=self.session.program.graph.layout.max_num_branches,
            weights=(weights[0].data_ptr(), sum(one.nbytes for one in weights)),
        )
        pipe.send(ready)
        Thread(target=listen, daemon=True).start()
        while not pipe.closed:
            self._turn()
        self._leave()
        for engine in self.engines.values():
            for request in engine.requests.values():
                request.handle.cancel()
            engine.requests.clear()

    def _send(self, message: protocol.Message) -> None:
        assert self._pipe is not None
        self._pipe.send(message)

    def _turn(self) -> None:
        """Execute orders, then make a step with every busy engine; waits a little if none is."""
        common = self._common
        try:
            self._take_orders(common)
            if self._common is common:  # else the other ranks must be asked first
                for engine in [*self.engines.values()]:
                    engine.step()
        except RankLost as error:
            assert self.groups is not None
            number = self.groups.order.number
            self._leave()
            self._send(protocol.Grouped(number, str(error)))

    @property
    def _common(self) -> TensorParallelEngine | None:
        """The largest busy engine of several ranks, which make the next step together."""
        busy = (engine for engine in self.engines.values() if engine.requests and engine.ranks)
        return next(busy, None)

    def _take_orders(self, common: TensorParallelEngine | None) -> None:
        """Execute all orders, up to one that starts common work; before a common step as many
        shared orders as the first rank has, and all others. Raises RankLost: the other ranks did
        not come, or the orders that they have."""
        if common is None:
            busy = any(engine.requests for engine in self.engines.values())
            order = self._orders.pop(0.0 if busy else IDLE_INTERVAL)
            while order is not None:
                self._execute(order)
                order = self._orders.pop() if self._common is None else None
            return
        assert self.groups is not None and common.ranks is not None
        count = common.ranks.first(self._orders.count_shared(), self.session.models.device)
        while count and self._common is common:
            order = self._orders.pop(self.groups.order.block.deadline)
            if order is None:
                raise RankLost("orders of the other ranks did not come")
            count -= self._orders.is_shared(order)
            self._execute(order)
        while self._common is common and (order := self._orders.pop_unshared()) is not None:
            self._execute(order)

    def _execute(self, order: protocol.Order) -> None:
        match order:
            case protocol.FormGroup():
                self._form_group(order)
            case protocol.Assign(tp=1):
                self._start_engine(1).assign(order)
            case protocol.Assign():  # void for a group that has ended
                if (engine := self._engine_in(order.tp, order.group)) is not None:
                    engine.assign(order)
            case protocol.Regroup():
                self._send(self._regroup(order))
            case protocol.CountWork():
                self._send(self._count(order.number))

    def _start_engine(self, tp: int, ranks: Ranks | None = None) -> TensorParallelEngine:
        """The engine of a tp; starts it if there is none."""
        if tp not in self.engines:
            engine = TensorParallelEngine(self.session, self._send, self._round_done, ranks)
            engines = {**self.engines, tp: engine}
            self.engines = dict(sorted(engines.items(), reverse=True))
        return self.engines[tp]

    def _engine_in(self, tp: int, number: int) -> TensorParallelEngine | None:
        """The engine of a worker group, if this worker is in it."""
        groups = {} if self.groups is None else self.groups.groups
        return self.engines.get(tp) if tp in groups and groups[tp][0] == number else None

    def _form_group(self, order: protocol.FormGroup) -> None:
        assert self._pipe is not None
        error = ""
        self._leave()
        try:
            if self._store is None:
                self._store = connect(order)
            groups = GroupMembership(order, self._store, self._pipe.address)
            for tp, (_, ranks) in groups.groups.items():
                self._start_engine(tp, ranks)
            self.groups = groups
        except RuntimeError as failure:
            self._leave()
            error = message_of(failure)
        self._send(protocol.Grouped(order.number, error))

    def _leave(self) -> None:
        """Leave all groups, and drop what was computed in them."""
        self.groups = None
        shared = [tp for tp, engine in self.engines.items() if engine.ranks]
        for tp in shared:
            self.engines.pop(tp).close()
        if shared:
            gc.collect()  # pools are large, and sockets few

    def _regroup(self, order: protocol.Regroup) -> protocol.Regrouped:
        groups = self.groups
        if groups is None or groups.order.number != order.epoch:
            return protocol.Regrouped(order.number, error="is not in this group")
        source = self._engine_in(order.tp, order.group)
        destination = self.engines.get(groups.order.block.branches.tp)
        start = perf_counter()
        try:
            reply = exchange_prefix(
                order,
                groups,
                self.session,
                source=None if source is None else source.engine,
                destination=None if destination is None else destination.engine,
            )
        except RuntimeError as failure:
            self._leave()
            seconds = perf_counter() - start
            reply = protocol.Regrouped(order.number, seconds=seconds, collective=seconds)
            return reply._replace(error=message_of(failure))
        return reply._replace(seconds=perf_counter() - start)

    def _round_done(self, summary: RoundSummary) -> None:
        self.meter.forward_done(summary, 0)

    def _count(self, number: int) -> protocol.WorkCounts:
        """The counters since the last time that are not zero."""
        meter = self.meter
        self.meter = Meter()
        values = {name: getattr(meter, name) for name in Meter.__slots__}
        counts = {k: v for k, v in values.items() if isinstance(v, int | Counter) and v}
        engines = reversed(self.engines.values())
        return protocol.WorkCounts(
            number=number,
            counts=counts | {"requests": meter.requests},
            memory=[held_figures(meter, engine.engine.core.board) for engine in engines],
            open_files=len(os.listdir("/dev/fd")),
            peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
