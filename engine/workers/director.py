"""Directs a run over workers: the ops and guards of graphs/machines/cluster.yaml.

The director decodes nothing. It has all requests in host integers, and workers send their tokens as
they commit them. So what a lost worker had continues elsewhere behind its last committed token, and
coins are keyed by position: the text is the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

from ...ops.registry import guard, op
from ...states.phases.merge import Answer, delivered
from ...states.request import Branch, Finish, Request
from ...states.request_table import RequestTable, RunLimits
from ...states.text.prompts import PromptBook
from ..events import Committed
from ..prepare.inputs import Prompt
from ..run.session import Session
from .placement import assign_branches, expected_length
from .protocol import Assign, BranchEnded, CountWork, Regroup, Regrouped, Reply, WorkCounts
from .request_state import RequestState, new_request_state
from .worker_groups import NO_EPOCH, RECEIVE_INTERVAL, Report, RunWorker, WorkerGroup, WorkerGroups


@dataclass(frozen=True, slots=True)
class Assignment:
    """A part of a request, by branch indices (none: the outline), and the group that decodes it."""

    state: RequestState
    group: WorkerGroup
    branches: tuple[int, ...]


@dataclass(slots=True)
class RegroupFigures:
    """Prefixes that were sent. bytes: that arrived; seconds: in all, and of the collectives;
    failed: collectives that did not end."""

    count: int = 0
    rows: int = 0
    bytes: int = 0
    failed: int = 0
    seconds: float = 0.0
    collective_seconds: float = 0.0


class Director:
    """Requests, workers, and which group decodes what.

    Args:
        report: takes events for the trace.

    Attributes:
        tokens: committed, by worker. figures: of regroups.
    """

    def __init__(self, session: Session, workers: WorkerGroups, report: Report) -> None:
        self.session = session
        self.workers = workers
        self.report = report
        graph = session.program.graph
        target = session.models.target
        limits = RunLimits(
            graph.layout,
            graph.drafter,
            graph.skeleton is None or graph.skeleton.share == "outline",
            target.max_positions,
            target.vocab_size,
        )
        self.table = RequestTable(limits)
        self.states: list[RequestState] = []
        self.tokens: Counter[str] = Counter()
        self.figures = RegroupFigures()
        self._numbers = count(1)  # of orders
        self._assignments: dict[str, Assignment] = {}
        self._replies: dict[int, dict[RunWorker, Any]] = {}  # to an order, by its number

    def submit(self, prompts: Iterable[Prompt]) -> None:
        """Add requests; raises PromptError."""
        for prompt in prompts:
            self.states.append(new_request_state(self.session, self.table, prompt))

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    @property
    def requests(self) -> Sequence[Request]:
        return self.table.requests

    # -- loads ------------------------------------------------------------------------------------

    def _running(self) -> Iterator[tuple[WorkerGroup, Branch]]:
        for state in self.states:
            yield from state.running()

    def loads(self, groups: Sequence[WorkerGroup]) -> dict[WorkerGroup, int]:
        """Tokens that each group is expected to write still."""
        loads = dict.fromkeys(groups, 0)
        for group, branch in self._running():
            if group in loads:
                loads[group] += expected_length(branch)
        return loads

    def capacity(self, groups: Sequence[WorkerGroup]) -> dict[WorkerGroup, int]:
        """Further branches that each group can take."""
        counts = Counter(group for group, _ in self._running())
        return {group: group.max_branches - counts[group] for group in groups}

    def free(self, groups: Sequence[WorkerGroup]) -> list[WorkerGroup]:
        """Groups that can take a branch, those with the least work first."""
        loads = self.loads(groups)
        capacity = self.capacity(groups)
        return sorted((one for one in groups if capacity[one] > 0), key=lambda one: loads[one])

    # -- assignments ------------------------------------------------------------------------------

    def assigned_branches(self, state: RequestState) -> set[int]:
        """Indices of a request's branches that groups have received."""
        assignments = (one for one in self._assignments.values() if one.state is state)
        return {index for assignment in assignments for index in assignment.branches}

    def assign_(self, state: RequestState, group: WorkerGroup, branches: Sequence[Branch]) -> None:
        """Send branches of a request to a group, or without any its outline."""
        id = f"{next(self._numbers)}"
        indices = tuple(branch.index for branch in branches)
        self._assignments[id] = Assignment(state, group, indices)
        part = state.part(branches)
        order = Assign(id, state.prompt, part, tp=group.tp, group=group.number)
        if group.tp > 1:  # all workers get what some do together, in one order
            self.workers.send_all(order)
        else:
            group.leader.order(order)

    def drop_lost_(self) -> None:
        """Take back what lost groups had."""
        present = {*self.workers.decoders, *self.workers.writers}
        present |= {worker.single for worker in self.workers.workers}
        lost = [id for id, one in self._assignments.items() if one.group not in present]
        for id in lost:
            del self._assignments[id]
        names = [name for state in self.states for name in state.drop_lost_(present)]
        if names:
            self.report({"event": "again", "branches": names})

    # -- replies ----------------------------------------------------------------------------------

    def handle_(self, worker: RunWorker, reply: Reply) -> None:
        """Take in one reply of a worker."""
        match reply:
            case Regrouped() | WorkCounts():
                if reply.number in self._replies:
                    self._replies[reply.number][worker] = reply
            case Committed():
                assignment = self._assignment(reply.request, worker)
                if assignment is None:
                    return
                state = assignment.state
                if (branch := state.branch_of(reply.branch)) is not None:
                    branch.tokens += reply.tokens
                self.tokens[worker.name] += len(reply.tokens)
                self.report({"event": "tokens", "request": state.request.key})
            case BranchEnded():
                assignment = self._assignment(reply.id, worker)
                if assignment is None:
                    return
                state = assignment.state
                state.end_(reply.branch, Finish(reply.finish), reply.note)
                if reply.rows:
                    state.source = assignment.group
                    state.rows = reply.rows
                    if assignment.group in self.workers.decoders:
                        state.holders.add(assignment.group)

    def _assignment(self, id: str, worker: RunWorker) -> Assignment | None:
        """What a reply is about; None for work that was taken back."""
        assignment = self._assignments.get(id)
        return None if assignment is None or assignment.group.leader is not worker else assignment

    def _collect_(
        self, workers: Sequence[RunWorker], order: Regroup | CountWork
    ) -> dict[RunWorker, Any]:
        """The replies of these workers to an order, without those that are lost meanwhile."""
        replies = self._replies[order.number] = {}
        for worker in workers:
            worker.order(order)
        self.workers.receive_from_(workers, replies, self.handle_)
        del self._replies[order.number]
        return replies

    def count_(self) -> dict[str, WorkCounts]:
        """Counters of all workers since the last time, by name; raises ClusterError."""
        replies = self._collect_(self.workers.ready, CountWork(next(self._numbers)))
        return {worker.name: counts for worker, counts in replies.items()}

    # -- prefixes ---------------------------------------------------------------------------------

    def send_prefix_(self, state: RequestState) -> None:
        """Send a request's prefix to the groups that lack it, if a group has it. Where that fails,
        they compute it."""
        while set(state.assigned.values()) - state.holders:
            group = self.workers.group
            source = state.source
            if source is None or any(worker not in group for worker in source.workers):
                return
            if not (state.rows and self.workers.complete and len(group) > 1):
                return
            order = Regroup(
                number=next(self._numbers),
                epoch=self.workers.epoch,
                tp=source.tp,
                group=source.number,
                ids=state.prefix[: state.rows[0]],
                rows=state.rows,
                cache_salt=state.prompt.cache_salt,
            )
            start = monotonic()
            replies: dict[RunWorker, Regrouped] = self._collect_(group, order)
            stored = {worker for worker, reply in replies.items() if reply.stored}
            decoders = self.workers.decoders
            state.holders |= {one for one in decoders if stored.issuperset(one.workers)}
            for worker, reply in replies.items():
                worker.epoch = NO_EPOCH if reply.error else worker.epoch
            self._count_regroup_(state, [*replies.values()], monotonic() - start)
            present = [reply.rows for reply in replies.values() if reply.rows is not None]
            if not present:
                return
            state.rows = present[0]  # fewer: some have been evicted

    def _count_regroup_(
        self, state: RequestState, replies: Sequence[Regrouped], seconds: float
    ) -> None:
        errors = [reply.error for reply in replies if reply.error]
        moved = sum(reply.bytes for reply in replies)
        collective = max((reply.collective for reply in replies), default=0.0)
        self.figures.count += 1
        self.figures.rows += sum(state.rows)
        self.figures.bytes += moved
        self.figures.failed += bool(errors)
        self.figures.seconds += seconds
        self.figures.collective_seconds += collective
        record: dict[str, Any] = {
            "event": "regroup",
            "request": state.request.key,
            "rows": list(state.rows),
            "bytes": moved,
            "seconds": seconds,
            "collective_seconds": collective,
        }
        self.report(record | ({"why": errors} if errors else {}))


