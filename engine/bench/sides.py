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
from typing import Any

from ...states.request import Request
from ..limits import cpu_share
from ..models import load_models, with_drafter
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


@dataclass
class Moments:
    """Sums over runs of nanoseconds from a run's start, and what else only single runs have.

    decoded: tokens behind each run's first one.
    """

    first_token: int = 0
    last_token: int = 0
    decoded: int = 0
    host_reads: int = 0


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
    whole = Cost(Meter(), {name: PoolUse() for name in costs[0].pools})
    for cost in costs:
        whole.meter.add(cost.meter)
        for name, value in vars(cost.moments).items():
            setattr(whole.moments, name, getattr(whole.moments, name) + value)
        for name, use in cost.pools.items():
            pool = whole.pools[name]
            pool.peak_slots = max(pool.peak_slots, use.peak_slots)
            pool.peak_bytes = max(pool.peak_bytes, use.peak_bytes)
            pool.allocated_bytes = max(pool.allocated_bytes, use.allocated_bytes)
            pool.moved_bytes.update(use.moved_bytes)
            pool.moves.update(use.moves)
    return whole


@dataclass(frozen=True, slots=True)
class Peer:
    """Another program that decodes a side's prompts with the side's models.

    answer: of one prompt, at most so many tokens. codes: its number format of the weights, if it
    differs from the side's.
    """

    name: str
    answer: "Callable[[Side, Prompt, int | None], SideRun]"
    codes: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """One graph of a comparison; letter: its name in tables.

    target: the folder of its model. sets: settings that not all graphs have. peer: the program that
    answers instead of the graph, which then defines the right answer.
    """

    letter: str
    job: Job
    session: Session
    target: Path
    sets: tuple[str, ...] = ()
    peer: Peer | None = None

    @property
    def title(self) -> str:
        return self.peer.name if self.peer is not None else self.job.program.graph.name

    @property
    def name(self) -> str:
        return f"{self.title}@{','.join(self.sets)}" if self.sets else self.title

    @property
    def blends(self) -> bool:
        return self.peer is None and self.job.program.graph.blend is not None


@dataclass(frozen=True, slots=True)
class SideRun:
    """One prompt answered by one side.

    problems: why the answer is not complete, a line each. answered: None for a run of a folder.
    digest: of its tokens.
    """

    status: Status
    cost: Cost
    problems: Sequence[str]
    answered: Request | None = None
    digest: str = ""

    @property
    def request(self) -> Request:
        assert self.answered is not None, "a saved run was judged when it was made"
        return self.answered


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """A prompt with its runs, by the sides' letters; cpu_share: of a busy loop just before."""

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
        options = replace(job.options, threads=threads_of(job))
        job = replace(job, options=options)
        set_up_torch(threads_of(job), options.device)
        place = {"device": options.device, "dtype": options.dtype, "weights": options.weights}
        models = self._target(target, None, **place)
        if drafter is not None:
            models = self._drafted(models, drafter, job.program.graph.drafter.kind)
        return Side(letter, job, tie(job, models), target, sets=sets)


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
        sides.append(models.side(letter, job, *model_folders(job), sets=sets))
    return sides


def warm_up(
    sides: Sequence[Side], prompts: Sequence[Prompt], halt: StopSignal, rounds: int, collect: bool
) -> None:
    """Run the first prompt for some rounds that no figure counts: torch sets itself up.

    collect: all prompts where a graph reuses chunks of documents, so that every chunk is read.
    """
    for side in sides if prompts else ():
        set_up_torch(threads_of(side.job), side.job.options.device)
        if side.peer is not None:
            side.peer.answer(side, prompts[0], rounds)
            continue
        for prompt in dict.fromkeys(prompts) if collect and side.blends else prompts[:1]:
            perform(side.session, [prompt], stop=halt, max_rounds=rounds)[0].close()


def answer_all(
    sides: Sequence[Side],
    prompts: Sequence[Prompt],
    halt: StopSignal,
    show: Callable[[str, float], None],
    numbers: Sequence[int] = (),
) -> Iterator[ComparedPrompt]:
    """Every prompt through every graph, prompt by prompt, in one state of the machine.

    The first side changes from round to round, so that a slower machine favours no graph.
    Ends early at a stop signal; a prompt that not every graph has answered is omitted.

    Args:
        numbers: of the rounds; instead of in turn, the order is drawn from a round's number.
    """
    start_time = monotonic()
    done = 0
    every = len(prompts) * len(sides)
    for number, prompt in enumerate(prompts):
        runs = {}
        share = cpu_share()
        first = number % len(sides)
        order = [*sides[first:], *sides[:first]]
        for side in Random(numbers[number]).sample(sides, len(sides)) if numbers else order:
            remaining = ""
            if done:
                seconds = (monotonic() - start_time) / done * (every - done)
                left = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
                remaining = f", about {left} left"
            name = f"{side.letter} {side.name}"
            show(f"prompt {number + 1} of {len(prompts)}{remaining}: {name} ...", done / every)
            runs[side.letter] = _answer(side, prompt, halt)
            if halt.status is not None:
                return
            done += 1
        yield ComparedPrompt(prompt, {side.letter: runs[side.letter] for side in sides}, share)


def _answer(side: Side, prompt: Prompt, halt: StopSignal) -> SideRun:
    set_up_torch(threads_of(side.job), side.job.options.device)
    if side.peer is not None:
        return side.peer.answer(side, prompt, None)
    run, recorder, status = perform(side.session, [prompt], stop=halt)
    requests = run.board["branches"].requests
    meter = recorder.meter
    answers = answers_of(requests, side.session.prompts)
    problems = refusals(answers)
    if status is Status.LIMIT:
        most = side.job.program.graph.limits.max_rounds
        problems.append(f"request {prompt.key} stopped after {most} rounds (limits.max_rounds)")
    pools = {
        name: PoolUse(
            peak_slots=pool.peak_length,
            peak_bytes=pool.peak_length * pool.slot_bytes,
            allocated_bytes=pool.slots * pool.slot_bytes,
            moved_bytes=pool.ledger.bytes,
            moves=pool.ledger.moves,
        )
        for name, pool in {"target": run.board["kv"], "drafter": run.board["kv_draft"]}.items()
        if pool is not None
    }
    moments = Moments(host_reads=run.board["host"].reads)
    for marks in list(meter.marks.values())[:1]:
        if marks.first_token is not None and marks.last_token is not None:
            moments.first_token = marks.first_token
            moments.last_token = marks.last_token
            moments.decoded = max(meter.tokens - 1, 0)
    run.close()
    lines = [f"{side.letter} {side.name}: {problem}" for problem in problems]
    cost = Cost(meter, pools, moments)
    return SideRun(status, cost, lines, requests[0], digest=output_digest(answers))
