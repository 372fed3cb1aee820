"""The sides of a comparison: their models, one run of a prompt by each, and its costs."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count, product
from pathlib import Path
from random import Random
from string import ascii_uppercase
from time import monotonic
from typing import Any, Protocol

from ...states.request import Request
from ..limits import cpu_share
from ..models import load_models, notes_of, with_drafter
from ..prepare.environment import model_folders, set_up_torch, threads_of
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..record.metrics import Meter, state_figures
from ..record.report import answers_of, output_digest, refusals
from ..run.runner import Status, StopSignal, perform
from ..run.session import Session, tie


@dataclass
class PoolUse:
    """A KV pool: what it held at most, and what was moved inside it, by cause."""

    peak_slots: int = 0
    peak_bytes: int = 0
    allocated_bytes: int = 0
    moved_bytes: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, pool: Any) -> "PoolUse":
        peak = pool.peak_length
        ledger = pool.ledger
        size = pool.slots * pool.slot_bytes
        return cls(peak, peak * pool.slot_bytes, size, ledger.bytes, ledger.moves)

    def add(self, other: "PoolUse") -> None:
        """Count another run as well."""
        self.peak_slots = max(self.peak_slots, other.peak_slots)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.allocated_bytes = max(self.allocated_bytes, other.allocated_bytes)
        self.moved_bytes.update(other.moved_bytes)
        self.moves.update(other.moves)


@dataclass
class Moments:
    """Sums over runs of nanoseconds from a run's start, and what else only single runs tell.

    decoded: tokens behind each run's first one.
    """

    first_token: int = 0
    last_token: int = 0
    decoded: int = 0
    host_reads: int = 0

    @classmethod
    def of(cls, meter: Meter, host_reads: int = 0) -> "Moments":
        """Of a run with one request."""
        marks = next(iter(meter.marks.values()), None)
        if marks is None or marks.first_token is None or marks.last_token is None:
            return cls(host_reads=host_reads)
        return cls(marks.first_token, marks.last_token, max(meter.tokens - 1, 0), host_reads)

    def add(self, other: "Moments") -> None:
        """Count another run as well."""
        self.first_token += other.first_token
        self.last_token += other.last_token
        self.decoded += other.decoded
        self.host_reads += other.host_reads


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one run or of several; pools: the `target`'s, and the `drafter`'s if any."""

    meter: Meter
    pools: Mapping[str, PoolUse]
    moments: Moments = field(default_factory=Moments)

    def document(self) -> dict[str, Any]:
        """The figures under their documented names (docs/metrics.md)."""
        meter = self.meter
        pools = {name: vars(use) for name, use in self.pools.items()}
        return {
            "tau_step": meter.tau_step,
            "target_forwards": meter.forwards,
            "branch_rounds": meter.branch_rounds,
            "tokens": meter.tokens,
            "seconds": meter.seconds,
            "tokens_per_second": meter.tokens_per_second,
            "query_rows": meter.rows,
            "padding_rows": meter.padding,
            "padding_waste": meter.padding_waste,
            "states": state_figures(meter),
            "kv": {name: pools.get(name) for name in ("target", "drafter")},
        }


def total(costs: Sequence[Cost]) -> Cost:
    """Sums over runs of the same graph; of what pools held the largest."""
    meter = Meter()
    pools = {name: PoolUse() for name in costs[0].pools}
    moments = Moments()
    for cost in costs:
        meter.add(cost.meter)
        moments.add(cost.moments)
        for name, use in cost.pools.items():
            pools[name].add(use)
    return Cost(meter, pools, moments)


WARM_UP = 2  # rounds of the first prompt that no figure counts: torch sets itself up in them


class Peer(Protocol):
    """Another program's decoding of a side's prompts with the side's models."""

    @property
    def name(self) -> str: ...

    @property
    def codes(self) -> str:
        """How it keeps the weights, where that is not as the side's are."""
        ...

    def answer(self, side: "Side", prompt: Prompt, budget: int | None) -> "SideRun":
        """One prompt; at most `budget` tokens, if there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Side:
    """One graph of a comparison.

    letter: its name in tables; target: the folder of its model; sets: settings that not all graphs
    have. peer: the program that answers instead of the graph, which then defines the right answer.
    """

    letter: str
    job: Job
    session: Session
    target: Path
    sets: tuple[str, ...] = ()
    peer: Peer | None = None

    @property
    def title(self) -> str:
        """Of its graph, or the peer's name."""
        return self.peer.name if self.peer is not None else self.job.program.graph.name

    @property
    def name(self) -> str:
        return f"{self.title}@{','.join(self.sets)}" if self.sets else self.title


@dataclass(frozen=True, slots=True)
class SideRun:
    """One prompt answered by one graph.

    problems: why the answer is not complete, and whose it is, a line each. answered: None where a
    folder kept the run, and no more of it than figures. digest: of its tokens.
    """

    status: Status
    cost: Cost
    problems: Sequence[str]
    answered: Request | None = None
    digest: str = ""

    @property
    def request(self) -> Request:
        """With its answer; only of a run of this process."""
        assert self.answered is not None, "a kept run was judged when it was made"
        return self.answered


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """A prompt with what every side made of it, by the sides' letters.

    cpu_share: what a busy loop got of a CPU just before.
    """

    prompt: Prompt
    runs: Mapping[str, SideRun]
    cpu_share: float = 1.0


