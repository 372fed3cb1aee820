"""What a worker does: it takes orders between the steps of its engines.

Workers that compute together must begin with the same requests at the same step, for all that
follows from logits each of them decides for itself. So orders that concern several workers are told
to everybody in one order, and before a step that is made together the first of those who make it
says how many of these it has: everybody takes exactly so many. Whoever computes with nobody takes
orders as they come, and makes its steps at its own pace.
"""

import gc
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from ....models.sharded import RankLost
from ....states.round import RoundSummary
from ...errors import message_of
from ...record.metrics import Meter
from ...run.session import Session
from .counting import counts_of
from .groups import Group, Grouping, StoreClient
from .messages import (
    Assign,
    Close,
    Count,
    Counted,
    FormGroup,
    Greet,
    Grouped,
    GroupLost,
    Loaded,
    Order,
    Recall,
    Regroup,
    Regrouped,
    Reply,
    is_shared,
)
from .orders import Orders
from .prefixes import PrefixExchange
from .team import Team

NAP = 0.2  # seconds between two looks at whether a worker that waits is to end


class Duty:
    """What a worker does, on its thread.

    Attributes:
        teams: its engines, by how many workers compute together in each. The one that it has for
            itself lives on; the others begin and end with their group.
    """

    def __init__(
        self, session: Session, orders: Orders, tell: Callable[[Reply], None], address: str
    ) -> None:
        self.session = session
        self.orders = orders
        self.tell = tell
        self.address = address
        self.meter = Meter()
        self.groups: Grouping | None = None
        self.teams: dict[int, Team] = {}
        self._client = StoreClient()
        self.closed = False

    def greet(self) -> None:
        """Begin anew, and say what a driver has to know before it asks for anything."""
        self._leave()
        for team in self.teams.values():
            team.recall()
        self.meter = Meter()
        weights = [*self.session.models.target.parameters()]
        loaded = Loaded(
            os.getpid(),
            self.address,
            self.session.program.graph.layout.max_num_branches,
            (weights[0].data_ptr(), sum(one.nbytes for one in weights)),
        )
        self.tell(loaded)

    # -- a turn -----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Take orders, then make a step with every engine that has something to do; waits a little
        where there is nothing."""
        together = self._together
        try:
            if together is None:
                self._take_alone()
            else:
                self._take_with(together)
            if self._together is together:  # else the others have to be asked first
                for team in [*self.teams.values()]:
                    team.step()
        except RankLost as error:
            self._lose_group(str(error))

    @property
    def _together(self) -> Team | None:
        """The largest team that has something to do and is not this worker alone: whoever is in it
        makes the next step with all of it."""
        busy = [team for team in self.teams.values() if team.busy and team.ranks is not None]
        return busy[0] if busy else None

    def _take_alone(self) -> None:
        """All that is there, up to something that others do too."""
        busy = any(team.busy for team in self.teams.values())
        order = self.orders.take(0.0 if busy else NAP)
        while order is not None:
            self.take(order)
            alone = self._together is None and not self.closed
            order = self.orders.take() if alone else None

    def _take_with(self, together: Team) -> None:
        """As many shared orders as the first of them has, and all that are for this worker alone.

        Raises:
            RankLost: the others did not come, or the orders that they have.
        """
        assert self.groups is not None
        left = together.agree(self.orders.count_shared())
        while left and self._together is together:
            order = self.orders.take(self.groups.told.deadline)
            if order is None:
                raise RankLost("orders that others have did not come")
            left -= is_shared(order)
            self.take(order)
        while self._together is together and (order := self.orders.take_own()) is not None:
            self.take(order)

    def take(self, order: Order) -> None:
        """Do what is asked; parts of requests are only begun."""
        match order:
            case FormGroup():
                self.tell(self._grouped(order))
            case Assign():
                self._assign(order)
            case Regroup():
                self.tell(self._regrouped(order))
            case Recall():
                for team in self.teams.values():
                    team.recall(order.work)
            case Count():
                self.tell(self._counted(order.number))
            case Greet():
                self.greet()
            case Close():
                self.closed = True

    def close(self) -> None:
        """Let go of groups and engines; whoever waits is told nothing more."""
        self._leave()
        for team in self.teams.values():
            team.close()

    def _assign(self, order: Assign) -> None:
        """Begin with what this worker's team is to do; what a team that is gone was to do, another
        one will be told."""
        if order.tp == 1:
            self._team(1).assign(order)
        elif order.tp in self.teams and self._number(order.tp) == order.unit:
            self.teams[order.tp].assign(order)

    def _team(self, tp: int, group: Group | None = None) -> Team:
        """The engine for so many workers, which is there or begins."""
        if tp not in self.teams:
            ranks = None if group is None else group.ranks
            self.teams[tp] = Team(self.session, self.tell, self._round_done, ranks)
            self.teams = {one: self.teams[one] for one in sorted(self.teams, reverse=True)}
        return self.teams[tp]

    def _number(self, tp: int) -> int | None:
        """Of the unit of so many workers that this one is in."""
        own = None if self.groups is None else self.groups.units.get(tp)
        return None if own is None else own[0]

    # -- groups, and what travels in them ---------------------------------------------------------

    def _grouped(self, order: FormGroup) -> Grouped:
        began = perf_counter()
        why = ""
        self._leave()
        try:
            groups = Grouping(order, self._client)
            for tp, (_, group) in groups.units.items():
                self._team(tp, group)
            self.groups = groups
        except RuntimeError as error:
            self._leave()
            why = message_of(error)
        return Grouped(order.epoch, perf_counter() - began, why)

    def _leave(self) -> None:
        """Let go of all groups, and of what was computed in them."""
        self.groups = None
        shared = [tp for tp, team in self.teams.items() if team.ranks]
        for tp in shared:
            self.teams.pop(tp).close()
        if shared:
            gc.collect()  # pools are large, and sockets few

    def _lose_group(self, why: str) -> None:
        assert self.groups is not None
        epoch = self.groups.epoch
        self._leave()
        self.tell(GroupLost(epoch, why))

    def _regrouped(self, order: Regroup) -> Regrouped:
        groups = self.groups
        if groups is None or groups.epoch != order.epoch:
            return Regrouped(order.number, 0, False, 0.0, 0.0, "is not in this group")
        source = self.teams.get(order.tp) if self._number(order.tp) == order.unit else None
        own = self.teams.get(groups.told.branches)
        exchange = PrefixExchange(order, self.session, groups, source, own)
        began = perf_counter()
        try:
            reply = exchange.perform()
        except RuntimeError as error:
            self._leave()
            spent = perf_counter() - began
            return Regrouped(order.number, 0, False, spent, spent, message_of(error))
        return replace(reply, seconds=perf_counter() - began)

    def _round_done(self, summary: RoundSummary) -> None:
        self.meter.forward_done(summary, 0)

    def _counted(self, number: int) -> Counted:
        meter = self.meter
        self.meter = Meter()
        counts = counts_of(meter)
        held = [one.held(meter) for one in reversed(self.teams.values())]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Counted(number, counts, held, len(os.listdir("/dev/fd")), peak)
