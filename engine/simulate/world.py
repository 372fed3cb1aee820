"""A run without a model: requests of known lengths, the real scheduler, a clock that is told.

Everything that decides is what a run has: request table, admission, scheduler, radix tree,
preemption. What a forward would bring is written down instead, and the clock moves by what such a
step costs.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ...states.graph.graph import Graph
from ...states.layout import Span
from ...states.manager import BranchStateManager
from ...states.request import Branch, Finish, Request, move
from ...states.request_table import RunLimits
from ...states.scheduler import Does, Inbox, StepPlan
from ...states.text.outline import Point
from ...states.text.tokens import PromptTokens
from ..errors import UsageError
from .arrivals import Arrival
from .costs import StepCost
from .figures import Served
from .pool import CountedPool

ENDLESS = 1 << 30  # positions, and ids: no model limits them
PART = 12  # tokens of a part's own prompt
HINT = (0.5, 1.5)  # how far an outline's expected length may be off


@dataclass(slots=True)
class Live:
    """A request that has come: what it is like, whose it is, and whether it has written anything.

    brought: rows of its prompt that come from elsewhere, so that nobody computes them.
    """

    arrival: Arrival
    tag: Any = None
    brought: int = 0
    begun: bool = False


class Simulation:
    """One graph's scheduler on arrivals that come in the order of time.

    Attributes:
        now: seconds on the simulation's own clock. busy: seconds of processor time in the
            scheduler. served: what came of it.

    Raises:
        UsageError: the graph's layout, or what it does, cannot be simulated.
    """

    def __init__(self, graph: Graph, cost: StepCost, policy: str, seed: int | str = 0) -> None:
        if graph.layout.kind != "bim" or graph.beam is not None:
            raise UsageError(f"{graph.name}: graphs with layout.kind bim and without beams only")
        scheduler = graph.scheduler.model_copy(update={"policy": policy})
        skeleton = graph.skeleton
        shares = skeleton is None or skeleton.share == "outline"
        sizes = (shares, ENDLESS, ENDLESS)
        limits = RunLimits(graph.layout, graph.drafter, *sizes, None, scheduler)
        self.graph = graph
        self.cost = cost
        self.shares = shares
        self.pool = CountedPool(graph.layout.kv_slots)
        self.manager = BranchStateManager(self.pool, None, limits, lambda branch: branch.prompt)
        self.served = Served()
        self.now = 0.0
        self.busy = 0.0
        self._inbox = Inbox(serves=True)
        self._chance = random.Random(f"simulation {seed}")
        self._drawn = cost.drawn(self._chance)
        self._live: dict[int, Live] = {}
        self._begun: list[Live] = []  # whose first token was written in this step
        self._ids = 0  # of tokens: every prompt and answer has its own

    def run(self, arrivals: Iterable[Arrival]) -> Served:
        """Serve them all."""
        source = iter(arrivals)
        after = next(source, None)
        while after is not None or self._live:  # until the last answer has been handed over
            while after is not None and after.at <= self.now:
                self.submit(after)
                after = next(source, None)
            if not self.step():
                if after is None:
                    break
                self.now = after.at
        return self.told()

    def step(self) -> bool:
        """One step, by which the clock moves; whether there was anything to do."""
        began = perf_counter()
        plan = self.manager.plan_(self._inbox)
        self.busy += perf_counter() - began
        if plan.does is Does.REST:
            return False
        self._step_(plan)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nobody is there."""
        return not self._live

    def told(self) -> Served:
        """What was served until now."""
        self.served.seconds = self.now
        self.served.preemptions = self.manager.preemption.count
        if self.manager.prefixes is not None:
            figures = self.manager.prefixes.figures
            self.served.hit_rate = figures.reused / max(figures.asked, 1)
        return self.served

    # -- who comes --------------------------------------------------------------------------------

    def submit(
        self,
        one: Arrival,
        ids: tuple[int, ...] = (),
        brought: int = 0,
        tag: Any = None,
        place: int = -1,
    ) -> None:
        """A request comes.

        Args:
            ids: of its prompt; by default its own, but for what it shares.
            brought, tag: see `Live`. place: in the order of arrivals; by default the next.
        """
        limits = self.graph.limits
        skeleton = self.graph.skeleton
        ids = ids or (-1 - one.stem,) * one.shared + self._new(one.prompt - one.shared)
        outlines = skeleton is not None and one.outline > 0
        prompt = (PromptTokens(ids[:-1]), PromptTokens(ids[-1:])) if outlines else None
        request = Request(
            str(self.served.requests),
            0,
            "",
            *(prompt or (PromptTokens(), PromptTokens(ids))),
            frozenset(),
            one.budget or max(limits.max_new_tokens, 1),
            skeleton.max_tokens if outlines and skeleton is not None else 0,
        )
        self.served.requests += 1
        request.arrival = place
        self.manager.submit(request)
        self._live[request.prefix_owner] = Live(one, tag, brought)
        self.served.waited = max(self.served.waited, len(self.manager.table.waiting))

    def _new(self, count: int) -> tuple[int, ...]:
        """Ids that nobody else has, so that only what is shared is found again."""
        self._ids = (self._ids + 1) % ENDLESS
        return (self._ids,) * count

    # -- a step -----------------------------------------------------------------------------------

    def _step_(self, plan: StepPlan) -> None:
        self.served.steps += 1
        rows = ran = 0
        if plan.does is Does.PARSE:
            self._parse_()
        elif plan.does is not Does.ANSWER:
            ran = plan.running if plan.does is Does.ROUND else 0
            rows = self._forward_(plan, self.manager.active[:] if ran else [])
        self.now += self.cost.seconds(rows, ran, self.pool.needed_length)
        for live in self._begun:
            self.begin(live)
        self._begun.clear()
        if plan.does is Does.ANSWER:
            self._answer_()

    def _forward_(self, plan: StepPlan, ran: Sequence[Branch]) -> int:
        """Write down what a forward would bring; its rows."""
        manager = self.manager
        starts = (manager.starting(plan), manager.beginning(plan), manager.reading(plan))
        newcomers, spans = manager.placer.start_(*starts)
        rows = manager.room.round_rows(len(ran)) + sum(map(self._computed, spans))
        for branch in ran:
            self._write(branch, next(self._drawn))
        by_owner = {branch.owner: branch for branch in newcomers}
        for span in spans:
            self._read(span, by_owner.get(span.owner))
        self.served.forwards += 1
        self.served.rows += rows
        manager.lifecycle.retire_and_prepare_([*ran, *newcomers])
        return rows

    def _computed(self, span: Span) -> int:
        """Rows of a prompt that do not come from elsewhere."""
        brought = self._live[span.request].brought
        return len(span.tokens) - min(max(brought - span.position, 0), len(span.tokens))

    def _read(self, span: Span, branch: Branch | None) -> None:
        """Rows of a prompt; a branch that begins draws its first token."""
        self.pool.grow_(span.owner, span.position, len(span.tokens))
        if branch is None:
            return
        branch.length += len(span.tokens)
        if not branch.tokens:
            self._append(branch, 1)

    def _write(self, branch: Branch, count: int) -> None:
        """A round of a branch: so many tokens, and their rows."""
        taken = self._append(branch, count)
        self.pool.grow_(branch.owner, branch.length, taken)
        branch.kept += taken
        branch.length += taken

    def _append(self, branch: Branch, count: int) -> int:
        goal = min(self._goal(branch), branch.budget)
        taken = min(count, goal - len(branch.tokens))
        branch.tokens += self._new(taken)
        live = self._live[branch.request.prefix_owner]
        if not live.begun:
            live.begun = True
            self._begun.append(live)
        self.served.tokens += taken
        if len(branch.tokens) >= goal:
            branch.end(Finish.STOP if goal < branch.budget else Finish.LENGTH)
        return taken

    def _goal(self, branch: Branch) -> int:
        arrival = self._live[branch.request.prefix_owner].arrival
        return max(arrival.outline if branch.is_root else arrival.texts[branch.index], 1)

    # -- outlines and answers ---------------------------------------------------------------------

    def _parse_(self) -> None:
        """Finished outlines become branches, as long as the arrival says."""
        table = self.manager.table
        lifecycle = self.manager.lifecycle
        for request in [one for one in table.open.values() if one.outline_ended]:
            root = request.root
            arrival = self._live[request.prefix_owner].arrival
            assert root is not None
            if self.shares:
                lifecycle.promote_root_(request)
            else:
                lifecycle.leave_root_(request)
            pending = tuple(root.pending) if self.shares else self._new(1)
            request.hoist = request.opening + PromptTokens(pending)
            for index, length in enumerate(arrival.texts):
                branch = table.new_branch(request, index, request.budget)
                hint = max(round(length * self._chance.uniform(*HINT)), 1)
                branch.point = Point(index + 1, hint, None, (), "")
                branch.prompt = PromptTokens(self._new(PART))
                request.branches.append(branch)
            move("request", request, "run")
        lifecycle.retire_and_prepare_()

    def _answer_(self) -> None:
        for request in self.manager.table.forget_finished():
            live = self._live.pop(request.prefix_owner)
            self.end(live, any(one.finish is Finish.REFUSED for one in request.all_branches()))

    # -- what is told of requests -----------------------------------------------------------------

    def begin(self, live: Live) -> None:
        """A request has its first token."""
        self.served.first.add(self.now - live.arrival.at)

    def end(self, live: Live, refused: bool) -> None:
        """A request has its answer, or was refused."""
        self.served.refused += refused
        if not refused:
            self.served.whole.add(self.now - live.arrival.at)
