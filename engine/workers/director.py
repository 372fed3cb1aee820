"""Directs a run over workers: the ops and guards of graphs/machines/cluster.yaml.

The director decodes nothing. It has all requests in host integers, and workers send their tokens as
they commit them. So what a lost worker had continues elsewhere behind its last committed token, and
coins are keyed by position: the text is the same.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from time import monotonic
from typing import Any

from ...ops.registry import guard, op
from ...states.phases.merge import Answer, delivered
from ...states.phases.parse import fan_out_
from ...states.request import (
    ENDING_OF,
    Branch,
    Finish,
    MigratedBranch,
    MigratedRequest,
    Request,
    move,
)
from ...states.request_table import RequestTable, RunLimits
from ...states.text.prompts import PromptBook
from ..events import OUTLINE, Committed
from ..prepare.inputs import Prompt
from ..run.session import Session
from .placement import assign_branches, expected_length
from .protocol import Assign, CountWork, Grouped, Regroup, Regrouped, Reply, WorkCounts
from .worker_groups import NO_EPOCH, RECEIVE_INTERVAL, Report, RunWorker, WorkerGroup, WorkerGroups

# -- a request ------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class RequestState:
    """A request with its branches, in host integers, so that any worker can continue it.

    writer: writes the outline. source: has the rows of the prefix, `rows` of each pool, for its
    first `ids`; holders: groups that decode branches and have them. assigned: the group that
    decodes a branch, by its index; sent: those that it has received.
    """

    session: Session
    table: RequestTable
    prompt: Prompt
    request: Request
    writer: WorkerGroup | None = None
    source: WorkerGroup | None = None
    rows: tuple[int, ...] = ()
    holders: set[WorkerGroup] = field(default_factory=set)
    assigned: dict[int, WorkerGroup] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)

    @property
    def needs_writer(self) -> bool:
        """Whether its outline is not written, and no group writes it."""
        root = self.request.root
        return root is not None and not root.ended and self.writer is None

    @property
    def outlined(self) -> bool:
        """Whether its outline has ended and was not parsed."""
        root = self.request.root
        return root is not None and root.ended and not self.request.branches

    @property
    def unassigned(self) -> list[Branch]:
        """Branches that could be decoded, and that no group has."""
        return [
            branch
            for branch in self.request.branches
            if not branch.ended and len(branch.prompt) and branch.index not in self.assigned
        ]

    @property
    def ended(self) -> bool:
        branches = self.request.branches
        return bool(branches) and all(branch.ended for branch in branches)

    def running(self) -> Iterator[tuple[WorkerGroup, Branch]]:
        """Branches that a group has, the root branch among them, with the group."""
        root = self.request.root
        if self.writer is not None and root is not None and not root.ended:
            yield self.writer, root
        for branch in self.request.branches:
            if not branch.ended and branch.index in self.assigned:
                yield self.assigned[branch.index], branch

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that all of its branches share."""
        return (*self.request.body.ids, *self.request.common_prompt.ids)

    def part(self, branches: Sequence[Branch]) -> MigratedRequest:
        """Some branches, or without any the outline, as far as they are not written."""
        arrival = self.request.arrival
        if not branches:
            root = self.request.root
            assert root is not None
            return MigratedRequest(outline=tuple(root.tokens), arrival=arrival)
        migrated = tuple(
            MigratedBranch(
                index=branch.index,
                prompt=branch.prompt.ids,
                tokens=tuple(branch.tokens),
                budget=branch.budget,
            )
            for branch in branches
        )
        return MigratedRequest(self.prefix, migrated, arrival=arrival)

    def branch_of(self, index: int) -> Branch | None:
        """A branch by its index; None if it has not started."""
        branches = self.request.all_branches()
        return next((branch for branch in branches if branch.index == index), None)

    def end_(self, index: int, finish: Finish, note: str) -> None:
        """End a branch; a request ends with an outline that cannot be written."""
        branch = self.branch_of(index)
        request = self.request
        if branch is None:
            return
        if not branch.ended:
            branch.end(finish, note)
        self.assigned.pop(index, None)
        unwritten = index == OUTLINE and finish not in (Finish.STOP, Finish.LENGTH)
        if unwritten or finish is Finish.FAILED:
            request.finish = finish
            request.why = note
        if unwritten:
            if not branch.tokens:  # it has not started
                request.root = None
            self.table.end_unstarted(request, finish, note)
        elif finish is Finish.FAILED:
            for other in request.branches:
                if not other.ended:
                    other.end(finish, note)
        self._read_prompts_()
        if self.ended:
            move(request, ENDING_OF[request.finish])

    def parse_(self) -> None:
        """Parse the outline into branches, with the prompts of those that have no dependencies."""
        request = self.request
        prompts = self.session.prompts
        skeleton = self.session.program.graph.skeleton
        root = request.root
        assert skeleton is not None and root is not None
        tokens = root.tokens if request.given_outline is None else request.given_ids
        request.outline = request.given_outline or prompts.read_outline(
            tokens, max_branches=skeleton.max_branches, tools=skeleton.tools
        )
        if prompts.share == "outline":
            request.prefix_parts.append(request.tail + tokens)
        fan_out_(
            self.table,
            self.session.reading,
            request,
            pending=(),
            direct_tokens=skeleton.direct_tokens,
        )
        request.context = list(self.prefix)
        request.prefix_length = len(request.context)
        move(request, "run")
        self._read_prompts_()

    def _read_prompts_(self) -> None:
        """Prompts of the branches whose dependencies have ended."""
        branches = self.request.branches
        ended = {branch.point.id for branch in branches if branch.point and branch.ended}
        for branch in branches:
            point = branch.point
            if point is None or branch.ended or len(branch.prompt):
                continue
            if ended.issuperset(point.deps):
                branch.prompt = self.session.reading.branch(branch)

    def drop_lost_(self, present: Container[WorkerGroup]) -> list[str]:
        """Take back what groups had that are not present any more; names of its branches."""
        request = self.request
        lost = {index for index, group in self.assigned.items() if group not in present}
        names = [branch.name for branch in request.branches if branch.index in lost]
        if self.writer is not None and self.writer not in present and request.root is not None:
            self.writer = None
            names += [] if request.root.ended else [request.root.name]
        self.assigned = {i: group for i, group in self.assigned.items() if i not in lost}
        self.sent -= lost
        self.holders = {group for group in self.holders if group in present}
        if self.source is not None and self.source not in present:
            self.source = next(iter(self.holders), None)
        return names


