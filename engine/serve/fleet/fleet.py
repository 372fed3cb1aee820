"""Several replicas behind one server: requests find one, and go on where theirs is lost."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..wire.engines import Engines, LinkState, ReplicaFacts
from ..wire.protocol import Admitted, Decode, Encode, Ended, Message, Picture, Submit, Wrote
from ..wire.tickets import EngineGoneError, Ticket
from .expected import AnswerLengths
from .members import LOOKED, Berth, Members
from .routed import LIVES, RoutedTicket
from .router import Replica, Router
from .told import DiffersError


class Beside(Protocol):
    """What is open as long as a fleet runs."""

    async def open(self) -> None: ...
    def close(self) -> None: ...


class Fleet(Engines):
    """Replicas that each decode whole requests, and a router before them.

    A request whose replica is lost goes on in another one, behind the last tokens that are known,
    and the client hears of it from where it was: tokens do not depend on who writes them.

    Args:
        berth: what replica number i is started with.
        count: how many there are at first.
        deadline: seconds of silence after which one has hung.

    Attributes:
        beside: what is opened before the replicas are started, and closed when they have ended.
    """

    def __init__(self, berth: Callable[[int], Berth], count: int, deadline: float) -> None:
        super().__init__()
        self._count = count
        self._router = Router()
        self._lengths = AnswerLengths()
        self._members = Members(berth, deadline, self._router, self._changed, self._saw)
        self._tickets: dict[str, RoutedTicket] = {}
        self._placed: dict[str, Replica] = {}
        self._waiting: list[RoutedTicket] = []
        self.beside: list[Beside] = []

    @property
    def open(self) -> int:
        return len(self._tickets)

    @property
    def counts(self) -> Mapping[str, Mapping[str, Any]]:
        return self._members.counts

    @property
    def replicas(self) -> Sequence[ReplicaFacts]:
        return [self._router.facts_of(one) for one in self._members.all]

    async def run(self) -> None:
        for one in self.beside:
            await one.open()
        try:
            await self._served()
        finally:
            for one in self.beside:
                one.close()

    async def _served(self) -> None:
        self._members.begin(self._count)
        while not self._over:
            await asyncio.sleep(LOOKED)
            await self._members.look()
            for ticket in [one for one in self._waiting if one.left <= 0]:
                self._waiting.remove(ticket)
                ticket.fail_("no replica was there", "timeout")
        await self._members.ended()

    @property
    def _over(self) -> bool:
        return self.state is LinkState.CLOSED or self.failed is not None

    def _changed(self) -> None:
        """A replica has come, gone, or become another."""
        self.failed = self._members.failed
        ready = (one.link.graphs for one in self._members.all if one.link.ready)
        self.graphs = next(ready, self.graphs)
        if self.state not in (self._members.state, LinkState.CLOSED):
            self._set(self._members.state)
        self._place_waiting()

    async def scale(self, count: int, tell: Callable[[str], None]) -> None:
        """Have so many replicas, and tell of each that comes and goes; raises ScaleError."""
        await self._members.scale(count, tell)

    async def close(self) -> None:
        self._set(LinkState.CLOSED)
        await self._members.close()
        waiting = self._waiting
        self._waiting = []
        for ticket in waiting:
            ticket.deliver(None)

    # -- requests ---------------------------------------------------------------------------------

    def ask(self, message: Submit | Encode | Decode) -> Ticket:
        if not self.ready:
            raise EngineGoneError("no replica is there")
        ticket = RoutedTicket(self, message, self._lengths.of(message, self.graphs))
        self._tickets[message.id] = ticket
        self._place(ticket)
        return ticket

    def forget(self, ticket: Ticket) -> None:
        self._tickets.pop(ticket.id, None)
        self._leave(ticket)
        self._place_waiting()

    def _leave(self, ticket: Ticket) -> None:
        """Nobody has it any more; what has not ended is cancelled."""
        self._waiting = [one for one in self._waiting if one is not ticket]
        self._router.release_(ticket.id)
        if replica := self._placed.pop(ticket.id, None):
            replica.link.forget(ticket)

    def _place(self, ticket: RoutedTicket) -> None:
        """Give it to a replica, or let it wait for one."""
        beside = ticket.alone and any(self._tickets[id].alone for id in self._placed)
        while not beside and (replica := self._router.choose_(ticket.asked)):
            try:
                replica.link.give(ticket.asked, ticket)
            except EngineGoneError:  # it is about to be told lost
                self._router.detach_(replica)
                continue
            self._placed[ticket.id] = replica
            self._router.weigh_(replica, ticket.id, ticket.tokens)
            return
        self._waiting.append(ticket)

    def _place_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for ticket in waiting:
            self._place(ticket)

    def took(self, ticket: RoutedTicket, message: Message | None) -> None:
        """What the replica that has a request says of it."""
        match message:
            case None:
                self._lost(ticket)
            case Admitted():
                ticket.admitted_(message)
            case Wrote():
                self._wrote(ticket, message)
            case _:
                if isinstance(message, Ended):
                    self._lengths.note_(ticket.message, message, self.graphs)
                ticket.deliver(message)
                self._leave(ticket)
                self._place_waiting()

    def _wrote(self, ticket: RoutedTicket, message: Wrote) -> None:
        try:
            ticket.news_(message)
        except DiffersError as error:
            self._leave(ticket)
            ticket.fail_(str(error))
            return
        if replica := self._placed.get(ticket.id):
            self._router.weigh_(replica, ticket.id, ticket.tokens)

    def _lost(self, ticket: RoutedTicket) -> None:
        """The replica that had it is lost: it goes on elsewhere, unless that is of no use."""
        self._placed.pop(ticket.id, None)
        self._router.release_(ticket.id)
        ticket.again_()
        if self._over:
            ticket.deliver(None)
        elif ticket.losses >= LIVES:
            ticket.fail_(f"{ticket.losses} replicas were lost while they answered it")
        elif ticket.left <= 0:
            ticket.fail_("the replica that answered it was lost", "timeout")
        else:
            self.reruns += 1
            self._place(ticket)

    # -- pictures ---------------------------------------------------------------------------------

    def look(self, on: bool) -> None:
        self._members.show(on)

    def _saw(self, picture: Picture) -> None:
        for watcher in [*self.watchers]:
            watcher(picture)
