"""A worker of a run: it executes orders between the steps of its engines.

Each of the workers that compute together decides for itself all that follows from logits, so they
must start the same requests at the same step: orders that concern several workers are sent to all
in one order, and before a common step every rank takes as many of these as the first one has.

No process group is the process's default group, so that a worker can leave one at any time, and
several workers can share a process. Store and gloo do not authenticate: for trusted networks."""

import gc
import os
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from math import prod
from queue import Empty, Queue
from threading import Thread
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from ...models.codes import FULL
from ...models.decoder import part
from ...models.sharded import RankLost, Ranks, ShardedDecoder, place
from ...states.graph.load import load_program, op_table
from ...states.prefix_cache import PrefixCache
from ...states.round import RoundSummary
from ...states.yaml.source import Source, decode
from ..errors import UsageError, message_of
from ..events import OUTLINE, BranchFinished, Committed, TokenEvent
from ..prepare.inputs import RequestSettings
from ..prepare.job import Job
from ..prepare.options import SESSION, ClusterBlock, RunOptions
from ..prepare.repeat import graph_yaml
from ..record.metrics import Meter, held_figures
from ..run.engine import Engine, EngineError, Handle
from ..run.session import Session, load
from . import protocol

MAX_TRIES = 3  # connections to a store, each with its part of the deadline
IDLE_INTERVAL = 0.2  # seconds between two checks whether an idle worker shall end
Send = Callable[[protocol.Message], None]
Rounds = Callable[[RoundSummary], None]


def parts_of(job: Job, block: ClusterBlock) -> int:
    """Parts of the weights, of which every worker loads one; codes are made of whole rows."""
    return block.parts if job.options.weights == FULL else 1


def load_message(job: Job, block: ClusterBlock, number: int, part: int) -> protocol.Load:
    """The first message to a worker, which gets a device by its number. part: of `parts_of`."""
    names = [name for name in SESSION if name not in ("outline", "sets", "profile")]
    given = asdict(job.options) | block.device_of(number)
    options = {name: given[name] for name in (*names, "no_nan_check", "graph")}
    graph = graph_yaml(job.program.graph)
    return protocol.Load(graph, options, block.together == 1, (part, parts_of(job, block)))


def load_job(first: protocol.Load) -> Session:
    """A worker's session; weights that several workers compute with are not packed."""
    name = str(first.options["graph"])
    source = Source(decode(first.graph.encode(), name), name)
    job = Job(load_program(source, op_table()), RunOptions(**first.options), ())
    return load(job, packed=first.packed, part=first.part)


@dataclass(eq=False)
class OpenRequest:
    """A request in an engine. num_read: events of its handle."""

    handle: Handle
    num_read: int = 0

    def output(self, new: Sequence[TokenEvent]) -> Iterator[protocol.Message]:
        """The messages about the events since the last call."""
        raise NotImplementedError


class AssignedPart(OpenRequest):
    """A part of a request in an engine: its new tokens, the ends of its branches, or the end of its
    outline with the rows of the prefix that others can get, once these are retained."""

    def __init__(self, order: protocol.Assign, handle: Handle) -> None:
        assert handle.request is not None
        super().__init__(handle)
        self._id = order.id
        self._cache = handle.engine.manager.prefixes
        self._request = handle.request
        self._writes_outline = not order.part.branches
        self._resumed = {branch.index: len(branch.tokens) for branch in order.part.branches}
        self._resumed[OUTLINE] = len(order.part.outline)
        self._last: protocol.BranchEnded | None = None

    def output(self, new: Sequence[TokenEvent]) -> Iterator[protocol.Output]:
        self._request = self.handle.request or self._request  # another one, if it was run again
        for event in new:
            if isinstance(event, Committed):  # at first also what another worker wrote
                if tokens := event.tokens[self._resumed.pop(event.branch, 0) :]:
                    yield replace(event, request=self._id, tokens=tokens)
            elif isinstance(event, BranchFinished):
                self._last = protocol.BranchEnded(self._id, event.index, event.finish, event.note)
                if not self._writes_outline:
                    yield self._last
        if self.handle.done and self._writes_outline and self._last is not None:
            ids = self._request.body.ids
            salt = self._request.cache_salt
            rows = () if self._cache is None else self._cache.movable_rows(ids, salt)
            yield self._last._replace(branch=OUTLINE, rows=rows)


class WorkerEngine:
    """An engine of a worker and its open requests by id. send: sends what the requests bring."""

    def __init__(self, engine: Engine, send: Send) -> None:
        self.engine = engine
        self.session = engine.session
        self.send = send
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
            new = request.handle.since(request.num_read)
            request.num_read += len(new)
            for message in request.output(new):
                self.send(message)
            if request.handle.done:
                self.requests.pop(id, None)


