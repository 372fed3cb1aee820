"""The router of a server: one engine process or several replicas, and which of them gets what. A
request whose replica is lost continues in another one, and its client sees one stream."""

import asyncio
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from ..errors import ClusterError, UsageError
from ..shell import complain
from . import protocol
from .link import HangLimits, LinkState, Membership, WorkerGoneError, WorkerSource
from .placement import PrefixIndex
from .ray_workers import cluster_file
from .tickets import AnswerLengths, CountsByGraph, DiffersError, Replica, Ticket, choose_

MAX_LIVES = 3  # of a replica in a row in which it is never ready
MAX_LOSSES = 4  # replicas that may be lost while they have a request; then it fails
LATE = 1.0  # seconds after a request's time in which its engine can end it
POLL_INTERVAL = 0.1  # seconds
DRAINING = "draining"  # state of a replica that gets no further requests
GAUGES = ("waiting", "running", "branches", "slots", "peak_slots", "capacity")  # others only grow
ENGINE = "the engine's process"  # name of the only replica of a server without --workers
ANSWER_DEADLINE = 10.0  # seconds, of orders that take no time


class Router(Membership[Replica]):
    """Hands requests to replicas, their messages to the HTTP side. count: of replicas at first.
    limits: when one hangs. single: one engine process; its requests end with it. graphs: facts
    by name. failed: why nothing can be served. reruns: of requests. watchers: take pictures."""

    def __init__(
        self,
        source: WorkerSource,
        count: int = 1,
        limits: HangLimits | None = None,
        *,
        single: bool = False,
    ) -> None:
        super().__init__(source, limits, restarts=True, tries=None if single else MAX_LIVES)
        self.graphs: CountsByGraph = {}
        self.failed: protocol.Failed | None = None
        self.reruns = 0
        self.watchers: set[Callable[[protocol.Picture], None]] = set()
        self.single = single
        self._beginnings = PrefixIndex()  # of prompts that replicas have read
        self._count = count  # that was requested
        self._lengths = AnswerLengths()
        self._ids = itertools.count(1)
        self._tickets: dict[str, Ticket] = {}
        self._past_counts: CountsByGraph = {}
        self._pictured: dict[str, tuple[Replica, int]] = {}

    @property
    def state(self) -> LinkState:
        """The best state of a replica; CLOSED from the call of `close` on."""
        states = {replica.state for replica in self.links}
        if self.closed:
            return LinkState.CLOSED
        if not (states or self.failed):
            return LinkState.STARTING
        best = (LinkState.READY, LinkState.STARTING, LinkState.HUNG)
        return next((state for state in best if state in states), LinkState.DEAD)

    @property
    def ready(self) -> bool:
        return self.state is LinkState.READY

    @property
    def open(self) -> int:
        """Requests for answers that have not ended."""
        return sum(isinstance(one.request, protocol.Submit) for one in self._tickets.values())

    @property
    def tokenizing(self) -> int:
        """Texts that are being tokenized, or decoded."""
        return len(self._tickets) - self.open

    @property
    def counts(self) -> CountsByGraph:
        """Counters of the engines of each graph, over all replicas."""
        return dict(protocol.summed([self._past_counts, *(one.counts for one in self.links)]))

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Figures of each replica. state: a `LinkState`, or DRAINING; open: its requests; tokens:
        expected for them; written: by its process; restarts: of the process."""
        return [
            {
                "name": "engine" if self.single else replica.name,
                "state": DRAINING if replica.draining and not replica.closed else replica.state,
                "pid": replica.host.pid,
                "open": len(replica.expected),
                "tokens": replica.load,
                "written": sum(values["tokens"] for values in replica.counts.values()),
                "restarts": max(replica.lives - 1, 0),
            }
            for replica in self.links
        ]

    def new_id(self) -> str:
        return f"r{next(self._ids)}"

    async def run(self) -> None:
        """Keep the replicas alive until `close`; returns early if none can start."""
        await self.open_services()
        try:
            for _ in range(self._count):
                self._add()
            while not (self.closed or self.failed):
                await asyncio.sleep(POLL_INTERVAL)
                for replica in [*self.links]:
                    if replica.draining and not (replica.closed or replica.expected):
                        replica.close()
                for ticket in self._unended:
                    if ticket.replica is None and ticket.remaining_seconds <= 0:
                        self._fail(ticket, "no replica was available", "timeout")
                    elif ticket.remaining_seconds <= -LATE:
                        self._fail(ticket, "the engine did not end it", "timeout")
        finally:
            await self.ended()

    @property
    def _unended(self) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if not ticket.ended]

    async def close(self) -> None:
        """End all requests and all replicas."""
        self.closed = True
        for ticket in self._unended:
            self._fail(ticket, "", "shutdown")
        self.end_all()

    def _add(self) -> Replica:
        """Start one more replica, which gets requests once its models are loaded."""
        names = {replica.name for replica in self.links}
        number = next(i for i in range(len(names) + 1) if f"replica-{i}" not in names)
        name = ENGINE if self.single else f"replica-{number}"
        return self.start(Replica(name, self.source.host(number, 0), self))

    def on_state(self, link: Replica) -> None:
        if link.state is LinkState.HUNG:  # its requests may still be answered
            return
        if link.ready:
            self.graphs = link.greeting.graphs
            if self.watchers:
                link.send(protocol.SnapshotRequest(True))
            if not self.single:
                where = f" (process {link.host.pid})" if link.host.pid is not None else ""
                complain(f"{link.name} is ready{where}")
        else:
            no_gauges = dict.fromkeys(GAUGES, 0)
            past = {graph: {**values, **no_gauges} for graph, values in link.counts.items()}
            self._past_counts = protocol.summed([self._past_counts, past])
            link.counts = {}
            for ticket in [one for one in self._tickets.values() if one.replica is link]:
                self._lost(ticket)
        if link not in self.links and link.failed is not None and not self.closed:
            if self.links:
                complain(f"{link.name} is given up: {link.failed.message}")
            else:
                self.failed = link.failed
        self._place_waiting()

    async def scale(self, count: int, report: Callable[[str], None]) -> None:
        """Have `count` replicas: new ones get requests once they are loaded, those too many end
        when they have answered theirs. report: takes a line for each thing done. Raises
        ClusterError: some cannot start, or another number was requested meanwhile."""
        self._count = count
        staying = [replica for replica in self.links if not replica.draining]
        for replica in self.links:
            if replica.draining and len(staying) < count and replica.ready:
                replica.draining = False
                staying.append(replica)
                report(f"{replica.name} stays")
        start = monotonic()
        starting = [self._add() for _ in range(count - len(staying))]
        staying.sort(key=lambda one: (one.ready, len(one.expected)))
        for replica in staying[: max(len(staying) - count, 0)]:
            replica.draining = True
            report(f"{replica.name} drains, open requests: {len(replica.expected)}")
        draining = [replica for replica in self.links if replica.draining]
        while starting or draining:
            await asyncio.sleep(POLL_INTERVAL)
            for replica in [*starting]:
                if replica.ready:
                    starting.remove(replica)
                    report(f"{replica.name} is attached after {monotonic() - start:.1f} s")
                elif replica.failed is not None:
                    self._count = sum(not one.draining for one in self.links)
                    raise ClusterError(replica.failed.message)
            for replica in [one for one in draining if one not in self.links]:
                draining.remove(replica)
                report(f"{replica.name} is detached")
            if self.closed:
                raise ClusterError("the server ends")
            if self._count != count:
                raise ClusterError("another number was requested")

    def ask(self, request: protocol.Request) -> Ticket:
        """Hand a request over; its messages come to the ticket. Raises WorkerGoneError."""
        if not self.ready:
            raise WorkerGoneError("the engine is not running")
        ticket = Ticket(request, self._lengths.expected(request, self.graphs), self._forget)
        self._tickets[request.id] = ticket
        self._place(ticket)
        return ticket

    async def answer(self, request: protocol.Encode, timeout: float | None) -> protocol.Message:
        """The only message that answers a request; raises WorkerGoneError, TimeoutError."""
        ticket = self.ask(request)
        try:
            async with asyncio.timeout(timeout):
                return await ticket.next()
        finally:
            ticket.ended = True
            ticket.close()

    def _fail(self, ticket: Ticket, why: str, finish: str = "failed") -> None:
        """End a request without an answer; its replica is to drop it."""
        ticket.fail_(why, finish)
        if ticket.replica is not None:
            ticket.replica.send(protocol.Cancel(ticket.request.id))
        self._withdraw(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.request.id, None)
        self._withdraw(ticket)

    def _withdraw(self, ticket: Ticket) -> None:
        """Take a request from its replica; what has not ended is cancelled."""
        replica = ticket.replica
        ticket.replica = None
        if replica is not None:
            replica.expected.pop(ticket.request.id, None)
            if not ticket.ended:
                replica.send(protocol.Cancel(ticket.request.id))
        self._place_waiting()

    def _place(self, ticket: Ticket) -> None:
        tickets = self._tickets.values()
        blocked = ticket.isolated and any(one.isolated and one.replica for one in tickets)
        request = ticket.remaining_request
        replicas = [one for one in self.links if one.ready and not (blocked or one.draining)]
        while replica := choose_(request, replicas, self._beginnings):
            if replica.send(request):
                ticket.replica = replica
                replica.expected[request.id] = ticket.remaining_tokens
                return
            replicas.remove(replica)  # its loss is about to be noticed

    def _place_waiting(self) -> None:
        for ticket in self._unended:
            if ticket.replica is None:
                self._place(ticket)

    def _lost(self, ticket: Ticket) -> None:
        """The replica of a request is lost: it continues in another one, if that is useful."""
        assert ticket.replica is not None
        ticket.replica.expected.pop(ticket.request.id, None)
        ticket.restart_()
        if self.closed or self.failed or self.single:
            ticket.deliver(None)
        elif ticket.losses >= MAX_LOSSES:
            ticket.fail_(f"{ticket.losses} replicas were lost while they answered it")
        elif ticket.remaining_seconds <= 0:
            ticket.fail_("the replica that answered it was lost", "timeout")
        else:
            self.reruns += 1
            self._place(ticket)

    def on_message(self, link: Replica, message: protocol.Message) -> None:
        if isinstance(message, protocol.Counts):
            link.counts = message.graphs
        elif isinstance(message, protocol.Picture):
            # Of each graph one replica is shown: the same one as long as it has requests.
            shown, running = self._pictured.get(message.graph, (link, 0))
            if shown is link or not shown.ready or (message.running and not running):
                self._pictured[message.graph] = (link, message.running)
                for watcher in [*self.watchers]:
                    watcher(message)
        elif (ticket := self._tickets.get(getattr(message, "id", ""))) and ticket.replica is link:
            try:
                ticket.deliver(message)
            except DiffersError as error:
                self._fail(ticket, str(error))
            if isinstance(message, protocol.Ended):
                self._lengths.note_(ticket.request, message, self.graphs)
            if ticket.ended:
                self._withdraw(ticket)
            else:
                link.expected[ticket.request.id] = ticket.remaining_tokens

    async def pictures(self) -> AsyncIterator[protocol.Picture]:
        """Pictures for one reader; of several that wait only the last of each graph."""
        latest: dict[str, protocol.Picture] = {}
        some = asyncio.Event()

        def watcher(picture: protocol.Picture) -> None:
            latest[picture.graph] = picture
            some.set()

        self.watchers.add(watcher)
        for replica in self.links:
            replica.send(protocol.SnapshotRequest(True))
        try:
            while True:
                await some.wait()
                some.clear()
                while latest:
                    yield latest.pop(next(iter(latest)))
        finally:
            self.watchers.discard(watcher)
            if not self.watchers:
                for replica in self.links:
                    replica.send(protocol.SnapshotRequest(False))


# -- how other processes of this machine read and change the replicas -----------------------------


def control_path() -> Path:
    """A socket for its owner alone; a client sends one JSON line, and receives lines."""
    return cluster_file().with_suffix(".sock")


def replica_control(router: Router, address: str) -> AbstractAsyncContextManager[None]:
    """The server's side of the socket. Raises UsageError: there is another server, or no socket."""
    path = control_path()
    if ask_router("state", lambda line: None) is not None:
        raise UsageError("another server with --workers runs on this machine")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # for the owner alone
    try:
        listener.bind(str(path))
    except OSError as error:
        raise UsageError(f"{path}: no socket can be made there: {error}") from None
    finally:
        os.umask(before)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def reply(values: dict[str, Any]) -> None:
            writer.write(json.dumps(values).encode() + b"\n")

        try:
            order = json.loads(await reader.readline())
            if order["do"] == "scale":
                await router.scale(order["count"], lambda line: reply({"line": line}))
            elif order["do"] == "end":
                await router.close()
            reply({"address": address, "graphs": [*router.graphs], "replicas": router.replicas})
        except ClusterError as error:
            reply({"failed": str(error)})
        except (ValueError, KeyError, TypeError) as error:
            reply({"failed": f"not an order: {error}"})
        finally:
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

    @asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(serve, sock=listener)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    return serving()


def ask_router(
    order: str, report: Callable[[str], None], count: int | None = None
) -> dict[str, Any] | None:
    """Send an order to this machine's server with --workers, and wait until it is done. order:
    `state`, `scale` (to `count`) or `end`. report: takes the lines in between. Returns its address,
    graphs and replicas; None if there is none. Raises ClusterError: it failed."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as pipe:
        pipe.settimeout(None if order == "scale" else ANSWER_DEADLINE)
        pipe.connect(str(control_path()))
        pipe.sendall(json.dumps({"do": order, "count": count}).encode() + b"\n")
        with pipe.makefile("rb") as lines:
            for line in lines:
                values: dict[str, Any] = json.loads(line)
                if "failed" in values:
                    raise ClusterError(str(values["failed"]))
                if "line" not in values:
                    return values
                report(str(values["line"]))
        raise ClusterError("the server has ended before the order was done")
    return None
