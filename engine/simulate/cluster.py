"""A cluster without models: workers with a scheduler each, a router, links that take time.

Every worker is a simulation; the events of all workers are in one heap. An outline is written by
one worker, or by a tensor-parallel group, whose members step together; then its prefix is
gathered, and its parts go to workers by `placement`, without computing the rows that they receive.
Every part has the place of its request in the order of arrivals."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from heapq import heappop, heappush

from ...states.graph.graph import Graph
from ...states.yaml.source import number_of
from ..errors import UsageError
from ..workers import placement
from .costs import GroupCost, Link, ModelShape, StepCost
from .world import HINT_FACTORS, MAX_IDS, PART_PROMPT, Arrival, Live, ServedFigures, Simulation

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
        return f"{number_of(self.workers, 'worker')}, {groups}"


@dataclass(eq=False, slots=True)
class ClusterJob:
    """One request. ids: of its prompt, later with its outline; unwritten: number of its texts."""

    number: int
    arrival: Arrival
    ids: tuple[int, ...]
    unwritten: int = 1


class SimulatedWorker(Simulation):
    """One worker, or a group of workers (`members`) that write outlines together. number: among
    workers, or groups. group: of a worker. in_step: busy, a group also with the regroup after a
    step. owed: the group has just stepped, so the worker steps next. worked: busy seconds."""

    number = 0
    members: Sequence["SimulatedWorker"] = ()
    group: "SimulatedWorker | None" = None
    in_step = False
    owed = False
    worked = 0.0


class ClusterSimulation:
    """A cluster on arrivals in the order of time; raises UsageError: not with this graph."""

    def __init__(
        self, graph: Graph, cost: StepCost, policy: str, setup: ClusterSetup, seed: int = 0
    ) -> None:
        self.setup = setup
        self.served = ClusterFigures(workers=setup.workers)
        self.now = 0.0
        numbers = range(setup.workers)
        self.workers = [SimulatedWorker(graph, cost, policy, f"{seed}/{i}") for i in numbers]
        for number, worker in enumerate(self.workers):
            worker.number = number
        self.loads = placement.Loads(setup.workers)
        self.beginnings = placement.PrefixIndex()
        tree = self.workers[0].manager.capacity.round_rows(1)
        together = GroupCost(
            **asdict(cost), ranks=setup.tp, link=setup.link, shape=setup.shape, tree=tree
        )
        self.groups = list[SimulatedWorker]()
        for first in range(0, setup.workers, setup.tp) if setup.tp > 1 else ():
            number = len(self.groups)
            group = SimulatedWorker(graph, together, policy, f"{seed}/{-1 - number}")
            group.number = number
            group.members = self.workers[first : first + setup.tp]
            for member in group.members:
                member.group = group
            self.groups.append(group)
        self.group_loads = placement.Loads(len(self.groups))
        self.group_beginnings = placement.PrefixIndex()
        mean = sum(int(k) * n for k, n in cost.tokens.items()) / sum(cost.tokens.values())
        self._token_seconds = cost.seconds(tree, 1, 0) / mean
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
        simulations = [*self.workers, *self.groups]
        served.refused = sum(one.served.refused for one in simulations)
        served.tokens = sum(one.served.tokens for one in simulations)
        served.steps = sum(one.served.steps for one in simulations)
        served.count_schedulers([one.manager for one in simulations])
        served.seconds = self.now
        common = served.regroup_seconds + sum(group.worked for group in self.groups)
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
            first = replace(arrival, texts=(arrival.outline,), outline=0, budget=arrival.outline)
        else:
            tokens += sum(arrival.texts)
        by_group = outlines and bool(self.groups)
        beginnings = self.group_beginnings if by_group else self.beginnings
        loads = self.group_loads if by_group else self.loads
        chosen = placement.route(arrival.prompt, beginnings.find(keys), loads)
        beginnings.note_(keys, chosen)
        worker = (self.groups if by_group else self.workers)[chosen]
        self._add_load(worker, tokens)
        self._submit(worker, Live(first, job, WHOLE_ANSWER, tokens), job.ids)

    def _submit(self, worker: SimulatedWorker, live: Live, ids: tuple[int, ...]) -> None:
        worker.submit(live, ids, live.job.number)
        self._step(worker)

    def _add_load(self, worker: SimulatedWorker, tokens: int) -> None:
        if not worker.members:
            self.loads.add_(worker.number, tokens)
        if (group := worker if worker.members else worker.group) is not None:
            self.group_loads.add_(group.number, tokens)

    def _step(self, worker: SimulatedWorker) -> None:
        """Start the next step of a worker or group that is free. Members step before their group,
        and the group before a worker, unless it has just stepped."""
        group = worker.group
        if group is None:
            blocked = any(member.in_step for member in worker.members)
        else:
            blocked = group.in_step or (bool(group.live) and not worker.owed)
        if worker.in_step or blocked:
            return
        worker.owed = False
        worker.now = start = max(worker.now, self.now)
        worker.in_step = worker.step()
        worker.worked += worker.now - start
        if worker.in_step:
            self._later(worker.now, partial(self._stepped, worker))

    def _stepped(self, worker: SimulatedWorker) -> None:
        """After a step; a group gathers the prefixes of the outlines that it has written."""
        written = self._collect(worker)
        if worker.members:
            sizes = [len(job.ids) * self.setup.shape.kv_bytes for job in written]
            seconds = sum(self.setup.link.all_gather(size, self.setup.tp) for size in sizes)
            self.served.regroups += len(written)
            self.served.regroup_bytes += sum(sizes)
            self.served.regroup_seconds += seconds
            if written:
                self._later(self.now + seconds, partial(self._regrouped, worker, written))
            else:
                self._regrouped(worker, written)
            return
        worker.in_step = False
        for job in written:
            self._spread(job, [worker.number], 0)
        if worker.group is not None:
            self._step(worker.group)
        self._step(worker)

    def _regrouped(self, group: SimulatedWorker, written: list[ClusterJob]) -> None:
        """Place the parts of outlines, and let every member step by itself."""
        for job in written:
            self._spread(job, [member.number for member in group.members], len(job.ids))
        group.in_step = False
        for member in group.members:
            member.owed = True
            self._step(member)
        self._step(group)

    def _collect(self, worker: SimulatedWorker) -> list[ClusterJob]:
        """Count the results of a step; returns the jobs whose outline is written."""
        first = [live.job for live in worker.started if live.part == WHOLE_ANSWER]
        self.served.time_to_first_token += [self.now - job.arrival.at for job in first]
        written = list[ClusterJob]()
        for live in worker.ended:
            job: ClusterJob = live.job
            self._add_load(worker, -live.load)
            if live.part == WHOLE_ANSWER and job.arrival.outline and not self.setup.together:
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
        """Place parts. holders: workers with the prefix; received: rows not in their trees."""
        size = len(job.ids) * self.setup.shape.kv_bytes
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
            worker = self.workers[number]
            self._add_load(worker, expected[part])
            # A part is a request whose prompt begins with the rows that the worker has received.
            at = self.now + seconds if number in sent else self.now
            ids = job.ids + (MAX_IDS - 1 - part,) * PART_PROMPT
            arrival = Arrival(at, len(ids), (job.arrival.texts[part],), budget=job.arrival.budget)
            rows = len(job.ids) if number in sent else received
            live = Live(arrival, job, part, expected[part], received=rows)
            if number in sent:
                self._later(at, partial(self._submit, worker, live, ids))
            else:
                self._submit(worker, live, ids)
