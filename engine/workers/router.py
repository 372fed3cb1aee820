"""The router of a server: one engine process or several replicas, and which of them gets what.

A request whose replica is lost continues in another one behind the last tokens that are known, and
its client sees one stream: tokens do not depend on the replica that writes them.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ..shell import complain
from .link import BackgroundService, LinkState, WorkerGoneError, WorkerLink
from .membership import Membership, WorkerSource
from .protocol import (
    Admitted,
    Cancel,
    Counts,
    Decode,
    Encode,
    Ended,
    Failed,
    Message,
    Picture,
    Ready,
    Request,
    SnapshotRequest,
    Wrote,
)
from .routing_table import AnswerLengths, CountsByGraph, Replica, RoutingTable
from .tickets import MAX_LOSSES, DiffersError, Ticket

HTTP_NICENESS = 5  # of the HTTP side's threads, below the engines
MAX_LIVES = 3  # of a replica in a row in which it sends nothing
POLL_INTERVAL = 0.1  # seconds
DRAINING = "draining"  # state of a replica that gets no further requests
GAUGES = ("waiting", "running", "branches", "slots", "peak_slots", "capacity")
ENGINE = "the engine's process"  # name of the only replica of a server without --workers


class ScaleError(RuntimeError):
    """The number of replicas cannot be changed as requested; says why."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """State of a replica. state: a `LinkState`, or DRAINING; open: its requests; tokens: that it is
    expected to write for them; written: by its process; restarts: of the process."""

    name: str
    state: str
    pid: int | None
    open: int
    tokens: int
    written: int
    restarts: int


class Router:
    """Hands requests to replicas, and their messages to the HTTP side.

    Args:
        count: of replicas at first. deadline: seconds of silence after which a replica is lost.
        single: one engine process that is not watched; its requests end with it.

    Attributes:
        graphs: facts of the served graphs. failed: why nothing can be served.
        reruns: how often a request moved to another process. watchers: take pictures.
        changed: an event that is set, and replaced, when `state` changes. services: are open
            while the router runs.
    """

    def __init__(
        self,
        source: WorkerSource,
        count: int = 1,
        deadline: float | None = None,
        *,
        single: bool = False,
    ) -> None:
        self.state = LinkState.STARTING
        self.graphs: CountsByGraph = {}
        self.failed: Failed | None = None
        self.reruns = 0
        self.watchers: set[Callable[[Picture], None]] = set()
        self.changed = asyncio.Event()
        self.services: list[BackgroundService] = []
        self.single = single
        self.table = RoutingTable()
        self._count = count
        self._requested_count = count
        self._lengths = AnswerLengths()
        self._replicas: dict[WorkerLink, Replica] = {}
        self._members = Membership(
            source,
            deadline=deadline,
            restarts=True,
            tries=None if single else MAX_LIVES,
            on_message=self._receive,
            on_state=self._moved,
        )
        self._ids = itertools.count(1)
        self._tickets: dict[str, Ticket] = {}
        self._placed: dict[str, Replica] = {}
        self._waiting: list[Ticket] = []
        self._past_counts: CountsByGraph = {}
        self._pictured: dict[str, tuple[Replica, int]] = {}

    # -- what the HTTP side reads -----------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._tickets)

    @property
    def counts(self) -> CountsByGraph:
        """Counters of the engines of each graph, over all replicas."""
        return _summed([self._past_counts, *(one.counts for one in self._replicas.values())])

    @property
    def replicas(self) -> Sequence[ReplicaFacts]:
        return [self._facts_of(replica) for replica in self._replicas.values()]

    def _facts_of(self, replica: Replica) -> ReplicaFacts:
        link = replica.link
        drains = replica.draining and link.state is not LinkState.CLOSED
        return ReplicaFacts(
            name="engine" if self.single else replica.name,
            state=DRAINING if drains else str(link.state),
            pid=link.pid,
            open=self._open_at(replica),
            tokens=self.table.tokens_of(replica),
            written=sum(values["tokens"] for values in replica.counts.values()),
            restarts=max(link.lives - 1, 0),
        )

    def _open_at(self, replica: Replica) -> int:
        return sum(other is replica for other in self._placed.values())

    def new_id(self) -> str:
        return f"r{next(self._ids)}"

    # -- the life of the router -------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the replicas alive until `close`; returns early if none can start."""
        services = self.services
        await self._members.open()
        for service in services:
            await service.open()
        try:
            for _ in range(self._count):
                self._add()
            while not self._over:
                await asyncio.sleep(POLL_INTERVAL)
                await self._end_drained()
                for ticket in [one for one in self._waiting if one.remaining_seconds <= 0]:
                    self._waiting.remove(ticket)
                    ticket.fail_("no replica was available", "timeout")
        finally:
            await self._members.ended()
            for service in services:
                service.close()

    @property
    def _over(self) -> bool:
        return self.state is LinkState.CLOSED or self.failed is not None

    async def close(self) -> None:
        """End the replicas and all requests."""
        self._set(LinkState.CLOSED)
        await self._members.close()
        waiting = self._waiting
        self._waiting = []
        for ticket in waiting:
            ticket.deliver(None)

    def _set(self, state: LinkState) -> None:
        self.state = state
        self.changed.set()
        self.changed = asyncio.Event()

    # -- replicas ---------------------------------------------------------------------------------

    def _add(self) -> Replica:
        """Start one more replica, which gets requests once its models are loaded."""
        names = {replica.name for replica in self._replicas.values()}
        number = next(i for i in range(len(names) + 1) if f"replica-{i}" not in names)
        name = ENGINE if self.single else f"replica-{number}"
        link = self._members.start(name, number)
        replica = self._replicas[link] = Replica(link)
        return replica

    def _moved(self, link: WorkerLink) -> None:
        """The state of a replica has changed, or it has left."""
        replica = self._replicas.get(link)
        if replica is None:
            return
        if link.ready:
            self._attach(replica)
        else:
            self._detach(replica)
        if link not in self._members.links:
            del self._replicas[link]
            if link.failed is not None and not self._members.closed:
                if self._replicas:
                    complain(f"{link.name} is given up: {link.failed.message}")
                else:
                    self.failed = link.failed
        self._refresh_state()
        self._place_waiting()

    def _attach(self, replica: Replica) -> None:
        link = replica.link
        assert isinstance(link.greeting, Ready)
        self.graphs = link.greeting.graphs
        if self.watchers:
            self._send(replica, SnapshotRequest(True))
        if not self.single:
            where = f" (process {link.pid})" if link.pid is not None else ""
            complain(f"{link.name} is ready{where}")
        if not replica.draining:
            self.table.attach_(replica)

    def _detach(self, replica: Replica) -> None:
        self.table.lose_(replica)
        self._past_counts = _summed([self._past_counts, _without_gauges(replica.counts)])
        replica.counts = {}
        for id in [id for id, other in self._placed.items() if other is replica]:
            self._lost(self._tickets[id])

    def _refresh_state(self) -> None:
        states = {link.state for link in self._replicas}
        order = (LinkState.READY, LinkState.STARTING)
        best = next((state for state in order if state in states), LinkState.DEAD)
        if self.state not in (best, LinkState.CLOSED):
            self._set(best)

    @property
    def _staying(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if not replica.draining]

    async def _end_drained(self) -> None:
        for replica in [*self._replicas.values()]:
            closed = replica.link.state is LinkState.CLOSED
            if replica.draining and not closed and not self._open_at(replica):
                await replica.link.close()

    async def scale(self, count: int, report: Callable[[str], None]) -> None:
        """Have `count` replicas: new ones get requests once they are loaded, those too many end
        when they have answered theirs.

        Args:
            report: takes a line for each thing done.

        Raises:
            ScaleError: some cannot start, or another number was requested meanwhile.
        """
        self._requested_count = count
        for replica in self._replicas.values():
            if replica.draining and len(self._staying) < count and replica.link.ready:
                replica.draining = False
                self.table.attach_(replica)
                report(f"{replica.name} stays")
        new = [self._add() for _ in range(count - len(self._staying))]
        by_use = sorted(self._staying, key=lambda one: (one.link.ready, self._open_at(one)))
        for replica in by_use[: len(by_use) - count]:
            replica.draining = True
            self.table.detach_(replica)
            report(f"{replica.name} drains, {self._open_at(replica)} requests are open")
        await self._until_scaled(count, new, report)

    async def _until_scaled(
        self, count: int, new: Sequence[Replica], report: Callable[[str], None]
    ) -> None:
        starts = dict.fromkeys(new, monotonic())
        draining = [replica for replica in self._replicas.values() if replica.draining]
        while starts or draining:
            await asyncio.sleep(POLL_INTERVAL)
            for replica in [*starts]:
                if replica.link.ready:
                    seconds = monotonic() - starts.pop(replica)
                    report(f"{replica.name} is attached after {seconds:.1f} s")
                elif replica.link.failed is not None:
                    self._requested_count = len(self._staying)
                    raise ScaleError(replica.link.failed.message)
            for replica in [one for one in draining if one.link not in self._replicas]:
                draining.remove(replica)
                report(f"{replica.name} is detached")
            if self._members.closed:
                raise ScaleError("the server ends")
            if self._requested_count != count:
                raise ScaleError("another number was requested")

    # -- requests ---------------------------------------------------------------------------------

    def ask(self, request: Request) -> Ticket:
        """Hand a request over; its messages come to the ticket. Raises WorkerGoneError."""
        if not self.ready:
            raise WorkerGoneError("the engine is not running")
        ticket = Ticket(self, request, self._lengths.expected(request, self.graphs))
        self._tickets[request.id] = ticket
        self._place(ticket)
        return ticket

    async def answer(self, request: Encode | Decode) -> Message:
        """The only message that answers a request; raises WorkerGoneError."""
        ticket = self.ask(request)
        try:
            return await ticket.next()
        finally:
            ticket.ended = True
            ticket.close()

    def forget(self, ticket: Ticket) -> None:
        """Nothing reads a ticket any longer."""
        self._tickets.pop(ticket.id, None)
        self._withdraw(ticket)
        self._place_waiting()

    def _withdraw(self, ticket: Ticket) -> None:
        """Take a request from its replica; what has not ended is cancelled."""
        self._waiting = [other for other in self._waiting if other is not ticket]
        self.table.release_(ticket.id)
        replica = self._placed.pop(ticket.id, None)
        if replica is not None and not ticket.ended:
            self._send(replica, Cancel(ticket.id))

    def _send(self, replica: Replica, message: Message) -> None:
        with suppress(WorkerGoneError):
            replica.link.send(message)

    def _place(self, ticket: Ticket) -> None:
        """Give a request to a replica, or let it wait for one."""
        blocked = ticket.isolated and any(self._tickets[id].isolated for id in self._placed)
        while not blocked and (replica := self.table.choose_(ticket.remaining_request)):
            try:
                replica.link.send(ticket.remaining_request)
            except WorkerGoneError:  # its loss is about to be noticed
                self.table.detach_(replica)
                continue
            self._placed[ticket.id] = replica
            self.table.weigh_(replica, ticket.id, ticket.remaining_tokens)
            return
        self._waiting.append(ticket)

    def _place_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for ticket in waiting:
            self._place(ticket)

    def _lost(self, ticket: Ticket) -> None:
        """The replica of a request is lost: it continues in another one, if that is useful."""
        self._placed.pop(ticket.id, None)
        self.table.release_(ticket.id)
        ticket.restart_()
        if self._over or self.single:
            ticket.deliver(None)
        elif ticket.losses >= MAX_LOSSES:
            ticket.fail_(f"{ticket.losses} replicas were lost while they answered it")
        elif ticket.remaining_seconds <= 0:
            ticket.fail_("the replica that answered it was lost", "timeout")
        else:
            self.reruns += 1
            self._place(ticket)

    # -- messages of replicas ---------------------------------------------------------------------

    def _receive(self, link: WorkerLink, message: Message) -> None:
        replica = self._replicas.get(link)
        if replica is None:
            return
        if isinstance(message, Counts):
            replica.counts = message.graphs
        elif isinstance(message, Picture):
            self._show(replica, message)
        elif self._placed.get(id := getattr(message, "id", "")) is replica:
            self._answer(self._tickets[id], message)

    def _answer(self, ticket: Ticket, message: Message) -> None:
        match message:
            case Admitted():
                ticket.deliver_admitted(message)
            case Wrote():
                self._deliver_output(ticket, message)
            case _:
                if isinstance(message, Ended):
                    self._lengths.note_(ticket.request, message, self.graphs)
                ticket.deliver(message)
                self._withdraw(ticket)
                self._place_waiting()

    def _deliver_output(self, ticket: Ticket, message: Wrote) -> None:
        try:
            ticket.deliver_output(message)
        except DiffersError as error:
            self._withdraw(ticket)
            ticket.fail_(str(error))
            return
        if replica := self._placed.get(ticket.id):
            self.table.weigh_(replica, ticket.id, ticket.remaining_tokens)

    # -- pictures ---------------------------------------------------------------------------------

    async def pictures(self) -> AsyncIterator[Picture]:
        """Pictures for one reader; of several that wait only the last of each graph."""
        latest: dict[str, Picture] = {}
        some = asyncio.Event()

        def watcher(picture: Picture) -> None:
            latest[picture.graph] = picture
            some.set()

        self.watchers.add(watcher)
        self._request_pictures(True)
        try:
            while True:
                await some.wait()
                some.clear()
                pictures = [*latest.values()]
                latest.clear()
                for picture in pictures:
                    yield picture
        finally:
            self.watchers.discard(watcher)
            if not self.watchers:
                self._request_pictures(False)

    def _request_pictures(self, on: bool) -> None:
        for replica in self._replicas.values():
            self._send(replica, SnapshotRequest(on))

    def _show(self, replica: Replica, picture: Picture) -> None:
        """Of each graph one replica is shown: the same one as long as it has requests."""
        shown, running = self._pictured.get(picture.graph, (replica, 0))
        if shown is not replica and shown.link.ready and (running or not picture.running):
            return
        self._pictured[picture.graph] = (replica, picture.running)
        for watcher in [*self.watchers]:
            watcher(picture)


def _summed(counts: Iterable[CountsByGraph]) -> dict[str, dict[str, Any]]:
    """Sums of numbers, of lists place by place, of mappings key by key."""
    sums: dict[str, dict[str, Any]] = {}
    for graphs in counts:
        for graph, values in graphs.items():
            into = sums.setdefault(graph, {})
            for name, value in values.items():
                into[name] = _sum(into[name], value) if name in into else value
    return sums


def _without_gauges(counts: CountsByGraph) -> dict[str, dict[str, Any]]:
    """Counters of an engine that has ended: what it did, and nothing that it occupied."""
    return {
        graph: {name: 0 if name in GAUGES else value for name, value in values.items()}
        for graph, values in counts.items()
    }


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}
    if isinstance(a, list):
        longest = max(len(a), len(b))
        both = (a, b)
        return [sum(some[place] for some in both if place < len(some)) for place in range(longest)]
    return a + b


def lower_priority() -> None:
    """Run this thread, and those that it starts, behind the engines, so that a flood of requests
    takes no processor from requests that are answered. Existing threads keep their priority."""
    if sys.platform == "linux":  # elsewhere the priority is the whole process's
        os.nice(HTTP_NICENESS)
