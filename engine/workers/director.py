"""Directs a run over workers: the ops and guards of graphs/machines/cluster.yaml.

The director decodes nothing: it has all requests and their tokens in host integers. What a lost
worker had continues elsewhere behind its last token; coins are keyed by position: the same text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from time import monotonic
from typing import Any

from ...ops.registry import guard, op
from ...states.phases.merge import Answer, delivered
from ...states.phases.parse import fan_out_
from ...states.request import (
    COMPLETE,
    Branch,
    Finish,
    MigratedBranch,
    MigratedRequest,
    failing,
    move,
)
from ...states.request_table import RequestTable, RunLimits
from ...states.text.prompts import PromptBook
from ..events import OUTLINE, Committed
from ..prepare.files import open_graph
from ..prepare.inputs import Prompt
from ..record.metrics import Marks, Meter, counted_figures, ratio
from ..record.recorder import Recorder, Write
from ..run.core import EngineCore
from ..run.session import Session
from .placement import assign_branches, expected_length
from .protocol import Assign, Cancel, CountWork, Output, Regroup, Regrouped, WorkCounts, summed
from .worker_groups import NO_GROUP, RECEIVE_INTERVAL, RunWorker, WorkerGroup, WorkerGroups

ByGroup = dict[WorkerGroup, int]


class RequestState:
    """A request in host integers. Raises PromptError. source: has the rows of the prefix, `rows` of
    each pool; holders: decoders that have them. assigned: the group of a branch, by its index."""

    def __init__(self, session: Session, table: RequestTable, prompt: Prompt) -> None:
        self.session = session
        self.table = table
        self.request = request = session.request(prompt)
        table.add(request)
        budget = prompt.max_new_tokens or session.max_new_tokens
        self.prompt = replace(prompt, seed=request.seed, max_new_tokens=budget)
        self.source: WorkerGroup | None = None
        self.rows: tuple[int, ...] = ()
        self.holders: set[WorkerGroup] = set()
        self.assigned: dict[int, WorkerGroup] = {}
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

    @property
    def needs_writer(self) -> bool:
        """Whether its outline is not written, and no group writes it."""
        root = self.request.root
        return root is not None and not root.ended and OUTLINE not in self.assigned

    @property
    def unassigned(self) -> list[Branch]:
        """Branches that could be decoded, and that no group has."""
        return [
            branch
            for branch in self.request.branches
            if not branch.ended and len(branch.prompt) and branch.index not in self.assigned
        ]

    @property
    def prefix(self) -> tuple[int, ...]:
        """Tokens that all of its branches share."""
        return (*self.request.body.ids, *self.request.common_prompt.ids)

    def part(self, branches: Sequence[Branch]) -> MigratedRequest:
        """Some branches, or without any the outline, as far as they are not written."""
        arrival = self.request.arrival
        if not branches:
            assert self.request.root is not None
            return MigratedRequest(outline=tuple(self.request.root.tokens), arrival=arrival)
        parts = [MigratedBranch(b.index, b.prompt.ids, tuple(b.tokens), b.budget) for b in branches]
        return MigratedRequest(self.prefix, tuple(parts), arrival=arrival)

    def branch_of(self, index: int) -> Branch | None:
        return next((one for one in self.request.all_branches() if one.index == index), None)

    def end_(self, index: int, finish: Finish, note: str) -> None:
        """End a branch; a request ends with an outline that cannot be written, or a branch that
        failed. An assignment that failed as a whole is an outline that failed."""
        request = self.request
        branch = self.branch_of(index)
        if branch is not None and not branch.ended:
            branch.end(finish, note)
        self.assigned.pop(index, None)
        unwritten = index == OUTLINE and finish not in COMPLETE
        if unwritten or finish is Finish.FAILED:
            request.finish = finish
            request.why = note
            self.assigned.clear()
            for other in request.branches:
                if not other.ended:
                    other.end(finish, note)
        if unwritten and branch is not None and not branch.tokens:  # it has not started
            request.root = None
        if unwritten and not request.branches:
            self.table.end_unstarted(request, finish, note)
        self._read_prompts_()
        if request.branches and all(branch.ended for branch in request.branches):
            self.table.close(request)

    def parse_(self) -> None:
        """Parse the outline into branches, with the prompts of those that have no dependencies."""
        request = self.request
        prompts = self.session.prompts
        skeleton = self.session.program.graph.skeleton
        root = request.root
        assert skeleton is not None and root is not None
        tokens = root.tokens if request.given_outline is None else request.given_ids
        with failing(root):
            request.outline = request.given_outline or prompts.read_outline(
                tokens, max_branches=skeleton.max_branches, tools=skeleton.tools
            )
            if prompts.share == "outline":
                request.prefix_parts.append(request.tail + tokens)
            direct = skeleton.direct_tokens
            fan_out_(self.table, self.session.reading, request, pending=(), direct_tokens=direct)
        if root.finish is Finish.FAILED:
            self.end_(OUTLINE, root.finish, root.note)
            return
        request.context = list(self.prefix)
        request.prefix_length = len(request.context)
        move(request, "run")
        self._read_prompts_()

    def _read_prompts_(self) -> None:
        """Prompts of the branches whose dependencies have ended."""
        branches = self.request.branches
        ended = {branch.point.id for branch in branches if branch.point and branch.ended}
        for branch in branches:
            if branch.point is None or branch.ended or len(branch.prompt):
                continue
            if ended.issuperset(branch.point.deps):
                with failing(branch):
                    branch.prompt = self.session.reading.branch(branch)
                if branch.finish is Finish.FAILED:
                    self.end_(branch.index, branch.finish, branch.note)
                    return


class Director:
    """Requests, workers, and which group decodes what. placed: branches that their groups have not
    received. tokens: committed, by worker. figures: of the prefixes that were sent."""

    def __init__(self, session: Session, workers: WorkerGroups) -> None:
        self.workers = workers
        workers.on_output = self._receive_
        target = session.models.target
        graph = session.program.graph
        self.table = RequestTable(RunLimits(graph, target.max_positions, target.vocab_size))
        self.states: list[RequestState] = []
        self.placed: list[tuple[RequestState, list[tuple[Branch, WorkerGroup]]]] = []
        self.tokens: Counter[str] = Counter()
        self.figures: dict[str, Any] = {"count": 0, "rows": 0, "bytes": 0, "failed": 0}
        self.figures |= {"seconds": 0.0, "collective_seconds": 0.0}
        self._numbers = count(1)  # of orders
        self._assignments: dict[str, tuple[RequestState, WorkerGroup]] = {}

    def work(self, groups: Sequence[WorkerGroup]) -> tuple[ByGroup, ByGroup]:
        """Tokens that each group is expected to write still, and branches that it can take."""
        loads = dict.fromkeys(groups, 0)
        capacity = {group: group.leader.greeting.max_branches for group in groups}
        for state in self.states:
            for branch in state.request.all_branches():
                group = state.assigned.get(branch.index)
                if group is not None and group in loads and not branch.ended:
                    loads[group] += expected_length(branch)
                    capacity[group] -= 1
        return loads, capacity

    def free(self, groups: Sequence[WorkerGroup]) -> list[WorkerGroup]:
        """Groups that can take a branch, those with the least work first."""
        loads, capacity = self.work(groups)
        return sorted((one for one in groups if capacity[one] > 0), key=lambda one: loads[one])

    def assign_(self, state: RequestState, group: WorkerGroup, branches: Sequence[Branch]) -> None:
        """Send branches of a request to a group, or without any its outline."""
        id = f"{next(self._numbers)}"
        self._assignments[id] = (state, group)
        order = Assign(id, state.prompt, state.part(branches), tp=group.tp, group=group.number)
        self._send(group, order)

    def _send(self, group: WorkerGroup, order: Assign | Cancel) -> None:
        """All workers get what some do together, in one order."""
        for worker in self.workers.group if group.tp > 1 else group.workers:
            worker.send(order)

    def drop_lost_(self) -> None:
        """Take back the branches of groups that were lost."""
        present = {*self.workers.decoders, *self.workers.writers}
        present |= {worker.single for worker in self.workers.workers}
        old = self._assignments.items()
        self._assignments = {id: (state, group) for id, (state, group) in old if group in present}
        names: list[str] = []
        for state in self.states:
            for branch in state.request.all_branches():
                if branch.index in state.assigned and state.assigned[branch.index] not in present:
                    del state.assigned[branch.index]
                    names.append(branch.name)
            state.holders &= present
            if state.source not in present:
                state.source = next(iter(state.holders), None)
        if names:
            self.workers.report({"event": "again", "branches": names})

    def _receive_(self, worker: RunWorker, output: Output) -> None:
        """Take in what a worker decoded; void if that was taken back, or the request ended."""
        id = output.request if isinstance(output, Committed) else output.id
        state, group = self._assignments.get(id, (None, None))
        if state is None or group is None or group.leader is not worker or state.request.finished:
            return
        if isinstance(output, Committed):
            if (branch := state.branch_of(output.branch)) is not None:
                branch.tokens += output.tokens
            self.tokens[worker.name] += len(output.tokens)
            self.workers.report({"event": "tokens", "request": state.request.key})
            return
        state.end_(output.branch, Finish(output.finish), output.note)
        if state.request.finish is Finish.FAILED:  # other groups decode its other branches
            for id, (other, group) in self._assignments.items():
                if other is state:
                    self._send(group, Cancel(id, group.tp))
        if output.rows:
            state.source = group
            state.rows = output.rows
            state.holders |= {group} & {*self.workers.decoders}

    def count_(self) -> dict[str, WorkCounts]:
        """Counters of all workers since the last time, by name; raises ClusterError."""
        if self.workers.epoch == NO_GROUP:  # stopped before its first state: there are no engines
            self.workers.form_()
        order = CountWork(next(self._numbers))
        replies = self.workers.collect_(WorkCounts, dict.fromkeys(self.workers.ready, order))
        return {worker.name: counts for worker, counts in replies.items()}

    def send_prefix_(self, state: RequestState) -> None:
        """Send a request's prefix to the groups that lack it; where that fails, they compute it."""
        while set(state.assigned.values()) - state.holders:
            group = self.workers.group
            source = state.source
            possible = state.rows and self.workers.complete and len(group) > 1
            if source is None or not possible or any(one not in group for one in source.workers):
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
            replies = self.workers.collect_(Regrouped, dict.fromkeys(group, order))
            seconds = monotonic() - start
            stored = {worker for worker, reply in replies.items() if reply.stored}
            decoders = self.workers.decoders
            state.holders |= {one for one in decoders if stored.issuperset(one.workers)}
            failed = {worker: reply.error for worker, reply in replies.items() if reply.error}
            self.workers.members -= failed.keys()
            figures = {"bytes": sum(one.bytes for one in replies.values()), "seconds": seconds}
            collectives = (one.collective for one in replies.values())
            figures["collective_seconds"] = max(collectives, default=0.0)
            record = {"event": "regroup", "request": state.request.key, "rows": list(state.rows)}
            why = {"why": [*failed.values()]} if failed else {}
            self.workers.report(record | figures | why)
            figures |= {"count": 1, "rows": sum(state.rows), "failed": bool(failed)}
            self.figures = summed([self.figures, figures])
            present = [reply.rows for reply in replies.values() if reply.rows is not None]
            if not present:
                return
            state.rows = present[0]  # fewer: some have been evicted