# -- the states -----------------------------------------------------------------------------------


@op("cluster.form_group_", commits=True)
def form_group_(cluster: Director) -> None:
    """Replace lost workers, and join those that are ready in one process group."""
    cluster.drop_lost_()
    cluster.workers.form_(cluster.handle_)
    cluster.drop_lost_()


@op("cluster.write_outlines_")
def write_outlines_(cluster: Director) -> None:
    """Assign outlines to the groups with the least work, first come first served."""
    for state in cluster.states:
        if state.needs_writer and (free := cluster.free(cluster.workers.writers)):
            state.writer = free[0]
            cluster.assign_(state, free[0], ())


@op("cluster.read_outlines_", commits=True)
def read_outlines_(cluster: Director) -> None:
    """Parse finished outlines into branches; an unreadable one falls back to one plain answer."""
    for state in cluster.states:
        if state.outlined:
            state.parse_()
            cluster.report({"event": "outline", "request": state.request.key})


@op("cluster.regroup_")
def regroup_(cluster: Director) -> None:
    """Place branches on groups, and send prefixes to those that lack them, one collective each."""
    for state in cluster.states:
        groups = cluster.workers.decoders
        loads = cluster.loads(groups)
        capacity = cluster.capacity(groups)
        placed = assign_branches(state.unassigned, loads, capacity, state.holders)
        for branch, group in placed:
            state.assigned[branch.index] = group
        if placed:
            names = {branch.name: group.name for branch, group in placed}
            cluster.report({"event": "placed", "branches": names})
        cluster.send_prefix_(state)


