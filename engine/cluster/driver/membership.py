"""Who the workers are: started, grouped, heard, and replaced when they are gone."""

from collections import Counter
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from ...errors import ClusterError
from ...prepare.cluster_block import ClusterBlock
from ..workers.groups import Store
from ..workers.messages import (
    CannotStart,
    FormGroup,
    Grouped,
    GroupLost,
    Loaded,
    Order,
    Reply,
    reply_of,
)
from ..workers.units import units_of
from .members import NONE, ClusterMember, Unit
from .ports import Launcher

TRIES = 3  # workers in a row that are lost before they were in a group
HEARING = 0.2  # seconds that one look at what workers say takes at most

Tell = Callable[[Mapping[str, Any]], None]
Took = Callable[[ClusterMember, Reply], None]


class Membership:
    """The workers of a cluster, so many of them, and the group that they form.

    Attributes:
        members: those that are not lost, as far as is known; losses: how many were. epoch: of the
            group that was asked for last. writing, decoding: how many workers write an outline
            together, and how many a branch.
    """

    def __init__(self, launcher: Launcher, block: ClusterBlock, tell: Tell) -> None:
        self.launcher = launcher
        self.deadline = block.deadline
        self.tell = tell
        self.store = Store(block.interface, block.deadline)
        self.writing = block.skeleton.tp
        self.decoding = block.branches.tp
        self.members: list[ClusterMember] = []
        self.epoch = NONE
        self.losses = 0
        self._numbers = 0
        self._failures = 0
        self._count = block.workers
        self._why = ""
        self._size = 0
        self._several = dict[int, list[Unit]]()

    @property
    def ready(self) -> list[ClusterMember]:
        """Members whose models are loaded."""
        return [one for one in self.members if one.loaded is not None]

    @property
    def able(self) -> list[ClusterMember]:
        """Those that are ready and can be in a group, by rank. Where each has a part of the weights
        they are as many of each part as make whole units: whoever has the first one comes first."""
        parts = self.launcher.parts
        if parts == 1:
            return self.ready
        several = max(self.writing, self.decoding) // parts  # of each part, in a unit
        having = [[one for one in self.ready if one.part == part] for part in range(parts)]
        count = min(map(len, having)) // several * several
        return [one for some in having for one in some[:count]]

    @property
    def group(self) -> list[ClusterMember]:
        """Members of the group, by rank."""
        inside = [one for one in self.ready if one.epoch == self.epoch != NONE]
        return sorted(inside, key=lambda one: one.rank)

    @property
    def whole(self) -> bool:
        """Whether all who were asked into the group are in it."""
        return len(self.group) == self._size

    def units(self, tp: int) -> list[Unit]:
        """Those of so many workers."""
        return [one.alone for one in self.ready] if tp == 1 else self._several.get(tp, [])

    @property
    def writers(self) -> list[Unit]:
        """Units that write outlines."""
        return self.units(self.writing)

    @property
    def decoders(self) -> list[Unit]:
        """Units that decode branches."""
        return self.units(self.decoding)

    def tell_all(self, order: Order) -> None:
        """Give an order to everybody in the group."""
        for member in self.group:
            member.ask(order)

    @property
    def changed(self) -> bool:
        """Whether somebody is missing, or able to be in the group and is not."""
        return len(self.members) < self._count or self.group != self.able

    def fill_(self) -> None:
        """Start as many workers as are missing; raises ClusterError."""
        while len(self.members) < self._count:
            if self._failures >= TRIES:
                raise ClusterError(f"{TRIES} workers in a row were lost: {self._why}")
            name = f"worker-{self._numbers}"
            self._numbers += 1
            part = self._part_missing()
            self.members.append(ClusterMember(name, self.launcher.start(name, part), part))

    def _part_missing(self) -> int:
        """Which part of the weights fewest have."""
        had = Counter(one.part for one in self.members)
        return min(range(self.launcher.parts), key=lambda part: had[part])

    def begin_(self) -> None:
        """Wait until as many workers as there are to be have loaded their models.

        Raises:
            ClusterError: some in a row cannot.
        """
        while len(self.ready) < self._count:
            self.fill_()
            self.hear_(_nothing)

    def form_(self, took: Took) -> None:
        """A new group of all that are able to be in one, once somebody is.

        Args:
            took: is given everything else that is heard meanwhile.

        Raises:
            ClusterError: all are ready, and parts of the weights are missing.
        """
        self.fill_()
        while not self.able:
            if len(self.ready) >= self._count:
                parts = sorted(one.part for one in self.ready)
                raise ClusterError(f"workers have parts {parts} of the weights: no whole")
            self.hear_(took)
            self.fill_()
        self.epoch += 1
        began = monotonic()
        asked = self.able
        store = self.store
        self._size = len(asked)
        self._several = {}
        for rank, one in enumerate(asked):
            one.rank = rank
            assert one.loaded is not None
            where = store.address, store.port, one.loaded.address
            sizes = self.deadline, self.writing, self.decoding
            one.ask(FormGroup(self.epoch, rank, len(asked), *where, *sizes))
        answered: dict[ClusterMember, Grouped] = {}

        def took_group(member: ClusterMember, reply: Reply) -> None:
            if not isinstance(reply, Grouped):
                took(member, reply)
            elif reply.epoch == self.epoch:
                answered[member] = reply

        while any(one in self.members and one not in answered for one in asked):
            self.hear_(took_group)
        for one, reply in answered.items():
            one.epoch = NONE if reply.why else self.epoch
        for one in self.group:
            self._failures = self._failures if one.proven else 0
            one.proven = True
        if self.whole:
            self._several = self._in_units(self.group)
        names = [one.name for one in self.group]
        seconds = monotonic() - began
        whys = [f"{one.name}: {reply.why}" for one, reply in answered.items() if reply.why]
        self.tell({"event": "group", "epoch": self.epoch, "members": names, "seconds": seconds})
        if whys:
            self.tell({"event": "no_group", "why": whys})

    def _in_units(self, group: list[ClusterMember]) -> dict[int, list[Unit]]:
        """Units of several workers, by size."""
        largest = max(self.writing, self.decoding)
        found = dict[int, list[Unit]]()
        for tp in {self.writing, self.decoding} - {1}:
            ranks = enumerate(units_of(len(group), tp, largest))
            found[tp] = [Unit(tuple(group[one] for one in unit), place) for place, unit in ranks]
        return found

    def hear_(self, took: Took, seconds: float = HEARING) -> None:
        """Take in what workers have said; waits so long for the first."""
        ports = {one.port: one for one in self.members}
        for port, text in self.launcher.wait([*ports], seconds):
            member = ports[port]
            reply = reply_of(text)
            if isinstance(reply, Loaded):
                member.loaded = reply
                if self.epoch != NONE:
                    self.tell({"event": "worker", "worker": member.name, "pid": reply.pid})
            elif isinstance(reply, CannotStart):
                port.lost = reply.why
            elif isinstance(reply, GroupLost):
                self._left_(member, reply)
            else:
                took(member, reply)
        for member in [*self.members]:
            if member.port.lost:
                self.lose_(member)

    def _left_(self, member: ClusterMember, reply: GroupLost) -> None:
        """A collective failed for a member: there has to be another group."""
        if reply.epoch == member.epoch:
            member.epoch = NONE
            self.tell({"event": "group_lost", "worker": member.name, "why": reply.why})

    def lose_(self, member: ClusterMember) -> None:
        """A member is gone, and made sure of."""
        self.members.remove(member)
        self.losses += 1
        member.port.kill()
        self._why = member.port.lost
        self._failures += not member.proven
        self.tell({"event": "lost", "worker": member.name, "why": self._why})


def _nothing(member: ClusterMember, reply: Reply) -> None:
    """Nobody has asked for anything yet."""