@op("cluster.form_group_", commits=True)
def form_group_(cluster: Director) -> None:
    """Replace lost workers, and join those that are ready in one process group."""
    cluster.drop_lost_()
    cluster.workers.form_()
    cluster.drop_lost_()


@op("cluster.write_outlines_")
def write_outlines_(cluster: Director) -> None:
    """Assign outlines to the groups with the least work, first come first served."""
    for state in cluster.states:
        if state.needs_writer and (free := cluster.free(cluster.workers.writers)):
            state.assigned[OUTLINE] = free[0]
            cluster.assign_(state, free[0], ())


@op("cluster.read_outlines_", commits=True)
def read_outlines_(cluster: Director) -> None:
    """Parse finished outlines into branches; an unreadable one falls back to one plain answer."""
    for state in cluster.states:
        if state.request.outline_ended:
            state.parse_()
            cluster.workers.report({"event": "outline", "request": state.request.key})


@op("cluster.regroup_")
def regroup_(cluster: Director) -> None:
    """Place branches on groups, and send prefixes to those that lack them, one collective each."""
    cluster.placed = []
    for state in cluster.states:
        loads, capacity = cluster.work(cluster.workers.decoders)
        placed = assign_branches(state.unassigned, loads, capacity, state.holders)
        for branch, group in placed:
            state.assigned[branch.index] = group
        if placed:
            names = {branch.name: group.name for branch, group in placed}
            cluster.workers.report({"event": "placed", "branches": names})
            cluster.placed.append((state, placed))
        cluster.send_prefix_(state)


