"""A driver's workers, and the units in which they decode: one of them, or several together."""

from dataclasses import dataclass, field

from ..workers.messages import Loaded, Order, packed
from .ports import WorkerPort

NONE = -1  # no group


@dataclass(eq=False, slots=True)
class ClusterMember:
    """A worker, as long as it lives. part: of the weights, which it has. epoch: of the group that
    it is in; rank: its place in it; proven: it was in one; alone: itself, as the only one of a
    unit."""

    name: str
    port: WorkerPort
    part: int
    loaded: Loaded | None = None
    epoch: int = NONE
    rank: int = 0
    proven: bool = False
    alone: "Unit" = field(init=False)

    def __post_init__(self) -> None:
        self.alone = Unit((self,))

    def ask(self, order: Order) -> None:
        self.port.ask(packed(order))


@dataclass(eq=False, slots=True)
class Unit:
    """Workers that decode together, as one; of several the first is heard. A unit of one lives as
    long as its worker, one of several as long as the group.

    place: its number among those of its size.
    """

    members: tuple[ClusterMember, ...]
    place: int = 0

    @property
    def leader(self) -> ClusterMember:
        return self.members[0]

    @property
    def tp(self) -> int:
        return len(self.members)

    @property
    def number(self) -> int:
        """What workers know it by."""
        return self.place if self.tp > 1 else self.leader.rank

    @property
    def name(self) -> str:
        return "+".join(one.name for one in self.members)

    @property
    def most(self) -> int:
        """Branches that it decodes side by side."""
        return 0 if self.leader.loaded is None else self.leader.loaded.most
