"""A cluster without models: workers with the scheduler of each, a router, links that take time.

Every worker is a simulation of its own; events of all lie in one heap. An outline is written by one
worker, or by a tensor-parallel group whose members are at its disposal together; then its prefix is
gathered, and its parts go to workers by `placement`, who compute none of the rows that they are
brought. Everywhere a part stands in the order of arrivals where its request does.
"""

import random
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Any

from ...states.graph.graph import Graph
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
from .cluster_figures import ClusterServed
from .cluster_parts import WHOLE, ClusterJob, ClusterSetup, SimulatedWorker, TextTag, WorkerGroup
from .costs import StepCost
from .links import GroupCost
from .world import HINT


class ClusterSimulation:
    """A cluster on arrivals that come in the order of time.

    Raises:
        UsageError: the graph cannot be simulated, or there is no such cluster.
    """

    def __init__(
        self, graph: Graph, cost: StepCost, policy: str, setup: ClusterSetup, seed: int = 0
    ) -> None:
        setup.check()
        self.setup = setup
        self.served = ClusterServed(setup.workers)
        self.now = 0.0
        numbers = range(setup.workers)
        self.workers = [SimulatedWorker(number, graph, cost, policy, seed) for number in numbers]
        self.loads = Loads(numbers)
        self.beginnings = PrefixIndex()
        tree = self.workers[0].manager.room.round_rows(1)
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
        self._chance = random.Random(f"cluster {seed}")
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def run(self, arrivals: Iterable[Arrival]) -> ClusterServed:
        """Serve them all."""
        source = iter(arrivals)
        after = next(source, None)
        while after is not None or self._events:
            self.served.events += 1
            if after is not None and (not self._events or after.at <= self._events[0][0]):
                self.now = after.at
                self._arrive(after)
                after = next(source, None)
                continue
            self.now, _, happens, whom = heappop(self._events)
            happens(whom)
        gathered = self.setup.tp * self.served.regroup_seconds
        together = self.setup.tp * sum(group.both.worked for group in self.groups)
        self.served.worked = gathered + together + sum(one.worked for one in self.workers)
        return self.served.of(self.now, self.workers, [group.both for group in self.groups])

    def _later(self, at: float, happens: Callable[[Any], None], whom: Any) -> None:
        self.served.planned += 1
        heappush(self._events, (at, self.served.planned, happens, whom))

    # -- who comes, and where to ------------------------------------------------------------------

    def _arrive(self, one: Arrival) -> None:
        number = self.served.requests
        self.served.requests += 1
        job = ClusterJob.of(number, one)
        # Of a whole prompt there would be more keys, which nobody else has.
        ids = job.ids
        keys = prefix_keys(job.ids[: one.shared])
        outlines = bool(one.outline) and not self.setup.together
        first = Arrival(one.at, one.prompt, (one.outline,), budget=one.outline) if outlines else one
        tokens = (
            one.prompt // TOKENS_READ_PER_WRITTEN
            + sum(first.texts)
            + (0 if outlines else one.outline)
        )
        if outlines and self.groups:
            chosen = route(one.prompt, self.group_beginnings.find(keys), self.group_loads)
            self.group_beginnings.note_(keys, chosen)
            self.group_loads.add_(chosen, tokens)
            self.groups[chosen].both.submit(first, ids, 0, TextTag(job, WHOLE, tokens), number)
            self._go_together(self.groups[chosen])
            return
        chosen = route(one.prompt, self.beginnings.find(keys), self.loads)
        self.beginnings.note_(keys, chosen)
        self._give(self.workers[chosen], first, ids, 0, TextTag(job, WHOLE, tokens))

    def _give(
        self,
        worker: SimulatedWorker,
        one: Arrival,
        ids: tuple[int, ...],
        brought: int,
        tag: TextTag,
    ) -> None:
        self._count(worker.number, tag.tokens)
        worker.submit(one, ids, brought, tag, tag.job.number)
        self._go(worker)

    def _count(self, worker: int, tokens: int) -> None:
        self.loads.add_(worker, tokens)
        if self.groups:
            self.group_loads.add_(worker // self.setup.tp, tokens)

    # -- steps ------------------------------------------------------------------------------------

    def _go(self, worker: SimulatedWorker) -> None:
        """The next step of a worker that is free, unless its group comes first."""
        group = self._group_of(worker)
        held = group is not None and (group.running or not (group.both.is_idle or worker.owed))
        if worker.in_step or held:
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
        self._hear(worker)
        if group is not None:
            self._go_together(group)
        self._go(worker)

    def _go_together(self, group: WorkerGroup) -> None:
        """A step of a group none of whose members is in one."""
        if group.running or group.stepping or not group.both.start(self.now):
            return
        group.running = True
        self._later(group.both.now, self._stepped_together, group)

    def _stepped_together(self, group: WorkerGroup) -> None:
        written = self._hear(group.both, group)
        if not written:
            self._set_free(group)
            return
        sizes = [len(job.ids) * self.setup.shape.kv_bytes for job in written]
        seconds = sum(self.setup.link.all_gather(size, self.setup.tp) for size in sizes)
        self.served.note_regroups(len(written), sum(sizes), seconds)
        self._later(self.now + seconds, self._regrouped, (group, written))

    def _regrouped(self, whom: tuple[WorkerGroup, list[ClusterJob]]) -> None:
        group, written = whom
        holders = [member.number for member in group.members]
        for job in written:
            self._spread(job, holders, len(job.ids))
        self._set_free(group)

    def _set_free(self, group: WorkerGroup) -> None:
        """Every member may have a step of its own now."""
        group.running = False
        for member in group.members:
            member.owed = True
            self._go(member)
        self._go_together(group)

    def _group_of(self, worker: SimulatedWorker) -> WorkerGroup | None:
        return self.groups[worker.number // self.setup.tp] if self.groups else None

    # -- what has happened ------------------------------------------------------------------------

    def _hear(self, worker: SimulatedWorker, group: WorkerGroup | None = None) -> list[ClusterJob]:
        """What a step has brought; outlines that a group has written are returned."""
        for job, part, _ in worker.begun:
            if part == WHOLE:
                self.served.first.add(self.now - job.arrival.at)
        ended = worker.ended[:]
        written = list[ClusterJob]()
        worker.begun.clear()
        worker.ended.clear()
        for job, part, tokens in ended:
            if group is None:
                self._count(worker.number, -tokens)
            else:
                self.group_loads.add_(group.number, -tokens)
            if part == WHOLE and job.arrival.outline and not self.setup.together:
                job.outlined_()
                written.append(job)
                continue
            job.left -= 1
            if not job.left:
                self.served.whole.add(self.now - job.arrival.at)
        if group is None:
            for job in written:
                self._spread(job, [worker.number], 0)
        return written

    def _spread(self, job: ClusterJob, holders: list[int], brought: int) -> None:
        """A request's parts go where they are done first.

        Args:
            holders: who has the prefix; brought: rows of it that they do not have in their trees.
        """
        one = job.arrival
        rows = len(job.ids)
        size = rows * self.setup.shape.kv_bytes
        seconds = self.setup.link.send(size)
        fee = round(seconds / self._token_seconds) + 1
        expected = [max(round(n * self._chance.uniform(*HINT)), 1) for n in one.texts]
        placed = place_branches(expected, candidates(holders, len(expected), fee, self.loads))
        sent = {worker for worker in placed if worker not in holders}
        self.served.note_sent(len(sent), len(sent) * size, len(sent) * seconds)
        for part, worker in enumerate(placed):
            tag = TextTag(job, part, expected[part])
            if worker in sent:
                self._count(worker, tag.tokens)
                self._later(self.now + seconds, self._brought, (worker, tag, rows))
            else:
                self._give(self.workers[worker], *job.part(part, self.now), brought, tag)

    def _brought(self, whom: tuple[int, TextTag, int]) -> None:
        worker, tag, rows = whom
        self.workers[worker].submit(*tag.job.part(tag.part, self.now), rows, tag, tag.job.number)
        self._go(self.workers[worker])