class TensorParallelEngine(WorkerEngine):
    """One engine of a worker of a run. Workers that compute a decoder together have one each, which
    do the same; only the first rank sends, and counts `rounds`. ranks: None for this worker alone.
    Raises RankLost: the other ranks did not come. ModelError, ValueError: as `ShardedDecoder`."""

    def __init__(self, session: Session, send: Send, rounds: Rounds, ranks: Ranks | None) -> None:
        leads = ranks is None or ranks.index == 0
        self.ranks = ranks
        if ranks is not None:
            session = copy(session)
            target = ShardedDecoder(session.models.target, ranks)
            session.models = replace(session.models, target=target)
        engine = Engine(session, threaded=False, rounds=rounds if leads else None)
        super().__init__(engine, send if leads else lambda message: None)

    @property
    def cache(self) -> PrefixCache:
        cache = self.engine.manager.prefixes
        assert cache is not None, "only cached rows are moved"
        return cache

    def assign(self, order: protocol.Assign) -> None:
        try:
            handle = self.engine.submit(order.prompt, settings=RequestSettings(handed=order.part))
        except Exception as error:  # of a model's tokenizer, or a grammar
            note = message_of(error)
            self.send(protocol.BranchEnded(order.id, OUTLINE, finish="failed", note=note))
        else:
            self.requests[order.id] = AssignedPart(order, handle)

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


