"""A cluster without models: workers with a scheduler each, a router, links that take time.

Every worker is a simulation; the events of all workers are in one heap. An outline is written by
one worker, or by a tensor-parallel group, whose members step together; then its prefix is
gathered, and its parts go to workers by `placement`, without computing the rows that they receive.
Every part has the place of its request in the order of arrivals.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from ...states.graph.graph import Graph
from ..errors import UsageError
from ..workers import placement
from .arrivals import Arrival
from .costs import GroupCost, Link, ModelShape, StepCost
from .world import HINT_FACTORS, MAX_IDS, PART_PROMPT, Live, ServedFigures, Simulation

WHOLE_ANSWER = -1  # the part number of an outline, or of an answer without parts


@dataclass(slots=True)
class ClusterFigures(ServedFigures):
    """Of a cluster. busy: the mean share of time that a worker works. regroups: gathers of a prefix
    after its outline; sent: prefixes sent to a worker outside the group. events: simulated ones."""

    workers: int = 0
    busy: float = 0.0
    regroups: int = 0
    regroup_bytes: int = 0
    regroup_seconds: float = 0.0
    sent: int = 0
    sent_bytes: int = 0
    sent_seconds: float = 0.0
    events: int = 0


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """tp: size of the groups that write an outline. together: parts stay with the worker of their
    outline. Raises UsageError: the numbers do not fit together."""

    workers: int
    tp: int
    link: Link
    shape: ModelShape
    together: bool = False

    def __post_init__(self) -> None:
        if self.workers % self.tp:
            raise UsageError(f"{self.workers} workers do not make groups of {self.tp}")
        if self.together and self.tp > 1:
            raise UsageError("parts that stay together are written by one worker: --tp 1")

    @property
    def name(self) -> str:
        """As `8 workers, tp 2, nvlink`."""
        groups = "together" if self.together else f"tp {self.tp}, {self.link.name}"
        return f"{self.workers} workers, {groups}"


@dataclass(eq=False, slots=True)
class ClusterJob:
    """One request. ids: of its prompt, later with its outline; unwritten: number of its texts."""

    number: int
    arrival: Arrival
    ids: tuple[int, ...]
    unwritten: int = 1


class TextTag(NamedTuple):
    """A text of a worker. tokens: its counted load."""

    job: ClusterJob
    part: int
    tokens: int


class SimulatedWorker(Simulation):
    """One worker, or the common steps of a group; the tag of a text is a `TextTag`. in_step: busy.
    owed: the group has just stepped, so the worker steps next. worked: busy seconds."""

    def __init__(self, number: int, graph: Graph, cost: StepCost, policy: str, seed: int) -> None:
        super().__init__(graph, cost, policy, f"{seed}/{number}")
        self.number = number
        self.in_step = False
        self.owed = False
        self.worked = 0.0

    def start(self, now: float) -> bool:
        """Start a step, if there is anything to do; afterwards `self.now` is its end."""
        self.now = start = max(self.now, now)
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
    """A cluster on arrivals in the order of time. Raises UsageError: the graph cannot be
    simulated."""

    def __init__(
        self, graph: Graph, cost: StepCost, policy: str, setup: ClusterSetup, seed: int = 0
    ) -> None:
        def worker(number: int, cost: StepCost) -> SimulatedWorker:
            return SimulatedWorker(number, graph, cost, policy=policy, seed=seed)

        self.setup = setup
        self.served = ClusterFigures(workers=setup.workers)
        self.now = 0.0
        self.workers = [worker(number, cost) for number in range(setup.workers)]
        self.loads = placement.Loads(range(setup.workers))
        self.beginnings = placement.PrefixIndex()
        tree = self.workers[0].manager.capacity.round_rows(1)
        together = GroupCost(
            **asdict(cost), ranks=setup.tp, link=setup.link, shape=setup.shape, tree=tree
        )
        firsts = range(0, setup.workers, setup.tp) if setup.tp > 1 else ()
        self.groups = [
            WorkerGroup(
                number, worker(-1 - number, together), self.workers[first : first + setup.tp]
            )
            for number, first in enumerate(firsts)
        ]
        self.group_loads = placement.Loads(range(len(self.groups)))
        self.group_beginnings = placement.PrefixIndex()
        self._token_seconds = cost.seconds(tree, 1, 0) / cost.mean_tokens
        self._rng = random.Random(f"cluster {seed}")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0  # events ever in the heap, for their order

    def run(self, arrivals: Iterable[Arrival]) -> ClusterFigures:
        served = self.served
        source = iter(arrivals)
        after = next(source, None)
        while after is not None or self._events:
            served.events += 1
            if after is not None and (not self._events or after.at <= self._events[0][0]):
                self.now = after.at
                self._arrive(after)
                after = next(source, None)
            else:
                self.now, _, handle = heappop(self._events)
                handle()
        groups = [group.both for group in self.groups]
        simulations = [*self.workers, *groups]
        for simulation in simulations:
            served.refused += simulation.served.refused
            served.tokens += simulation.served.tokens
            served.steps += simulation.served.steps
        served.count_schedulers([simulation.manager for simulation in simulations])
        served.seconds = self.now
        common = served.regroup_seconds + sum(group.worked for group in groups)
        worked = self.setup.tp * common + sum(worker.worked for worker in self.workers)
        served.busy = worked / (self.setup.workers * self.now) if self.now else 0.0
        return served

    def _later(self, at: float, handle: Callable[[], None]) -> None:
        self._num_planned += 1
        heappush(self._events, (at, self._num_planned, handle))

    def _arrive(self, arrival: Arrival) -> None:
        number = self.served.requests
        self.served.requests += 1
        # A request shares ids with the requests of its stem only.
        stem = (-1 - arrival.stem,) * arrival.shared
        new = ((2 * number + 1) % MAX_IDS,) * (arrival.prompt - arrival.shared)
        job = ClusterJob(number, arrival, stem + new)
        keys = placement.prefix_keys(stem)  # keys of a whole prompt would be unique
        tokens = arrival.prompt // placement.TOKENS_READ_PER_WRITTEN + arrival.outline
        outlines = bool(arrival.outline) and not self.setup.together
        first = arrival
        if outlines:
            texts = (arrival.outline,)
            first = Arrival(arrival.at, arrival.prompt, texts, budget=arrival.outline)
        else:
            tokens += sum(arrival.texts)
        tag = TextTag(job, WHOLE_ANSWER, tokens)
        by_group = outlines and bool(self.groups)
        loads = self.group_loads if by_group else self.loads
        beginnings = self.group_beginnings if by_group else self.beginnings
        chosen = placement.route(arrival.prompt, beginnings.find(keys), loads)
        beginnings.note_(keys, chosen)
        if by_group:
            loads.add_(chosen, tokens)
            group = self.groups[chosen]
            group.both.submit(Live(first, tag), job.ids, number)
            self._step_together(group)
        else:
            self._add_load(chosen, tokens)
            self.workers[chosen].submit(Live(first, tag), job.ids, number)
            self._step(self.workers[chosen])

    def _submit_part(self, number: int, tag: TextTag, received: int) -> None:
        """A part of an outline, as a request whose prompt begins with `received` rows."""
        job = tag.job
        ids = job.ids + (MAX_IDS - 1 - tag.part,) * PART_PROMPT
        texts = (job.arrival.texts[tag.part],)
        arrival = Arrival(self.now, len(ids), texts, budget=job.arrival.budget)
        self.workers[number].submit(Live(arrival, tag, received), ids, job.number)
        self._step(self.workers[number])

    def _add_load(self, worker: int, tokens: int) -> None:
        self.loads.add_(worker, tokens)
        if self.groups:
            self.group_loads.add_(worker // self.setup.tp, tokens)

    def _group_of(self, worker: SimulatedWorker) -> WorkerGroup | None:
        return self.groups[worker.number // self.setup.tp] if self.groups else None

    def _step(self, worker: SimulatedWorker) -> None:
        """Start the next step of a free worker, unless its group steps first."""
        group = self._group_of(worker)
        blocked = group is not None and (group.running or not (group.both.is_idle or worker.owed))
        if worker.in_step or blocked:
            return
        worker.owed = False
        if worker.start(self.now):
            if group is not None:
                group.stepping += 1
            self._later(worker.now, partial(self._stepped, worker))

    def _stepped(self, worker: SimulatedWorker) -> None:
        worker.in_step = False
        group = self._group_of(worker)
        if group is not None:
            group.stepping -= 1
        for job in self._collect(worker):
            self._spread(job, [worker.number], 0)
        if group is not None:
            self._step_together(group)
        self._step(worker)

    def _step_together(self, group: WorkerGroup) -> None:
        """Start a common step, if no member of the group is in a step."""
        if not (group.running or group.stepping) and group.both.start(self.now):
            group.running = True
            self._later(group.both.now, partial(self._stepped_together, group))

    def _stepped_together(self, group: WorkerGroup) -> None:
        """After a common step: gather the prefixes of the written outlines."""
        written = self._collect(group.both, group)
        sizes = [len(job.ids) * self.setup.shape.kv_bytes for job in written]
        seconds = sum(self.setup.link.all_gather(size, self.setup.tp) for size in sizes)
        self.served.regroups += len(written)
        self.served.regroup_bytes += sum(sizes)
        self.served.regroup_seconds += seconds
        if written:
            self._later(self.now + seconds, partial(self._regrouped, group, written))
        else:
            self._regrouped(group, written)

    def _regrouped(self, group: WorkerGroup, written: list[ClusterJob]) -> None:
        """Place the parts of outlines, and let every member step by itself."""
        for job in written:
            self._spread(job, [member.number for member in group.members], len(job.ids))
        group.running = False
        for member in group.members:
            member.owed = True
            self._step(member)
        self._step_together(group)

    def _collect(
        self, worker: SimulatedWorker, group: WorkerGroup | None = None
    ) -> list[ClusterJob]:
        """Count the results of a step; returns the jobs whose outline is written."""
        first = [live.tag.job for live in worker.started if live.tag.part == WHOLE_ANSWER]
        self.served.time_to_first_token += [self.now - job.arrival.at for job in first]
        written = list[ClusterJob]()
        for job, part, tokens in (live.tag for live in worker.ended):
            if group is None:
                self._add_load(worker.number, -tokens)
            else:
                self.group_loads.add_(group.number, -tokens)
            if part == WHOLE_ANSWER and job.arrival.outline and not self.setup.together:
                # The ids of the outline become part of the prefix.
                job.ids += ((2 * job.number + 2) % MAX_IDS,) * job.arrival.outline
                job.unwritten = len(job.arrival.texts)
                written.append(job)
                continue
            job.unwritten -= 1
            if not job.unwritten:
                self.served.time_to_answer.append(self.now - job.arrival.at)
        return written

    def _spread(self, job: ClusterJob, holders: list[int], received: int) -> None:
        """Place a request's parts on the workers that finish them first. holders: workers with the
        prefix; received: rows of it that are not in their trees."""
        rows = len(job.ids)
        size = rows * self.setup.shape.kv_bytes
        seconds = self.setup.link.send(size)
        fee = round(seconds / self._token_seconds) + 1
        expected = [max(round(n * self._rng.uniform(*HINT_FACTORS)), 1) for n in job.arrival.texts]
        waits = placement.candidates(holders, len(expected), fee, self.loads)
        placed = [one for one in placement.place_branches(expected, waits) if one is not None]
        sent = {worker for worker in placed if worker not in holders}
        self.served.sent += len(sent)
        self.served.sent_bytes += len(sent) * size
        self.served.sent_seconds += len(sent) * seconds
        for part, number in enumerate(placed):
            tag = TextTag(job, part, expected[part])
            self._add_load(number, tag.tokens)
            if number in sent:
                submit = partial(self._submit_part, number, tag, rows)
                self._later(self.now + seconds, submit)
            else:
                self._submit_part(number, tag, received)
