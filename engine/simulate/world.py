"""A run without a model: requests of known lengths, the real scheduler, and a clock that moves by
the cost of each step."""

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ...ops.kv.pool import KVCache
from ...states.graph.graph import Graph
from ...states.manager import BranchStateManager
from ...states.phases.schedule import plan_
from ...states.request import Branch, Finish, Request, move
from ...states.request_table import RunLimits
from ...states.scheduler import Inbox, StepPlan
from ...states.text.outline import Point
from ...states.text.tokens import PromptTokens
from ..errors import UsageError
from .costs import StepCost


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. at: seconds from the start. prompt: its tokens; the first `shared` of them are
    those of all with this `stem`. outline: tokens before its parts, 0 for none. texts: tokens of
    each part, or of its one answer. budget: of each text; 0 leaves that to the graph."""

    at: float
    prompt: int
    texts: tuple[int, ...]
    outline: int = 0
    stem: int = 0
    shared: int = 0
    budget: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Generated requests; ranges are uniform, both ends included. The budget is the next power of
    two above the longest text. stems: beginnings of `shared` tokens. parts: (0, 0) for none."""

    prompt: tuple[int, int] = (20, 120)
    answer: tuple[int, int] = (16, 256)
    outline: tuple[int, int] = (20, 60)
    parts: tuple[int, int] = (0, 0)
    stems: int = 0
    shared: int = 0

    def draw(self, at: float, chance: random.Random) -> Arrival:
        parts = chance.randint(*self.parts)
        texts = tuple(chance.randint(*self.answer) for _ in range(parts or 1))
        outline = chance.randint(*self.outline) if parts else 0
        shared = self.shared if self.stems else 0
        stem = chance.randrange(self.stems) if self.stems else 0
        prompt = shared + chance.randint(*self.prompt)
        budget = 1 << max(texts).bit_length()
        return Arrival(at, prompt, texts, outline, stem=stem, shared=shared, budget=budget)


def arrivals(spec: str, count: int, work: Workload, seed: int) -> Iterator[Arrival]:
    """The arrivals that `poisson:RATE`, `bursts:RATE:SIZE` or a file names; raises UsageError."""
    kind, *numbers = spec.split(":")

    def generated(rate: float, size: int) -> Iterator[Arrival]:
        chance = random.Random(f"{kind} {seed}")
        at = 0.0
        for number in range(count):
            if number % size == 0:
                at += chance.expovariate(rate / size)
            yield work.draw(at, chance)

    try:
        if (kind, len(numbers)) in (("poisson", 1), ("bursts", 2)):
            rate = float(numbers[0])
            size = int(numbers[1]) if kind == "bursts" else 1
            if rate > 0 and size > 0:
                return generated(rate, size)
    except ValueError:
        raise UsageError(f"--arrivals {spec}: no such numbers") from None
    if not Path(spec).is_file():
        raise UsageError(f"--arrivals {spec}: neither poisson:RATE, bursts:RATE:SIZE, nor a file")
    return _recorded(Path(spec))


def _recorded(path: Path) -> Iterator[Arrival]:
    """Arrivals from a file of JSON lines with the fields of `Arrival`; raises UsageError."""
    before = 0.0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
                one = Arrival(**values | {"texts": tuple(values["texts"])})
                valid = bool(one.texts) and min(one.texts) >= 1 and one.at >= before
                valid &= 0 <= one.shared <= one.prompt and one.prompt >= 1
                valid &= min(one.outline, one.budget) >= 0
            except (ValueError, TypeError, KeyError) as error:
                raise UsageError(f"{path}:{number}: not an arrival: {error}") from None
            if not valid:
                raise UsageError(f"{path}:{number}: invalid arrival: {line.strip()[:80]}")
            before = one.at
            yield one


