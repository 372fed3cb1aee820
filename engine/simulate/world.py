"""A run without a model: requests of known lengths, the real scheduler, a simulated clock.

Request table, admission, scheduler, radix tree and preemption are those of a run. The results of a
forward are written down instead of computed, and the clock moves by the cost of the step.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...ops.kv.pool import KVCache
from ...ops.kv.slots import CopyLedger, PoolFullError, Region
from ...states.graph.graph import Graph
from ...states.manager import BranchStateManager
from ...states.phases.schedule import plan_
from ...states.request import Branch, Finish, Request, move
from ...states.request_table import RunLimits
from ...states.rows import Span
from ...states.scheduler import Inbox, StepPlan
from ...states.text.outline import Point
from ...states.text.tokens import PromptTokens
from ..errors import UsageError
from .arrivals import Arrival
from .costs import StepCost
from .figures import ServedFigures


class CountedPool(KVCache):
    """A pool that counts: the positions of every owner, in constant time, without slots.

    Attributes:
        spans: by owner, the first position and one past the last.
    """

    def __init__(self, capacity: int) -> None:  # the tables of slots are not made
        self.capacity = capacity
        self.rows = 1
        self.slots = capacity
        self.data = torch.zeros(0)
        self.owner = np.zeros(0, np.int32)
        self.committed = np.zeros(0, np.bool_)
        self.regions: dict[int, Region] = {}
        self.ledger = CopyLedger()
        self.current_length = self.idle_length = self.peak_length = 0
        self._idle: set[int] = set()
        self.spans: dict[int, tuple[int, int]] = {}

    def grow_(self, owner: int, position: int, count: int) -> None:
        """Append rows to an owner.

        Raises:
            PoolFullError: too few slots.
        """
        first, last = self.spans.get(owner, (position, position))
        assert last == position, f"owner {owner} goes on at {last}, not at {position}"
        self.spans[owner] = first, last + count
        self.current_length += count
        if self.current_length > self.slots:
            raise PoolFullError(f"{self.current_length} slots of {self.slots}")
        self._note_peak()

    def open_(self, home: int, size: int, least: int | None = None) -> None:
        self.regions[home] = Region()

    def release_(self, slots: npt.ArrayLike) -> None:
        """Nothing: no slot has a number."""

    def retire_(self, owners: Iterable[int], row: int | None = None) -> None:
        for owner in owners:
            first, last = self.spans.pop(owner, (0, 0))
            self.current_length -= last - first
            self.regions.pop(owner, None)

    def wipe_(self, owners: Iterable[int]) -> None:
        """Nothing: there are no rows."""

    def relabel_(self, old: int, new: int, home: int) -> None:
        if old in self.spans:
            self._join_(new, self.spans.pop(old))

    def split_(self, owner: int, first: int, position: int) -> None:
        self.regions.setdefault(first, Region())
        if owner == first or owner not in self.spans:
            return
        start, last = self.spans.pop(owner)
        cut = min(max(position, start), last)
        if cut > start:
            self._join_(first, (start, cut))
        if last > cut:
            self.spans[owner] = cut, last

    def _join_(self, owner: int, span: tuple[int, int]) -> None:
        mine = self.spans.get(owner, span)
        assert mine == span or mine[1] == span[0] or span[1] == mine[0], "rows with a gap"
        self.spans[owner] = min(mine[0], span[0]), max(mine[1], span[1])

    def truncate_(self, owner: int, length: int) -> None:
        first, last = self.spans.get(owner, (0, 0))
        if last > length:
            self.current_length -= last - max(length, first)
            if length > first:
                self.spans[owner] = first, length
            else:
                self.spans.pop(owner)

    def rest_(self, owner: int, *, idle: bool) -> None:
        first, last = self.spans.get(owner, (0, 0))
        self.idle_length += (last - first) if idle else first - last
        (self._idle.add if idle else self._idle.discard)(owner)
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_length = max(self.peak_length, self.needed_length)

    def span_of(self, owner: int) -> tuple[int, int]:
        return self.spans.get(owner, (0, 0))

    def check_integrity(self) -> None:
        held = sum(last - first for first, last in self.spans.values())
        assert held == self.current_length <= self.slots, "slots in use are counted wrongly"


MAX_IDS = 1 << 30  # positions and token ids, without a model's limits
PART_PROMPT = 12  # tokens of a part's own prompt
HINT_FACTORS = (0.5, 1.5)  # of an outline's expected lengths


@dataclass(slots=True)
class Live:
    """An open request.

    tag: of the caller. received: rows of its prompt from another worker, which are not computed.
    started: its first token is written.
    """

    arrival: Arrival
    tag: Any = None
    received: int = 0
    started: bool = False


class Simulation:
    """One graph's scheduler on arrivals that come in the order of time.

    Attributes:
        now: seconds on the simulated clock. busy: processor seconds in the scheduler. served: the
            figures.

    Raises:
        UsageError: the graph cannot be simulated.
    """

    def __init__(self, graph: Graph, cost: StepCost, policy: str, seed: int | str = 0) -> None:
        if graph.layout.kind != "bim" or graph.beam is not None:
            raise UsageError(f"{graph.name}: graphs with layout.kind bim and without beams only")
        scheduler = graph.scheduler.model_copy(update={"policy": policy})
        skeleton = graph.skeleton
        shares = skeleton is None or skeleton.share == "outline"
        sizes = (shares, MAX_IDS, MAX_IDS)
        limits = RunLimits(graph.layout, graph.drafter, *sizes, None, scheduler)
        self.graph = graph
        self.cost = cost
        self.shares = shares
        self.pool = CountedPool(graph.layout.kv_slots)
        self.manager = BranchStateManager(self.pool, None, limits, lambda branch: branch.prompt)
        self.served = ServedFigures()
        self.now = 0.0
        self.busy = 0.0
        self._inbox = Inbox(serves=True)
        self._rng = random.Random(f"simulation {seed}")
        self._round_tokens = cost.round_tokens(self._rng)
        self._live: dict[int, Live] = {}
        self._started: list[Live] = []  # requests whose first token is of this step
        self._ids = 0  # the last token id: every prompt and answer has its own

    def run(self, arrivals: Iterable[Arrival]) -> ServedFigures:
        """Serve all arrivals."""
        source = iter(arrivals)
        after = next(source, None)
        while after is not None or self._live:  # until the last answer is delivered
            while after is not None and after.at <= self.now:
                self.submit(after)
                after = next(source, None)
            if not self.step():
                if after is None:
                    break
                self.now = after.at
        return self.figures()

    def step(self) -> bool:
        """One step of the clock; False if there is nothing to do."""
        start = perf_counter()
        plan = plan_(self.manager, self._inbox)
        self.busy += perf_counter() - start
        if plan.is_idle:
            return False
        self._step_(plan)
        return True

    @property
    def is_idle(self) -> bool:
        """True without open requests."""
        return not self._live

    def figures(self) -> ServedFigures:
        """The figures so far."""
        self.served.seconds = self.now
        self.served.preemptions = self.manager.lifecycle.preemptions
        if self.manager.prefixes is not None:
            prefixes = self.manager.prefixes.figures
            self.served.hit_rate = prefixes.reused / max(prefixes.asked, 1)
        return self.served

    # -- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        arrival: Arrival,
        ids: tuple[int, ...] = (),
        received: int = 0,
        tag: Any = None,
        place: int = -1,
    ) -> None:
        """Submit a request.

        Args:
            ids: of its prompt; by default new ones after the shared ones.
            received, tag: see `Live`. place: in the order of arrivals; by default the next.
        """
        limits = self.graph.limits
        skeleton = self.graph.skeleton
        ids = ids or (-1 - arrival.stem,) * arrival.shared + self._new(
            arrival.prompt - arrival.shared
        )
        outlines = skeleton is not None and arrival.outline > 0
        prompt = (PromptTokens(ids[:-1]), PromptTokens(ids[-1:])) if outlines else None
        request = Request(
            str(self.served.requests),
            0,
            "",
            *(prompt or (PromptTokens(), PromptTokens(ids))),
            frozenset(),
            arrival.budget or max(limits.max_new_tokens, 1),
            skeleton.max_tokens if outlines and skeleton is not None else 0,
        )
        self.served.requests += 1
        request.arrival = place
        self.manager.lifecycle.submit(request)
        self._live[request.prefix_owner] = Live(arrival, tag, received)
        self.served.waited = max(self.served.waited, len(self.manager.table.waiting))

    def _new(self, count: int) -> tuple[int, ...]:
        """Ids of no other text, so that only shared prefixes match."""
        self._ids = (self._ids + 1) % MAX_IDS
        return (self._ids,) * count

    # -- a step -----------------------------------------------------------------------------------

    def _step_(self, plan: StepPlan) -> None:
        self.served.steps += 1
        rows = ran = 0
        if plan.outlines:
            self._parse_()
        elif not plan.answers:
            ran = 0 if plan.folds or plan.parallel else plan.running
            rows = self._forward_(plan, self.manager.active[:] if ran else [])
        self.now += self.cost.seconds(rows, ran, self.pool.needed_length)
        for live in self._started:
            self.first_token(live)
        self._started.clear()
        if plan.answers:
            self._answer_()

    def _forward_(self, plan: StepPlan, ran: Sequence[Branch]) -> int:
        """Write down the results of a forward; returns its rows."""
        manager = self.manager
        newcomers, _, spans = manager.batch_builder.start_(plan)
        rows = manager.capacity.round_rows(len(ran)) + sum(map(self._computed, spans))
        for branch in ran:
            self._write(branch, next(self._round_tokens))
        by_owner = {branch.owner: branch for branch in newcomers}
        for span in spans:
            self._read(span, by_owner.get(span.owner))
        self.served.forwards += 1
        self.served.rows += rows
        manager.lifecycle.release_and_prepare_([*ran, *newcomers])
        return rows

    def _computed(self, span: Span) -> int:
        """Rows of a prompt that are not received."""
        received = self._live[span.request].received
        return len(span.tokens) - min(max(received - span.position, 0), len(span.tokens))

    def _read(self, span: Span, branch: Branch | None) -> None:
        """Rows of a prompt; a starting branch samples its first token."""
        self.pool.grow_(span.owner, span.position, len(span.tokens))
        if branch is None:
            return
        branch.length += len(span.tokens)
        if not branch.tokens:
            self._append(branch, 1)

    def _write(self, branch: Branch, count: int) -> None:
        """A round of a branch: its tokens and their rows."""
        written = self._append(branch, count)
        self.pool.grow_(branch.owner, branch.length, written)
        branch.num_cached_tokens += written
        branch.length += written

    def _append(self, branch: Branch, count: int) -> int:
        goal = min(self._goal(branch), branch.budget)
        written = min(count, goal - len(branch.tokens))
        branch.tokens += self._new(written)
        live = self._live[branch.request.prefix_owner]
        if not live.started:
            live.started = True
            self._started.append(live)
        self.served.tokens += written
        if len(branch.tokens) >= goal:
            branch.end(Finish.STOP if goal < branch.budget else Finish.LENGTH)
        return written

    def _goal(self, branch: Branch) -> int:
        arrival = self._live[branch.request.prefix_owner].arrival
        return max(arrival.outline if branch.is_root else arrival.texts[branch.index], 1)

    # -- outlines and answers ---------------------------------------------------------------------

    def _parse_(self) -> None:
        """Turn finished outlines into branches with the arrival's lengths."""
        table = self.manager.table
        kv_cache = self.manager.kv_cache
        for request in [one for one in table.open.values() if one.outline_ended]:
            root = request.root
            arrival = self._live[request.prefix_owner].arrival
            assert root is not None
            if self.shares:
                kv_cache.promote_root_(request)
            else:
                kv_cache.drop_root_(request)
            pending = tuple(root.pending) if self.shares else self._new(1)
            request.common_prompt = request.opening + PromptTokens(pending)
            for index, length in enumerate(arrival.texts):
                branch = table.new_branch(request, index, request.budget)
                hint = max(round(length * self._rng.uniform(*HINT_FACTORS)), 1)
                branch.point = Point(index + 1, hint, None, (), "")
                branch.prompt = PromptTokens(self._new(PART_PROMPT))
                request.branches.append(branch)
            move(request, "run")
        self.manager.lifecycle.release_and_prepare_()

    def _answer_(self) -> None:
        for request in self.manager.table.forget_finished():
            live = self._live.pop(request.prefix_owner)
            self.end(live, any(one.finish is Finish.REFUSED for one in request.all_branches()))

    # -- figures of requests ----------------------------------------------------------------------

    def first_token(self, live: Live) -> None:
        """Count the first token of a request."""
        self.served.first.add(self.now - live.arrival.at)

    def end(self, live: Live, refused: bool) -> None:
        """Count the answer or the refusal of a request."""
        self.served.refused += refused
        if not refused:
            self.served.whole.add(self.now - live.arrival.at)
