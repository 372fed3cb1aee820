"""Who the workers are: started, grouped, heard, and replaced when they are gone."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from ..errors import ClusterError
from ..prepare.cluster_block import ClusterBlock
from .groups import Store
from .launching import Launcher, WorkerPort
from .messages import (
    CannotStart,
    FormGroup,
    Grouped,
    Loaded,
    Order,
    Reply,
    packed,
    reply_of,
)

TRIES = 3  # workers in a row that are lost before they have loaded their models
NONE = -1  # no group
HEARING = 0.2  # seconds that one look at what workers say takes at most

Tell = Callable[[Mapping[str, Any]], None]
Took = Callable[["ClusterMember", Reply], None]


@dataclass(eq=False, slots=True)
class ClusterMember:
    """A worker, as long as it lives. epoch: of the group that it is in; rank: its place in it."""

    name: str
    port: WorkerPort
    loaded: Loaded | None = None
    epoch: int = NONE
    rank: int = 0
    works: set[str] = field(default_factory=set)

    def ask(self, order: Order) -> None:
        self.port.ask(packed(order))


class Membership:
    """The workers of a cluster, so many of them, and the group that they form.

    Attributes:
        members: those that are not lost, as far as is known. epoch: of the group that was asked
            for last. lost: members that were found lost, until somebody takes care of them;
            losses: how many there were.
    """

    def __init__(self, launcher: Launcher, block: ClusterBlock, tell: Tell) -> None:
        self.launcher, self.deadline, self.tell = launcher, block.deadline, tell
        self.store = Store(block.interface, block.deadline)
        self.members: list[ClusterMember] = []
        self.lost: list[ClusterMember] = []
        self.epoch = NONE
        self.losses = 0
        self._numbers, self._failures, self._count = 0, 0, block.workers
        self._why = ""

    @property
    def ready(self) -> list[ClusterMember]:
        """Members whose models are loaded."""
        return [one for one in self.members if one.loaded is not None]

    @property
    def group(self) -> list[ClusterMember]:
        """Members of the group, by rank."""
        inside = [one for one in self.ready if one.epoch == self.epoch != NONE]
        return sorted(inside, key=lambda one: one.rank)

    @property
    def changed(self) -> bool:
        """Whether somebody is missing, or ready and in no group."""
        return len(self.members) < self._count or self.group != self.ready

    def fill_(self) -> None:
        """Start as many workers as are missing; raises ClusterError."""
        while len(self.members) < self._count:
            if self._failures >= TRIES:
                raise ClusterError(f"{TRIES} workers in a row were lost: {self._why}")
            name = f"worker-{self._numbers}"
            self._numbers += 1
            self.members.append(ClusterMember(name, self.launcher.start(name)))

    def begin_(self) -> None:
        """Wait until as many workers as there are to be have loaded their models.

        Raises:
            ClusterError: some in a row cannot.
        """
        while len(self.ready) < self._count:
            self.fill_()
            self.hear_(_nothing)
        self.take_lost()

    def form_(self, took: Took) -> None:
        """A new group of all that are ready, once somebody is.

        Args:
            took: is given everything else that is heard meanwhile.
        """
        self.fill_()
        while not self.ready:
            self.hear_(took)
            self.fill_()
        self.epoch += 1
        began, asked, store = monotonic(), self.ready, self.store
        for rank, one in enumerate(asked):
            one.rank = rank
            assert one.loaded is not None
            where = store.address, store.port, one.loaded.address
            one.ask(FormGroup(self.epoch, rank, len(asked), *where, self.deadline))
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
        names, seconds = [one.name for one in self.group], monotonic() - began
        whys = [f"{one.name}: {reply.why}" for one, reply in answered.items() if reply.why]
        self.tell({"event": "group", "epoch": self.epoch, "members": names, "seconds": seconds})
        if whys:
            self.tell({"event": "no_group", "why": whys})

    def hear_(self, took: Took, seconds: float = HEARING) -> None:
        """Take in what workers have said; waits so long for the first."""
        ports = {one.port: one for one in self.members}
        for port, text in self.launcher.wait([*ports], seconds):
            member, reply = ports[port], reply_of(text)
            if isinstance(reply, Loaded):
                member.loaded, self._failures = reply, 0
                if self.epoch != NONE:
                    self.tell({"event": "worker", "worker": member.name, "pid": reply.pid})
            elif isinstance(reply, CannotStart):
                port.lost = reply.why
            else:
                took(member, reply)
        for member in [*self.members]:
            if member.port.lost:
                self.lose_(member)

    def lose_(self, member: ClusterMember) -> None:
        """A member is gone, and made sure of."""
        self.members.remove(member)
        self.lost.append(member)
        self.losses += 1
        member.port.kill()
        self._why = member.port.lost
        self._failures += member.loaded is None
        self.tell({"event": "lost", "worker": member.name, "why": self._why})

    def take_lost(self) -> list[ClusterMember]:
        """Members that were lost since the last call."""
        lost, self.lost = self.lost, []
        return lost


def _nothing(member: ClusterMember, reply: Reply) -> None:
    """Nobody has asked for anything yet."""