@op("cluster.give_branches_")
def give_branches_(cluster: Director) -> None:
    """Send placed branches to their groups."""
    for state, placed in cluster.placed:
        for group in cluster.workers.decoders:
            branches = [branch for branch, one in placed if one is group and not branch.ended]
            if branches:
                cluster.assign_(state, group, branches)


@op("cluster.gather_", commits=True)
def gather_(cluster: Director) -> None:
    """Take in committed tokens and losses; waits a little for the first message."""
    busy = outlines_written(cluster) or outlines_wanted(cluster) or branches_wanted(cluster)
    cluster.workers.receive_(0 if busy else RECEIVE_INTERVAL)
    cluster.drop_lost_()


@op("cluster.merge", writes="answers")
def merge_all(branches: RequestTable, prompts: PromptBook) -> tuple[Answer, ...]:
    """The answers of all requests, in reading order."""
    return tuple(delivered(request, prompts) for request in branches.requests)


@guard("group_changed")
def group_changed(cluster: Director) -> bool:
    """A worker is lost, or a new one is ready."""
    workers = cluster.workers
    return len(workers.workers) < workers.block.workers or workers.group != workers.eligible


@guard("outlines_wanted")
def outlines_wanted(cluster: Director) -> bool:
    """An outline is to be written, and a group has capacity for it."""
    wanted = any(state.needs_writer for state in cluster.states)
    return wanted and bool(cluster.free(cluster.workers.writers))