class SharedModels:
    """Models that are loaded when a graph first needs them and shared by all that do."""

    def __init__(self) -> None:
        self._target = cache(load_models)
        self._drafted = cache(with_drafter)

    def side(
        self, letter: str, job: Job, target: Path, drafter: Path | None, sets: tuple[str, ...] = ()
    ) -> Side:
        """A job with the models of these folders; raises UsageError, ModelError, GraphError."""
        threads = threads_of(job)
        job = replace(job, options=(options := replace(job.options, threads=threads)))
        set_up_torch(threads, options.device)
        place = {"device": options.device, "dtype": options.dtype, "weights": options.weights}
        models = self._target(target, None, **place)
        if drafter is not None:
            models = self._drafted(models, drafter, job.program.graph.drafter.kind)
        return Side(letter, job, tie(job, models), target, sets)


def letters() -> Iterator[str]:
    """A to Z, AA, AB and so on."""
    lengths = (product(ascii_uppercase, repeat=length) for length in count(1))
    return map("".join, chain.from_iterable(lengths))


def load_sides(jobs: Sequence[Job]) -> list[Side]:
    """All graphs with their models; raises UsageError, ModelError, GraphError."""
    models = SharedModels()
    sides = []
    common = set(jobs[0].options.sets).intersection(*(job.options.sets for job in jobs))
    for letter, job in zip(letters(), jobs, strict=False):
        sets = tuple(setting for setting in job.options.sets if setting not in common)
        sides.append(models.side(letter, job, *model_folders(job), sets))
    return sides


def loading_notes(sides: Sequence[Side]) -> list[str]:
    """What the readers of prompts and models found worth telling, each once."""
    both = (note for s in sides for note in (*s.job.notes, *notes_of(s.session.models)))
    return list(dict.fromkeys(both))


def warm_up(
    sides: Sequence[Side],
    prompts: Sequence[Prompt],
    pending: Sequence[Prompt],
    halt: StopSignal,
    most: int = WARM_UP,
    every: bool = False,
) -> None:
    """Refuse what cannot be a prompt before anything is measured, and warm everything up.

    asked: those of the prompts that are about to be measured; most: rounds of the first of them.
    every: of all of them where a graph reuses chunks of documents, so that all are collected.

    Raises:
        PromptError: the text cannot be a prompt for one of the models.
    """
    for side in sides:
        for prompt in prompts:
            side.session.request(prompt)
    for side in sides if pending else ():
        set_up_torch(threads_of(side.job), side.job.options.device)
        if side.peer is not None:
            side.peer.answer(side, pending[0], most)
            continue
        blends = every and side.job.program.graph.blend is not None
        for prompt in dict.fromkeys(pending) if blends else pending[:1]:
            perform(side.session, [prompt], stop=halt, max_rounds=most)[0].close()


Order = Callable[[Sequence[Side], int], Sequence[Side]]


def in_turn(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """The first side changes from round to round, so that a slower machine favours no graph."""
    first = number % len(sides)
    return (*sides[first:], *sides[:first])


def drawn(sides: Sequence[Side], number: int, numbers: Sequence[int]) -> Sequence[Side]:
    """An order drawn for each round, the same whenever the round of this number is run."""
    return Random(numbers[number]).sample(sides, len(sides))


def answer_all(
    sides: Sequence[Side],
    prompts: Sequence[Prompt],
    halt: StopSignal,
    show: Callable[[str, float], None],
    order: Order = in_turn,
) -> Iterator[ComparedPrompt]:
    """Every prompt through every graph, prompt by prompt, in one state of the machine.

    Ends early at a stop signal; a prompt that not every graph has answered is omitted.
    """
    start_time = monotonic()
    done = 0
    every = len(prompts) * len(sides)
    for number, prompt in enumerate(prompts):
        runs = {}
        share = cpu_share()
        for side in order(sides, number):
            remaining = _words((monotonic() - start_time) / done * (every - done)) if done else ""
            text = (
                f"prompt {number + 1} of {len(prompts)}{remaining}: {side.letter} {side.name} ..."
            )
            show(text, done / every)
            runs[side.letter] = _answer(side, prompt, halt)
            if halt.status is not None:
                return
            done += 1
        ordered = {member.letter: runs[member.letter] for member in sides}
        yield ComparedPrompt(prompt, ordered, share)


def _words(seconds: float) -> str:
    """How long it may still take."""
    return (
        f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"
    )


def _answer(side: Side, prompt: Prompt, halt: StopSignal) -> SideRun:
    set_up_torch(threads_of(side.job), side.job.options.device)
    if side.peer is not None:
        return side.peer.answer(side, prompt, None)
    run, recorder, status = perform(side.session, [prompt], stop=halt)
    requests = run.board["branches"].requests
    answers = answers_of(requests, side.session.prompts)
    problems = refusals(answers)
    if status is Status.LIMIT:
        most = side.job.program.graph.limits.max_rounds
        problems.append(f"request {prompt.key} stopped after {most} rounds (limits.max_rounds)")
    pools = {"target": run.board["kv"], "drafter": run.board["kv_draft"]}
    uses = {name: PoolUse.of(pool) for name, pool in pools.items() if pool is not None}
    moments = Moments.of(recorder.meter, run.board["host"].reads)
    run.close()
    lines = [f"{side.letter} {side.name}: {problem}" for problem in problems]
    cost = Cost(recorder.meter, uses, moments)
    return SideRun(status, cost, lines, requests[0], output_digest(answers))