def ranks_of_groups(size: int, tp: int, largest: int) -> list[tuple[int, ...]]:
    """The worker groups of `tp` ranks each, by number; the same for drivers and workers. Groups of
    several sizes are nested (`place`): only as many ranks as fill groups of the largest size, a
    multiple of `tp`, form groups; the others decode with tp 1, or not at all."""
    if tp == 1:
        return [(rank,) for rank in range(size)]
    whole = size // largest * largest
    return [tuple(place(rank, whole, tp).members) for rank in range(whole // tp)]


def open_store(address: str, deadline: float) -> TCPStore:
    """The store where members of groups meet. Raises UsageError: this machine lacks the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=128)
    except OSError as error:
        raise UsageError(f"cluster.interface {address}: {os.strerror(error.errno or 0)}") from None
    return TCPStore(
        address,
        int(listener.getsockname()[1]),
        is_master=True,
        timeout=timedelta(seconds=deadline),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect(order: protocol.FormGroup) -> Any:
    """The store of a group; raises RuntimeError if it is not reached before the deadline."""
    deadline = timedelta(seconds=order.block.deadline)
    address = (order.block.interface, order.port)
    for tries in range(1, MAX_TRIES + 1):
        try:  # one connection in some thousands is not answered: then another one is made
            store = TCPStore(*address, timeout=deadline / MAX_TRIES, wait_for_workers=False)
            store.set_timeout(deadline)
            return store
        except RuntimeError:
            if tries == MAX_TRIES:
                raise


class GroupMembership:
    """All process groups of a worker, by one `FormGroup`. world: all workers. groups: the worker
    groups of this worker, by tp: number, and ranks (None for tp 1). store: of `connect`. address:
    of this worker. Raises RuntimeError: not all members came before the deadline."""

    def __init__(self, order: protocol.FormGroup, store: Any, address: str) -> None:
        self.order = order
        self._store = store
        self._address = address
        self.world = self._join("all", range(order.size))
        self.groups: dict[int, tuple[int, Ranks | None]] = {}
        for tp in sorted({order.block.skeleton.tp, order.block.branches.tp}, reverse=True):
            ranks_of = ranks_of_groups(order.size, tp, order.block.together)
            for number, members in enumerate(ranks_of):
                if order.rank in members:
                    ranks = self._join(f"{tp}/{number}", members) if tp > 1 else None
                    self.groups[tp] = (number, ranks)

    def _join(self, name: str, members: Sequence[int]) -> Ranks:
        """This worker in a group of these ranks; the name is the same for all of them."""
        index = members.index(self.order.rank)
        group: Any = None  # torch declares no collectives of such a group
        if len(members) > 1:
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=self.order.block.deadline)
            options._devices = [gloo.create_device(hostname=self._address)]
            store = PrefixStore(f"group/{self.order.number}/{name}", self._store)
            group = gloo(store, index, len(members), options)
        return Ranks(group, index, len(members))


def _broadcast(
    order: protocol.Regroup, groups: GroupMembership, session: Session, parts: Sequence[Tensor]
) -> list[Tensor]:
    """Broadcasts of all sources at once: of each one the target's rows with its heads, of the first
    the drafters' rows as well. The rows of each pool with all heads; none if a source has none."""
    target = session.models.target
    drafter = session.models.drafter if session.program.graph.drafter.has_model else None
    drafters = [one for one in (drafter, session.outline_drafter) if one is not None]
    size = groups.order.size
    sources = ranks_of_groups(size, order.tp, groups.order.block.together)[order.group]
    sent = []  # of each source its shapes, and the tensor that it fills
    works = []
    for number, rank in enumerate(sources):
        kv_heads = len(part(target.config.kv_heads, number, len(sources)))
        shapes = [(target.num_layers, 2, kv_heads, order.rows[0], target.head_dim)]
        if number == 0:
            shapes += [
                (drafter.num_layers, 2, drafter.kv_heads, count, drafter.head_dim)
                for drafter, count in zip(drafters, order.rows[1:], strict=True)
            ]
        # The flag at the end says that the rows are valid: a source without rows takes part too.
        data_N = torch.zeros(sum(map(prod, shapes)) + 1, dtype=session.models.dtype)
        if rank == groups.order.rank and parts:
            torch.cat([rows.flatten() for rows in parts[: len(shapes)]], out=data_N[:-1])
            data_N[-1] = 1
        sent.append((shapes, data_N))
        if groups.world.count > 1:
            works.append(groups.world.group.broadcast(data_N, rank))
    for work in works:
        work.wait()
    if not all(data_N[-1] for _, data_N in sent):
        return []
    rows = [
        data.view(shape)
        for shapes, data_N in sent
        for data, shape in zip(torch.split(data_N[:-1], [*map(prod, shapes)]), shapes, strict=True)
    ]
    count = len(drafters)
    return [torch.cat([rows[0], *rows[1 + count :]], 2), *rows[1 : 1 + count]]


class OrderQueue(Queue[protocol.Message | None]):
    """Orders in order of arrival, put in by one thread and taken by another; None wakes it."""

    def pop(self, seconds: float = 0.0) -> protocol.Message | None:
        """The next order; waits up to `seconds` for it."""
        with suppress(Empty):
            return self.get(timeout=seconds)
        return None

    @staticmethod
    def is_shared(order: protocol.Message | None) -> bool:
        """Whether all workers of the group get an order, in the same order among all of these."""
        together = isinstance(order, protocol.Assign | protocol.Cancel) and order.tp > 1
        return together or isinstance(order, protocol.FormGroup | protocol.Regroup)


@dataclass(eq=False)
class WorkerLoop:
    """Engines of a worker and the thread that drives them, for one driver after another. engines:
    by tp. The one with tp 1 stays; the others start and end with their group."""

    session: Session
    engines: dict[int, TensorParallelEngine] = field(default_factory=dict)
    groups: GroupMembership | None = None

    def serve(self, pipe: protocol.WorkerSocket) -> None:
        """Serve a driver until its connection is closed."""
        self.meter = Meter()
        self._pipe = pipe
        self._orders = orders = OrderQueue()
        self._store: Any = None

        def listen() -> None:
            for message in pipe:
                orders.put(message)
            orders.put(None)

        most = self.session.program.graph.layout.max_num_branches
        weights = sum(one.nbytes for one in self.session.models.target.parameters())
        pipe.send(protocol.Ready(pid=os.getpid(), max_branches=most, weights=weights))
        Thread(target=listen, daemon=True).start()
        while not pipe.closed:
            self._turn()
        self._leave()
        for engine in self.engines.values():
            for request in engine.requests.values():
                request.handle.cancel()
            engine.requests.clear()

    def _send(self, message: protocol.Message) -> None:
        self._pipe.send(message)  # of the driver at this time

    def _turn(self) -> None:
        """Execute orders, then make a step with every busy engine; waits a little if none is. All
        orders are executed, up to one that starts common work; before a common step as many shared
        ones as the first rank has, and all others."""
        common = self._common
        orders = self._orders
        try:
            if common is None:
                busy = any(engine.requests for engine in self.engines.values())
                order = orders.pop(0.0 if busy else IDLE_INTERVAL)
                while order is not None:
                    self._execute(order)
                    order = orders.pop() if self._common is None else None
            else:
                assert self.groups is not None and common.ranks is not None
                with orders.mutex:
                    count = sum(map(orders.is_shared, orders.queue))
                count = common.ranks.first(count, self.session.models.device)
                while count and self._common is common:
                    order = orders.pop(self.groups.order.block.deadline)
                    if order is None:
                        raise RankLost("orders of the other ranks did not come")
                    count -= orders.is_shared(order)
                    self._execute(order)
                while self._common is common and orders.queue:
                    if orders.is_shared(orders.queue[0]):
                        break
                    self._execute(orders.get())
            if self._common is common:  # else the other ranks must be asked first
                for engine in [*self.engines.values()]:
                    engine.step()
        except RankLost as error:  # they did not come, or their orders
            assert self.groups is not None
            number = self.groups.order.number
            self._leave()
            self._send(protocol.Grouped(number, str(error)))

    @property
    def _common(self) -> TensorParallelEngine | None:
        """The largest busy engine of several ranks, which make the next step together."""
        busy = (engine for engine in self.engines.values() if engine.requests and engine.ranks)
        return next(busy, None)

    def _execute(self, order: protocol.Message | None) -> None:
        match order:
            case protocol.FormGroup():
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
            case protocol.Assign(tp=1):
                self._start_engine(1).assign(order)
            case protocol.Assign():  # void for a group that has ended
                if (engine := self._engine_in(order.tp, order.group)) is not None:
                    engine.assign(order)
            case protocol.Cancel():
                engine = self.engines.get(order.tp)
                if engine is not None and order.id in engine.requests:
                    engine.requests[order.id].handle.cancel()
            case protocol.Regroup():
                self._send(self._regroup(order))
            case protocol.CountWork():  # the counters since the last time
                meter = self.meter
                self.meter = Meter()
                engines = reversed(self.engines.values())
                counts = protocol.WorkCounts(
                    number=order.number,
                    counts={**meter.counts, "requests": meter.requests},
                    memory=[held_figures(meter, engine.engine.core.board) for engine in engines],
                    open_files=len(os.listdir("/dev/fd")),
                    peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                )
                self._send(counts)

    def _start_engine(self, tp: int, ranks: Ranks | None = None) -> TensorParallelEngine:
        """The engine of a tp; starts it if there is none."""
        if tp not in self.engines:
            engine = TensorParallelEngine(
                self.session, self._send, lambda done: self.meter.forward_done(done, 0), ranks
            )
            self.engines = dict(sorted({**self.engines, tp: engine}.items(), reverse=True))
        return self.engines[tp]

    def _engine_in(self, tp: int, number: int) -> TensorParallelEngine | None:
        """The engine of a worker group, if this worker is in it."""
        groups = {} if self.groups is None else self.groups.groups
        return self.engines.get(tp) if tp in groups and groups[tp][0] == number else None

    def _leave(self) -> None:
        """Leave all groups, and drop what was computed in them."""
        self.groups = None
        shared = [tp for tp, engine in self.engines.items() if engine.ranks]
        for tp in shared:
            self.engines.pop(tp).close()
        if shared:
            gc.collect()  # pools are large, and sockets few

    def _regroup(self, order: protocol.Regroup) -> protocol.Regrouped:
        """This worker's part in a `Regroup`. Writers of an outline have its target rows each with
        its own heads, the drafters' rows whole; a worker keeps the heads that it decodes with."""
        groups = self.groups
        if groups is None or groups.order.number != order.epoch:
            return protocol.Regrouped(order.number, error="is not in this group")
        salt = order.cache_salt
        source = self._engine_in(order.tp, order.group)
        destination = self.engines.get(groups.order.block.branches.tp)
        present = None
        parts = list[Tensor]()  # of each pool
        start = perf_counter()  # if taking the rows out fails
        try:
            if source is not None:
                try:
                    parts = source.cache.take_out(order.ids, order.rows, salt)
                except LookupError:  # evicted since
                    present = source.cache.movable_rows(order.ids, salt)
            start = perf_counter()
            received = _broadcast(order, groups, self.session, parts)
            seconds = perf_counter() - start
            num_bytes = 0
            stored = False
            if received and destination is not None and destination is not source:
                cache = destination.cache
                claimed = destination.engine.manager.claimed_slots
                share = destination.session.models.target.share.kv_heads
                received[0] = received[0][:, :, share.start : share.stop]
                stored = cache.put_in_(order.ids, order.rows, received, salt=salt, claimed=claimed)
                pairs = zip(order.rows, cache.pools, strict=True)
                num_bytes = sum(count * pool.slot_bytes for count, pool in pairs)
        except RuntimeError as failure:  # the deadline has passed, or a worker is lost
            self._leave()
            seconds = perf_counter() - start
            return protocol.Regrouped(order.number, collective=seconds, error=message_of(failure))
        return protocol.Regrouped(order.number, num_bytes, stored, seconds, rows=present)