@op("cluster.give_branches_")
def give_branches_(cluster: Director) -> None:
    """Send placed branches to their groups."""
    for state in cluster.states:
        sent = cluster.assigned_branches(state)
        for group in cluster.workers.decoders:
            branches = [
                branch
                for branch in state.request.branches
                if state.assigned.get(branch.index) is group and branch.index not in sent
            ]
            if branches:
                cluster.assign_(state, group, branches)


@op("cluster.gather_", commits=True)
def gather_(cluster: Director) -> None:
    """Take in committed tokens and losses; waits a little for the first message."""
    busy = outlines_written(cluster) or outlines_wanted(cluster) or branches_wanted(cluster)
    cluster.workers.receive_(cluster.handle_, 0 if busy else RECEIVE_INTERVAL)
    cluster.drop_lost_()


@op("cluster.merge", writes="answers")
def merge_all(branches: RequestTable, prompts: PromptBook) -> tuple[Answer, ...]:
    """The answers of all requests, in reading order."""
    return tuple(delivered(request, prompts) for request in branches.requests)


@guard("group_changed")
def group_changed(cluster: Director) -> bool:
    """A worker is lost, or a new one is ready."""
    return cluster.workers.outdated


@guard("outlines_wanted")
def outlines_wanted(cluster: Director) -> bool:
    """An outline is to be written, and a group has capacity for it."""
    free = cluster.free(cluster.workers.writers)
    return bool(free) and any(state.needs_writer for state in cluster.states)


@guard("outlines_written")
def outlines_written(cluster: Director) -> bool:
    """An outline is written and is to be parsed."""
    return any(state.outlined for state in cluster.states)


@guard("branches_wanted")
def branches_wanted(cluster: Director) -> bool:
    """A branch can be decoded that no group has, and a group has capacity for it."""
    free = cluster.free(cluster.workers.decoders)
    return bool(free) and any(state.unassigned for state in cluster.states)


@guard("all_ended")
def all_ended(cluster: Director) -> bool:
    """All requests have ended."""
    return all(state.ended for state in cluster.states)
