"""A cluster without models: workers with a scheduler each, a router, links that take time.

Every worker is a simulation; the events of all workers are in one heap. An outline is written by
one worker, or by a tensor-parallel group, whose members step together; then its prefix is
gathered, and its parts go to workers by `placement`, without computing the rows that they receive.
Every part has the place of its request in the order of arrivals.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from ...states.graph.graph import Graph
from ..errors import UsageError
from ..workers.placement import (
    TOKENS_READ_PER_WRITTEN,
    Loads,
    PrefixIndex,
    candidates,
    place_branches,
    prefix_keys,
    route,
)
from .arrivals import Arrival
from .costs import GroupCost, Link, ModelShape, StepCost
from .figures import ClusterFigures
from .world import HINT_FACTORS, MAX_IDS, PART_PROMPT, Live, Simulation

WHOLE_ANSWER = -1  # the part number of an outline, or of an answer without parts


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """workers: their number. tp: size of the groups that write an outline. together: parts stay
    with the worker of their outline."""

    workers: int
    tp: int
    link: Link
    shape: ModelShape
    together: bool = False

    def check(self) -> None:
        """Raise UsageError for an invalid setup."""
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
    """One request. ids: of its prompt, later with its outline; unwritten: number of its texts."""

    number: int
    arrival: Arrival
    ids: tuple[int, ...]
    unwritten: int = 1

    @classmethod
    def of(cls, number: int, arrival: Arrival) -> "ClusterJob":
        """A new request; it shares ids with the requests of its stem only."""
        new = ((2 * number + 1) % MAX_IDS,) * (arrival.prompt - arrival.shared)
        return cls(number, arrival, (-1 - arrival.stem,) * arrival.shared + new)

    def outlined_(self) -> None:
        """After the outline: its ids become part of the prefix."""
        self.ids += ((2 * self.number + 2) % MAX_IDS,) * self.arrival.outline
        self.unwritten = len(self.arrival.texts)

    def part(self, part: int, now: float) -> tuple[Arrival, tuple[int, ...]]:
        """A part as a request, and the ids of its prompt."""
        ids = self.ids + (MAX_IDS - 1 - part,) * PART_PROMPT
        text = self.arrival.texts[part]
        return Arrival(now, len(ids), (text,), budget=self.arrival.budget), ids


class TextTag(NamedTuple):
    """A text of a worker. tokens: its counted load."""

    job: ClusterJob
    part: int
    tokens: int


class SimulatedWorker(Simulation):
    """One worker, or the common steps of a group; records the first tokens and ends of texts.

    Attributes:
        in_step: busy. owed: the group has just stepped, so the worker steps next. worked: busy
            seconds.
    """

    def __init__(self, number: int, graph: Graph, cost: StepCost, policy: str, seed: int) -> None:
        super().__init__(graph, cost, policy, f"{seed}/{number}")
        self.number = number
        self.in_step = False
        self.owed = False
        self.worked = 0.0
        self.started = list[TextTag]()
        self.ended = list[TextTag]()

    def first_token(self, live: Live) -> None:
        self.started.append(live.tag)

    def end(self, live: Live, refused: bool) -> None:
        self.served.refused += refused
        self.ended.append(live.tag)

    def start(self, now: float) -> bool:
        """Start a step, if there is anything to do; afterwards `self.now` is its end."""
        self.now = max(self.now, now)
        start = self.now
        self.in_step = self.step()
        self.worked += self.now - start
        return self.in_step


@dataclass(eq=False, slots=True)
class WorkerGroup:
    """Workers that write outlines together. running: in a common step or a regroup after it;
    stepping: number of members in a step of their own."""

    number: int
    both: SimulatedWorker
    members: list[SimulatedWorker]
    running: bool = False
    stepping: int = 0


class ClusterSimulation:
    """A cluster on arrivals in the order of time.

    Raises:
        UsageError: the graph cannot be simulated, or the setup is invalid.
    """

    def __init__(
        self, graph: Graph, cost: StepCost, policy: str, setup: ClusterSetup, seed: int = 0
    ) -> None:
        setup.check()
        self.setup = setup
        self.served = ClusterFigures(setup.workers)
        self.now = 0.0
        numbers = range(setup.workers)
        self.workers = [SimulatedWorker(number, graph, cost, policy, seed) for number in numbers]
        self.loads = Loads(numbers)
        self.beginnings = PrefixIndex()
        tree = self.workers[0].manager.capacity.round_rows(1)
        together = GroupCost.of_steps(cost, setup.tp, setup.link, setup.shape, tree)
        self.groups = [
            WorkerGroup(
                number,
                SimulatedWorker(-1 - number, graph, together, policy, seed),
                self.workers[number * setup.tp : (number + 1) * setup.tp],
            )
            for number in range(setup.workers // setup.tp if setup.tp > 1 else 0)
        ]
        self.group_loads = Loads(range(len(self.groups)))
        self.group_beginnings = PrefixIndex()
        self._token_seconds = cost.seconds(tree, 1, 0) / cost.mean_tokens
        self._rng = random.Random(f"cluster {seed}")
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def run(self, arrivals: Iterable[Arrival]) -> ClusterFigures:
        """Serve all arrivals."""
        source = iter(arrivals)
        after = next(source, None)
        while after is not None or self._events:
            self.served.events += 1
            if after is not None and (not self._events or after.at <= self._events[0][0]):
                self.now = after.at
                self._arrive(after)
                after = next(source, None)
                continue
            self.now, _, handle, event = heappop(self._events)
            handle(event)
        return self._figures()

    def _figures(self) -> ClusterFigures:
        groups = [group.both for group in self.groups]
        simulations = [*self.workers, *groups]
        served = self.served
        gathered = self.setup.tp * served.regroup_seconds
        together = self.setup.tp * sum(group.worked for group in groups)
        served.worked = gathered + together + sum(worker.worked for worker in self.workers)
        served.seconds = self.now
        for simulation in simulations:
            served.refused += simulation.served.refused
            served.tokens += simulation.served.tokens
            served.steps += simulation.served.steps
            served.preemptions += simulation.manager.lifecycle.preemptions
        caches = [simulation.manager.prefixes for simulation in simulations]
        trees = [cache.figures for cache in caches if cache is not None]
        served.hit_rate = sum(f.reused for f in trees) / max(sum(f.asked for f in trees), 1)
        return served

    def _later(self, at: float, handle: Callable[[Any], None], event: Any) -> None:
        self.served.planned += 1
        heappush(self._events, (at, self.served.planned, handle, event))

    # -- arrivals and routing ---------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        number = self.served.requests
        self.served.requests += 1
        job = ClusterJob.of(number, arrival)
        # Only the shared ids can match; keys of a whole prompt would be unique.
        ids = job.ids
        keys = prefix_keys(job.ids[: arrival.shared])
        outlines = bool(arrival.outline) and not self.setup.together
        first = (
            Arrival(arrival.at, arrival.prompt, (arrival.outline,), budget=arrival.outline)
            if outlines
            else arrival
        )
        tokens = (
            arrival.prompt // TOKENS_READ_PER_WRITTEN
            + sum(first.texts)
            + (0 if outlines else arrival.outline)
        )
        if outlines and self.groups:
            chosen = route(arrival.prompt, self.group_beginnings.find(keys), self.group_loads)
            self.group_beginnings.note_(keys, chosen)
            self.group_loads.add_(chosen, tokens)
            self.groups[chosen].both.submit(
                first, ids, 0, TextTag(job, WHOLE_ANSWER, tokens), number
            )
            self._go_together(self.groups[chosen])
            return
        chosen = route(arrival.prompt, self.beginnings.find(keys), self.loads)
        self.beginnings.note_(keys, chosen)
        self._give(self.workers[chosen], first, ids, 0, TextTag(job, WHOLE_ANSWER, tokens))

    def _give(
        self,
        worker: SimulatedWorker,
        arrival: Arrival,
        ids: tuple[int, ...],
        received: int,
        tag: TextTag,
    ) -> None:
        self._count(worker.number, tag.tokens)
        worker.submit(arrival, ids, received, tag, tag.job.number)
        self._go(worker)

    def _count(self, worker: int, tokens: int) -> None:
        self.loads.add_(worker, tokens)
        if self.groups:
            self.group_loads.add_(worker // self.setup.tp, tokens)

    # -- steps ------------------------------------------------------------------------------------

    def _go(self, worker: SimulatedWorker) -> None:
        """Start the next step of a free worker, unless its group steps first."""
        group = self._group_of(worker)
        blocked = group is not None and (group.running or not (group.both.is_idle or worker.owed))
        if worker.in_step or blocked:
            return
        worker.owed = False
        if worker.start(self.now):
            if group is not None:
                group.stepping += 1
            self._later(worker.now, self._stepped, worker)

    def _stepped(self, worker: SimulatedWorker) -> None:
        worker.in_step = False
        group = self._group_of(worker)
        if group is not None:
            group.stepping -= 1
        self._collect(worker)
        if group is not None:
            self._go_together(group)
        self._go(worker)

    def _go_together(self, group: WorkerGroup) -> None:
        """Start a common step, if no member of the group is in a step."""
        if group.running or group.stepping or not group.both.start(self.now):
            return
        group.running = True
        self._later(group.both.now, self._stepped_together, group)

    def _stepped_together(self, group: WorkerGroup) -> None:
        written = self._collect(group.both, group)
        if not written:
            self._release(group)
            return
        sizes = [len(job.ids) * self.setup.shape.kv_bytes for job in written]
        seconds = sum(self.setup.link.all_gather(size, self.setup.tp) for size in sizes)
        self.served.note_regroups(len(written), sum(sizes), seconds)
        self._later(self.now + seconds, self._regrouped, (group, written))

    def _regrouped(self, event: tuple[WorkerGroup, list[ClusterJob]]) -> None:
        group, written = event
        holders = [member.number for member in group.members]
        for job in written:
            self._spread(job, holders, len(job.ids))
        self._release(group)

    def _release(self, group: WorkerGroup) -> None:
        """Let every member step by itself."""
        group.running = False
        for member in group.members:
            member.owed = True
            self._go(member)
        self._go_together(group)

    def _group_of(self, worker: SimulatedWorker) -> WorkerGroup | None:
        return self.groups[worker.number // self.setup.tp] if self.groups else None

    # -- results of a step ------------------------------------------------------------------------

    def _collect(
        self, worker: SimulatedWorker, group: WorkerGroup | None = None
    ) -> list[ClusterJob]:
        """Count the results of a step; returns the jobs whose outline a group has written."""
        for job, part, _ in worker.started:
            if part == WHOLE_ANSWER:
                self.served.first.add(self.now - job.arrival.at)
        ended = worker.ended[:]
        written = list[ClusterJob]()
        worker.started.clear()
        worker.ended.clear()
        for job, part, tokens in ended:
            if group is None:
                self._count(worker.number, -tokens)
            else:
                self.group_loads.add_(group.number, -tokens)
            if part == WHOLE_ANSWER and job.arrival.outline and not self.setup.together:
                job.outlined_()
                written.append(job)
                continue
            job.unwritten -= 1
            if not job.unwritten:
                self.served.whole.add(self.now - job.arrival.at)
        if group is None:
            for job in written:
                self._spread(job, [worker.number], 0)
        return written

    def _spread(self, job: ClusterJob, holders: list[int], received: int) -> None:
        """Place a request's parts on the workers that finish them first.

        Args:
            holders: workers with the prefix; received: rows of it that are not in their trees.
        """
        rows = len(job.ids)
        size = rows * self.setup.shape.kv_bytes
        seconds = self.setup.link.send(size)
        fee = round(seconds / self._token_seconds) + 1
        expected = [max(round(n * self._rng.uniform(*HINT_FACTORS)), 1) for n in job.arrival.texts]
        placed = place_branches(expected, candidates(holders, len(expected), fee, self.loads))
        sent = {worker for worker in placed if worker not in holders}
        self.served.note_sent(len(sent), len(sent) * size, len(sent) * seconds)
        for part, worker in enumerate(placed):
            tag = TextTag(job, part, expected[part])
            if worker in sent:
                self._count(worker, tag.tokens)
                self._later(self.now + seconds, self._received, (worker, tag, rows))
            else:
                self._give(self.workers[worker], *job.part(part, self.now), received, tag)

    def _received(self, event: tuple[int, TextTag, int]) -> None:
        worker, tag, rows = event
        self.workers[worker].submit(*tag.job.part(tag.part, self.now), rows, tag, tag.job.number)
        self._go(self.workers[worker])
