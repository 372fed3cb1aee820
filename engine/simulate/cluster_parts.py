"""What a simulated cluster is made of: its sizes, its requests, its workers and groups of them."""

from dataclasses import dataclass
from typing import NamedTuple

from ...states.graph.graph import Graph
from ..errors import UsageError
from .arrivals import Arrival
from .costs import StepCost
from .links import Link, ModelShape
from .world import ENDLESS, PART, Live, Simulation

WHOLE = -1  # a part's number, of an outline or of an answer without parts


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """workers: of the cluster. tp: of them write an outline together. together: parts stay where
    their outline was written."""

    workers: int
    tp: int
    link: Link
    shape: ModelShape
    together: bool = False

    def check(self) -> None:
        """Raise UsageError for what cannot be."""
        if self.tp < 1 or self.workers % self.tp:
            raise UsageError(f"{self.workers} workers do not make groups of {self.tp}")
        if self.together and self.tp > 1:
            raise UsageError("parts that stay together are written by one worker: --tp 1")

    @property
    def name(self) -> str:
        """As `8 workers, tp 2, nvlink`."""
        if self.together:
            return f"{self.workers} workers, together"
        return f"{self.workers} workers, tp {self.tp}, {self.link.name}"


@dataclass(eq=False, slots=True)
class ClusterJob:
    """One request. ids: of its prompt, and then of its outline too; left: texts not yet written."""

    number: int
    arrival: Arrival
    ids: tuple[int, ...]
    left: int = 1

    @classmethod
    def of(cls, number: int, one: Arrival) -> "ClusterJob":
        """One that comes; it shares ids with others of its stem, and with nobody else."""
        own = ((2 * number + 1) % ENDLESS,) * (one.prompt - one.shared)
        return cls(number, one, (-1 - one.stem,) * one.shared + own)

    def outlined_(self) -> None:
        """Its outline is written, and its parts can be."""
        self.ids += ((2 * self.number + 2) % ENDLESS,) * self.arrival.outline
        self.left = len(self.arrival.texts)

    def part(self, part: int, now: float) -> tuple[Arrival, tuple[int, ...]]:
        """One of its parts as a request of its own, and the ids of that one's prompt."""
        ids = self.ids + (ENDLESS - 1 - part,) * PART
        one = self.arrival
        return Arrival(now, len(ids), (one.texts[part],), budget=one.budget), ids


class TextTag(NamedTuple):
    """Whose text a worker writes. tokens: that were counted for it."""

    job: ClusterJob
    part: int
    tokens: int


class SimulatedWorker(Simulation):
    """One worker, or what a group of them does together; remembers what has happened to whom.

    Attributes:
        in_step: it is busy. owed: its group has just had a step, now it may have its own.
        worked: seconds that it was busy for.
    """

    def __init__(self, number: int, graph: Graph, cost: StepCost, policy: str, seed: int) -> None:
        super().__init__(graph, cost, policy, f"{seed}/{number}")
        self.number = number
        self.in_step = False
        self.owed = False
        self.worked = 0.0
        self.begun = list[TextTag]()
        self.ended = list[TextTag]()

    def begin(self, live: Live) -> None:
        self.begun.append(live.tag)

    def end(self, live: Live, refused: bool) -> None:
        self.served.refused += refused
        self.ended.append(live.tag)

    def start(self, now: float) -> bool:
        """Begin a step, if there is anything to do; `now` of the worker is then its end."""
        self.now = max(self.now, now)
        began = self.now
        self.in_step = self.step()
        self.worked += self.now - began
        return self.in_step


@dataclass(eq=False, slots=True)
class WorkerGroup:
    """Workers that write outlines together. running: of such a step, or a regroup after it;
    stepping: members that are in a step of their own."""

    number: int
    both: SimulatedWorker
    members: list[SimulatedWorker]
    running: bool = False
    stepping: int = 0