def new_request_state(session: Session, table: RequestTable, prompt: Prompt) -> RequestState:
    """A submitted request with its seed and budget, and the root branch, or without an outline the
    branches, which can be assigned; raises PromptError."""
    request = session.request(prompt)
    table.add(request)
    budget = prompt.max_new_tokens or session.max_new_tokens
    prompt = replace(prompt, seed=request.seed, max_new_tokens=budget)
    if request.outline_budget == 0:
        for index in range(request.samples):
            branch = table.new_branch(request, index, request.budget)
            branch.prompt = request.tail
            request.branches.append(branch)
        move(request, "run")
    else:
        request.root = table.new_branch(request, OUTLINE, request.outline_budget)
        move(request, "outline")
        if request.given_outline is not None:
            request.root.end(Finish.STOP)
    return RequestState(session, table, prompt, request)


# -- all requests ---------------------------------------------------------------------------------


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
    """Requests, workers, and which group decodes what. report: takes events for the trace. tokens:
    committed, by worker. figures: of regroups."""

    def __init__(self, session: Session, workers: WorkerGroups, report: Report) -> None:
        self.session = session
        self.workers = workers
        self.report = report
        graph = session.program.graph
        target = session.models.target
        limits = RunLimits(
            layout=graph.layout,
            drafter=graph.drafter,
            share_outline=graph.skeleton is None or graph.skeleton.share == "outline",
            max_positions=target.max_positions,
            vocabulary=target.vocab_size,
        )
        self.table = RequestTable(limits)
        self.states: list[RequestState] = []
        self.tokens: Counter[str] = Counter()
        self.figures = RegroupFigures()
        self._numbers = count(1)  # of orders
        self._assignments: dict[str, tuple[RequestState, WorkerGroup]] = {}
        self._replies: dict[int, dict[RunWorker, Any]] = {}  # to an order, by its number

    def submit(self, prompts: Iterable[Prompt]) -> None:
        """Add requests; raises PromptError."""
        for prompt in prompts:
            self.states.append(new_request_state(self.session, self.table, prompt))

    def close(self) -> None:
        """End the workers."""
        self.workers.close()

    # -- loads ------------------------------------------------------------------------------------

    def loads(self, groups: Sequence[WorkerGroup]) -> dict[WorkerGroup, int]:
        """Tokens that each group is expected to write still."""
        loads = dict.fromkeys(groups, 0)
        for group, branch in chain.from_iterable(state.running() for state in self.states):
            if group in loads:
                loads[group] += expected_length(branch)
        return loads

    def capacity(self, groups: Sequence[WorkerGroup]) -> dict[WorkerGroup, int]:
        """Further branches that each group can take."""
        counts = Counter(group for state in self.states for group, _ in state.running())
        return {group: group.max_branches - counts[group] for group in groups}

    def free(self, groups: Sequence[WorkerGroup]) -> list[WorkerGroup]:
        """Groups that can take a branch, those with the least work first."""
        loads = self.loads(groups)
        capacity = self.capacity(groups)
        return sorted((one for one in groups if capacity[one] > 0), key=lambda one: loads[one])

    # -- assignments ------------------------------------------------------------------------------

    def assign_(self, state: RequestState, group: WorkerGroup, branches: Sequence[Branch]) -> None:
        """Send branches of a request to a group, or without any its outline."""
        id = f"{next(self._numbers)}"
        self._assignments[id] = (state, group)
        part = state.part(branches)
        order = Assign(id, state.prompt, part, tp=group.tp, group=group.number)
        if group.tp > 1:  # all workers get what some do together, in one order
            self.workers.send_all(order)
        else:
            group.leader.post(order)

    def drop_lost_(self) -> None:
        """Take back what lost groups had."""
        present = {*self.workers.decoders, *self.workers.writers}
        present |= {worker.single for worker in self.workers.workers}
        for id in [id for id, (_, group) in self._assignments.items() if group not in present]:
            del self._assignments[id]
        names = [name for state in self.states for name in state.drop_lost_(present)]
        if names:
            self.report({"event": "again", "branches": names})

    # -- replies ----------------------------------------------------------------------------------

    def handle_(self, worker: RunWorker, reply: Reply) -> None:
        """Take in one reply of a worker; those to work that was taken back are dropped."""
        if isinstance(reply, Regrouped | WorkCounts):
            if reply.number in self._replies:
                self._replies[reply.number][worker] = reply
            return
        if isinstance(reply, Grouped):
            return
        id = reply.request if isinstance(reply, Committed) else reply.id
        state, group = self._assignments.get(id, (None, None))
        if state is None or group is None or group.leader is not worker:
            return
        if isinstance(reply, Committed):
            if (branch := state.branch_of(reply.branch)) is not None:
                branch.tokens += reply.tokens
            self.tokens[worker.name] += len(reply.tokens)
            self.report({"event": "tokens", "request": state.request.key})
            return
        state.end_(reply.branch, Finish(reply.finish), reply.note)
        if reply.rows:
            state.source = group
            state.rows = reply.rows
            state.holders |= {group} & {*self.workers.decoders}

    def _collect_(
        self, workers: Sequence[RunWorker], order: Regroup | CountWork
    ) -> dict[RunWorker, Any]:
        """The replies of these workers to an order, without those that are lost meanwhile."""
        replies = self._replies[order.number] = {}
        for worker in workers:
            worker.post(order)
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
        for group in cluster.workers.decoders:
            unsent = state.assigned.keys() - state.sent
            branches = [
                branch
                for branch in state.request.branches
                if branch.index in unsent and state.assigned[branch.index] is group
            ]
            if branches:
                state.sent |= {branch.index for branch in branches}
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