MAX_IDS = 1 << 30  # positions and token ids, without a model's limits
PART_PROMPT = 12  # tokens of a part's own prompt
HINT_FACTORS = (0.5, 1.5)  # of an outline's expected lengths
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(slots=True)
class ServedFigures:
    """The figures of a simulation under their documented names. seconds: from the start to the last
    answer, on the simulated clock; time_to_first_token, time_to_answer: of each request."""

    requests: int = 0
    refused: int = 0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    hit_rate: float = 0.0
    seconds: float = 0.0
    time_to_first_token: list[float] = field(default_factory=list)
    time_to_answer: list[float] = field(default_factory=list)

    def count_schedulers(self, managers: Sequence[BranchStateManager]) -> None:
        """Add the preemptions and the reused share of prompts of all schedulers."""
        self.preemptions = sum(manager.lifecycle.preemptions for manager in managers)
        caches = [manager.prefixes.figures for manager in managers if manager.prefixes is not None]
        asked = sum(cache.asked for cache in caches)
        self.hit_rate = sum(cache.reused for cache in caches) / max(asked, 1)

    def document(self) -> dict[str, Any]:
        """All figures as JSON values; durations as quantiles."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["tokens_per_second"] = self.tokens / self.seconds if self.seconds else 0.0
        for name in ("time_to_first_token", "time_to_answer"):
            values[name] = quantiles(values[name])
        return values


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Quantiles of durations: the smallest that a share does not exceed; 0.0 without any."""
    values = np.quantile(seconds or [0.0], QUANTILES, method="inverted_cdf")
    return {f"p{round(100 * q)}": float(v) for q, v in zip(QUANTILES, values, strict=True)}


@dataclass(slots=True)
class WorkerFigures(ServedFigures):
    """Of one scheduler. most_waiting: the largest number of waiting requests."""

    most_waiting: int = 0
    forwards: int = 0
    rows: int = 0


@dataclass(slots=True)
class Live:
    """An open request, or a text of a cluster's `job`. part: number of the text; load: its tokens.
    received: rows from another worker, not computed. refused: a branch was refused."""

    arrival: Arrival
    job: Any = None
    part: int = 0
    load: int = 0
    received: int = 0
    started: bool = False
    refused: bool = False