@guard("outlines_written")
def outlines_written(cluster: Director) -> bool:
    """An outline is written and is to be parsed."""
    return any(state.request.outline_ended for state in cluster.states)


@guard("branches_wanted")
def branches_wanted(cluster: Director) -> bool:
    """A branch can be decoded that no group has, and a group has capacity for it."""
    wanted = any(state.unassigned for state in cluster.states)
    return wanted and bool(cluster.free(cluster.workers.decoders))


@guard("all_ended")
def all_ended(cluster: Director) -> bool:
    """All requests have ended."""
    return all(state.request.finished for state in cluster.states)


class ClusterRecorder(Recorder):
    """Records the events of the director's machine, and what happens to workers."""

    def report(self, record: Mapping[str, Any]) -> None:
        """Record something that is not an event of the machine."""
        if record["event"] not in ("tokens", "outline"):
            self.record(self.now, {"kind": "cluster", **record})
            return
        marks = self.meter.marks.setdefault(str(record["request"]), Marks())
        if record["event"] == "outline":
            marks.outline = self.now
        else:
            marks.first_token = self.now if marks.first_token is None else marks.first_token
            marks.last_token = self.now

    def figures(self, board: Mapping[str, Any]) -> dict[str, Any]:
        """metrics.json: what all workers did together, and what the director saw."""
        director: Director = board["cluster"]
        counts = director.count_()
        present = director.workers.workers
        weights = {one.name: one.greeting.weights for one in present}
        meter = Meter.of(summed([one.counts for one in counts.values()]) or {})
        meter.add(self.meter)  # the director's own, without forwards
        meter.marks = self.meter.marks
        meter.most_active = max((one.counts["most_active"] for one in counts.values()), default=0)
        meter.tokens = sum(director.tokens.values())
        memory: dict[str, Any] = summed([held for one in counts.values() for held in one.memory])
        memory["host_reads"]["per_round"] = ratio(memory["host_reads"]["total"], meter.forwards)
        if (cache := memory["prefix_cache"]) is not None:
            cache["hit_rate"] = ratio(cache["reused"], cache["asked"])
        workers = [
            {
                "name": name,
                "weights": weights.get(name, 0),
                "tokens": director.tokens[name],
                "target_forwards": worker.counts.get("forwards", 0),
                "open_files": worker.open_files,
                "peak_memory": worker.peak_memory,
            }
            for name, worker in counts.items()
        ]
        cluster = {"workers": workers, "lost": director.workers.losses, "regroup": director.figures}
        return {**counted_figures(meter), **memory, "cluster": cluster}


def directed(
    workers: WorkerGroups, session: Session, prompts: Sequence[Prompt], write: Write | None = None
) -> tuple[EngineCore, Recorder]:
    """A run on loaded workers before its first transition, and its recorder; raises PromptError."""
    recorder = ClusterRecorder(session.prompts.decode, write)
    workers.report = recorder.report
    director = Director(session, workers)
    director.states = [RequestState(session, director.table, prompt) for prompt in prompts]
    board = {"cluster": director, "branches": director.table, "prompts": session.prompts}
    run = EngineCore(open_graph("machines/cluster"), board, recorder)
    recorder.attach(run)
    return run, recorder
