"""What is compared: graphs with their models, loaded once, and each prompt as a run of its own."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count, product
from pathlib import Path
from string import ascii_uppercase
from time import monotonic
from typing import Any

from ...states.requests.branch import Request
from ..limits import cpu_share
from ..models import load_models, with_drafter
from ..prepare.environment import model_folders, set_up_torch, threads_of
from ..prepare.inputs import Prompt
from ..prepare.job import Job
from ..record.metrics import Meter, state_figures
from ..record.report import answers_of, refusals
from ..run.opening import notes_of, tie
from ..run.runner import Halt, Status, perform
from ..run.session import Session

WARM_UP = 2  # rounds of the first prompt that no figure counts: torch sets itself up in them


@dataclass(frozen=True, slots=True)
class Side:
    """One graph of a comparison.

    letter: what it is called in tables; target: the folder of its model; sets: those of its
    settings that not every graph was given.
    """

    letter: str
    job: Job
    session: Session
    target: Path
    sets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        name = self.job.program.graph.name
        return f"{name}@{','.join(self.sets)}" if self.sets else name


@dataclass
class PoolUse:
    """A KV pool: what it held at most, and what was moved inside it, by cause."""

    peak_slots: int = 0
    peak_bytes: int = 0
    moved_bytes: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, pool: Any) -> "PoolUse":
        peak, ledger = pool.peak_length, pool.ledger
        return cls(peak, peak * pool.slot_bytes, ledger.bytes, ledger.moves)

    def add(self, other: "PoolUse") -> None:
        """Count another run as well."""
        self.peak_slots = max(self.peak_slots, other.peak_slots)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.moved_bytes.update(other.moved_bytes)
        self.moves.update(other.moves)


@dataclass(frozen=True, slots=True)
class Cost:
    """Figures of one run or of several; pools: the `target`'s, and the `drafter`'s if any."""

    meter: Meter
    pools: Mapping[str, PoolUse]

    def document(self) -> dict[str, Any]:
        """The figures under their documented names (docs/metrics.md)."""
        meter, pools = self.meter, {name: vars(use) for name, use in self.pools.items()}
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
    meter, pools = Meter(), {name: PoolUse() for name in costs[0].pools}
    for cost in costs:
        meter.add(cost.meter)
        for name, use in cost.pools.items():
            pools[name].add(use)
    return Cost(meter, pools)


@dataclass(frozen=True, slots=True)
class SideRun:
    """One prompt answered by one graph.

    problems: why the answer is not complete, and whose it is, a line each. answered: None where a
    folder kept the run, and no more of it than figures.
    """

    status: Status
    cost: Cost
    problems: Sequence[str]
    answered: Request | None = None

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
        self._target, self._drafted = cache(load_models), cache(with_drafter)

    def side(
        self, letter: str, job: Job, target: Path, drafter: Path | None, sets: tuple[str, ...] = ()
    ) -> Side:
        """A job with the models of these folders; raises UsageError, ModelError, GraphError."""
        threads = threads_of(job)
        job = replace(job, options=(options := replace(job.options, threads=threads)))
        set_up_torch(threads, options.device)
        models = self._target(target, None, device=options.device, dtype=options.dtype)
        if drafter is not None:
            models = self._drafted(models, drafter, job.program.graph.drafter.kind)
        return Side(letter, job, tie(job, models), target, sets)


def letters() -> Iterator[str]:
    """A to Z, AA, AB and so on."""
    lengths = (product(ascii_uppercase, repeat=length) for length in count(1))
    return map("".join, chain.from_iterable(lengths))


def load_sides(jobs: Sequence[Job]) -> list[Side]:
    """All graphs with their models; raises UsageError, ModelError, GraphError."""
    models, sides = SharedModels(), []
    common = set(jobs[0].options.sets).intersection(*(job.options.sets for job in jobs))
    for letter, job in zip(letters(), jobs, strict=False):
        own = tuple(one for one in job.options.sets if one not in common)
        sides.append(models.side(letter, job, *model_folders(job), own))
    return sides


def loading_notes(sides: Sequence[Side]) -> list[str]:
    """What the readers of prompts and models found worth telling, each once."""
    both = (note for s in sides for note in (*s.job.notes, *notes_of(s.session.models)))
    return list(dict.fromkeys(both))


def warm_up(
    sides: Sequence[Side], prompts: Sequence[Prompt], asked: Sequence[Prompt], halt: Halt
) -> None:
    """Refuse what cannot be a prompt before anything is measured, and warm everything up.

    asked: those of the prompts that are about to be measured.

    Raises:
        PromptError: the text cannot be a prompt for one of the models.
    """
    for side in sides:
        for prompt in prompts:
            side.session.request(prompt)
    for side in sides if asked else ():
        set_up_torch(threads_of(side.job), side.job.options.device)
        perform(side.session, asked[:1], halt=halt, max_rounds=WARM_UP)[0].close()


def answer_all(
    sides: Sequence[Side], prompts: Sequence[Prompt], halt: Halt, show: Callable[[str], None]
) -> Iterator[ComparedPrompt]:
    """Every prompt through every graph, prompt by prompt, so that all share the machine's moods.

    Who begins changes from prompt to prompt: a machine that gets slower favours no graph. Ends
    early when somebody asked to stop; a prompt that not every graph has answered is left out.
    """
    began, done, every = monotonic(), 0, len(prompts) * len(sides)
    for number, prompt in enumerate(prompts):
        runs, share, first = {}, cpu_share(), number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            left = _words((monotonic() - began) / done * (every - done)) if done else ""
            show(f"prompt {number + 1} of {len(prompts)}{left}: {side.letter} {side.name} ...")
            runs[side.letter] = _answer(side, prompt, halt)
            if halt.status is not None:
                return
            done += 1
        yield ComparedPrompt(prompt, {side.letter: runs[side.letter] for side in sides}, share)


def _words(seconds: float) -> str:
    """How long it may still take."""
    return (
        f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"
    )


def _answer(side: Side, prompt: Prompt, halt: Halt) -> SideRun:
    set_up_torch(threads_of(side.job), side.job.options.device)
    run, recorder, status = perform(side.session, [prompt], halt=halt)
    requests = run.board["branches"].requests
    problems = refusals(answers_of(requests, side.session.prompts))
    if status is Status.LIMIT:
        most = side.job.program.graph.limits.max_rounds
        problems.append(f"request {prompt.key} stopped after {most} rounds (limits.max_rounds)")
    pools = {"target": run.board["kv"], "drafter": run.board["kv_draft"]}
    uses = {name: PoolUse.of(pool) for name, pool in pools.items() if pool is not None}
    run.close()
    lines = [f"{side.letter} {side.name}: {problem}" for problem in problems]
    return SideRun(status, Cost(recorder.meter, uses), lines, requests[0])