class Simulation:
    """One graph's scheduler on arrivals in the order of time. now: seconds on the simulated clock.
    busy: processor seconds in the scheduler. started, ended: requests whose first token, or whose
    answer, is of the last step. Raises UsageError: the graph cannot be simulated."""

    def __init__(self, graph: Graph, cost: StepCost, policy: str, seed: int | str = 0) -> None:
        if graph.layout.kind != "bim" or graph.beam is not None:
            raise UsageError(f"{graph.name}: graphs with layout.kind bim and without beams only")
        scheduler = graph.scheduler.model_copy(update={"policy": policy})
        ranked = graph.model_copy(update={"scheduler": scheduler})
        limits = RunLimits(ranked, max_positions=MAX_IDS, vocabulary=MAX_IDS)
        self.graph = graph
        self.cost = cost
        self.pool = KVCache(0, 1, 1, graph.layout.kv_slots)
        self.manager = BranchStateManager(self.pool, None, limits, lambda branch: branch.prompt)
        self.served = WorkerFigures()
        self.now = 0.0
        self.busy = 0.0
        self.started: list[Live] = []
        self.ended: list[Live] = []
        self._inbox = Inbox(serves=True)
        self._rng = random.Random(f"simulation {seed}")
        self._round_tokens = cost.round_tokens(self._rng)
        self.live: dict[int, Live] = {}
        self._ids = 0  # the last token id: every prompt and answer has its own

    def run(self, arrivals: Iterable[Arrival]) -> WorkerFigures:
        source = iter(arrivals)
        after = next(source, None)
        while after is not None or self.live:  # until the last answer is delivered
            while after is not None and after.at <= self.now:
                self.submit(Live(after))
                after = next(source, None)
            if self.step():
                first = [self.now - live.arrival.at for live in self.started]
                whole = [self.now - live.arrival.at for live in self.ended if not live.refused]
                self.served.time_to_first_token += first
                self.served.time_to_answer += whole
            elif after is None:
                break
            else:
                self.now = after.at
        self.served.seconds = self.now
        self.served.count_schedulers([self.manager])
        return self.served

    def step(self) -> bool:
        """One step of the clock; False if there is nothing to do."""
        self.started.clear()
        self.ended.clear()
        start = perf_counter()
        plan = plan_(self.manager, self._inbox)
        self.busy += perf_counter() - start
        if plan.is_idle:
            return False
        self.served.steps += 1
        rows = ran = 0
        if plan.outlines:
            self._parse_()
        elif not plan.answers:
            ran = 0 if plan.folds or plan.parallel else plan.running
            rows = self._forward_(plan, self.manager.active[:] if ran else [])
        self.now += self.cost.seconds(rows, ran, self.pool.needed_length)
        for request in self.manager.table.forget_finished() if plan.answers else ():
            live = self.live.pop(request.prefix_owner)
            live.refused = any(b.finish is Finish.REFUSED for b in request.all_branches())
            self.served.refused += live.refused
            self.ended.append(live)
        return True

    def submit(self, live: Live, ids: tuple[int, ...] = (), place: int = -1) -> None:
        """Submit a request. ids: of its prompt; by default new ones. place: by default the next."""
        arrival = live.arrival
        stem = (-1 - arrival.stem,) * arrival.shared
        ids = ids or stem + self._new(arrival.prompt - arrival.shared)
        skeleton = self.graph.skeleton if arrival.outline else None
        prefix = () if skeleton is None else ids[:-1]  # the rest is the root branch's prompt
        request = Request(
            key=str(self.served.requests),
            seed=0,
            question="",
            prefix=PromptTokens(prefix),
            tail=PromptTokens(ids[len(prefix) :]),
            stop_ids=frozenset(),
            budget=arrival.budget or max(self.graph.limits.max_new_tokens, 1),
            outline_budget=0 if skeleton is None else skeleton.max_tokens,
        )
        self.served.requests += 1
        request.arrival = place
        self.manager.lifecycle.submit(request)
        self.live[request.prefix_owner] = live
        self.served.most_waiting = max(self.served.most_waiting, len(self.manager.table.waiting))

    def _new(self, count: int) -> tuple[int, ...]:
        """Ids of no other text, so that only shared prefixes match."""
        self._ids = (self._ids + 1) % MAX_IDS
        return (self._ids,) * count

    def _forward_(self, plan: StepPlan, ran: Sequence[Branch]) -> int:
        """Write down the results of a forward; returns its rows."""
        manager = self.manager
        newcomers, spans = manager.batch_builder.start_(plan)
        rows = manager.capacity.round_rows(len(ran))
        grown: list[tuple[int, int, int]] = []  # an owner, its next position, its new rows
        for branch in ran:
            written = self._append(branch, next(self._round_tokens))
            grown.append((branch.owner, branch.length, written))
            branch.num_cached_tokens += written
            branch.length += written
        for span in spans:
            size = len(span.tokens)
            received = self.live[span.request].received - span.position
            rows += size - min(max(received, 0), size)  # received rows are not computed
            grown.append((span.owner, span.position, size))
            if span.branch is not None:
                span.branch.length += size
                if not span.branch.tokens:  # the first token is sampled after the prompt
                    self._append(span.branch, 1)
        if grown:
            owners, _, counts = zip(*grown, strict=True)
            places_Q = np.concatenate([np.arange(first, first + n) for _, first, n in grown])
            slots_Q = self.pool.append_(np.repeat(owners, counts), places_Q)
            self.pool.commit_(slots_Q, places_Q)
        self.served.forwards += 1
        self.served.rows += rows
        manager.lifecycle.release_and_prepare_([*ran, *newcomers])
        return rows

    def _append(self, branch: Branch, count: int) -> int:
        """Append up to `count` tokens to a branch, which may end it; returns their number."""
        live = self.live[branch.request.prefix_owner]
        arrival = live.arrival
        goal = max(arrival.outline if branch.is_root else arrival.texts[branch.index], 1)
        written = min(count, min(goal, branch.budget) - len(branch.tokens))
        branch.tokens += self._new(written)
        if not live.started:
            live.started = True
            self.started.append(live)
        self.served.tokens += written
        if len(branch.tokens) >= min(goal, branch.budget):
            branch.end(Finish.STOP if goal < branch.budget else Finish.LENGTH)
        return written

    def _parse_(self) -> None:
        """Turn finished outlines into branches with the arrival's lengths."""
        table = self.manager.table
        kv_cache = self.manager.kv_cache
        for request in [r for r in table.open.values() if r.outline_ended]:
            root = request.root
            assert root is not None
            if self.manager.limits.share_outline:
                kv_cache.promote_root_(root)
                pending = tuple(root.pending)
            else:
                kv_cache.drop_root_(root)
                pending = self._new(1)
            request.common_prompt = request.opening + PromptTokens(pending)
            for index, length in enumerate(self.live[request.prefix_owner].arrival.texts):
                branch = table.new_branch(request, index, request.budget)
                hint = max(round(length * self._rng.uniform(*HINT_FACTORS)), 1)
                branch.point = Point(index + 1, hint, None, (), title="")
                branch.prompt = PromptTokens(self._new(PART_PROMPT))
                request.branches.append(branch)
            move(request, "run")
        self.manager.lifecycle.release_and_prepare_()
