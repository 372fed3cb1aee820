"""Runs that are looked at after every phase, with stop ids and budgets of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...states.request import Branch, Finish, Request
from ...states.text.outline import Outline, Point
from ...states.trace import Event, OpRan
from ..bench.sides import Side
from ..prepare.inputs import Prompt
from ..run.core import EngineCore
from ..run.scoring import contexts
from .teacher import Repeat, TeacherTally, repeat_in_float64
from .watch import Watch, off_by, pooled_drafters
from .workbench import Bench

MOST_STEPS = 100_000  # transitions after which a run counts as hanging
COMPARED = 60  # branches of a probe whose drafter rows are computed again
TITLES = ("Goal", "Main parts", "Risks", "Summary", "Steps", "Time", "Cost", "Place")
FORWARD = "target.forward_"
DRAFTED = "draft.expand_root_"


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of `parts` branches: of one given outline, or of as many requests.

    sets: as of `--set`. tokens: the budget of every branch. stops: stop ids; None for the model's
    own, and then it writes the outlines itself. prompts: instead of the first ones of the
    certificate. expected: how long the outline says that parts get. Greedy, unless `sets` say
    otherwise.
    """

    sets: tuple[str, ...] = ()
    parts: int = 4
    tokens: int | None = None
    stops: frozenset[int] | None = frozenset()
    prompts: tuple[Prompt, ...] = ()
    expected: int = 60
    dtype: str = ""


@dataclass(frozen=True)
class ProbedRun:
    """A trial's run that came to its end."""

    bench: Bench
    trial: Trial
    side: Side
    run: EngineCore
    requests: tuple[Request, ...]

    @property
    def branches(self) -> list[Branch]:
        """All but the outlines."""
        return [branch for request in self.requests for branch in request.branches]

    def answers(self) -> Iterator[tuple[Branch, list[int]]]:
        """Every branch that was decoded, outlines too, with the ids that it stands behind."""
        for request in self.requests:
            yield from contexts(request, self.side.session.prompts)

    def again(self) -> "ProbedRun":
        """The same in float64."""
        return probe(self.bench, replace(self.trial, dtype="float64"))

    @cached_property
    def repeat(self) -> Repeat | None:
        def rerun() -> Iterator[tuple[Side, Request]]:
            again = self.again()
            return ((again.side, request) for request in again.requests)

        return repeat_in_float64(self.bench, rerun)

    def hold(self) -> TeacherTally:
        """All answers, held to transformers."""
        tally = TeacherTally(self.bench.reference, self.bench.dtype)
        for request in self.requests:
            tally.hold(self.side, request, self.repeat)
        return tally

    def agree(self, expected: Sequence[Sequence[int]]) -> list[str]:
        """What is wrong with answers that should be these; what transformers says counts."""
        if len(self.branches) != len(expected):
            return [f"{len(self.branches)} branches, expected were {len(expected)}"]
        tally = TeacherTally(self.bench.reference, self.bench.dtype)
        ids = dict(self.answers())
        for branch, tokens in zip(self.branches, expected, strict=True):
            if branch not in ids or branch.finish not in (Finish.STOP, Finish.LENGTH):
                tally.wrong.append(f"{branch.name} is {branch.finish}: {branch.note}")
            elif branch.tokens != list(tokens):
                tally.hold_branch(branch, ids[branch], self.repeat)
        return tally.wrong


def probe(bench: Bench, trial: Trial, watch: Watch | None = None) -> ProbedRun:
    """Run a trial to its end and note in `watch` what is seen of it."""
    greedy = () if bench.job.program.graph.beam is not None else ("sampling.temperature=0",)
    dtype = trial.dtype or bench.dtype
    most = bench.extent.gate_tokens
    job = bench.changed(*greedy, *trial.sets, tokens=most, dtype=dtype)
    skeleton = job.program.graph.skeleton
    if skeleton is not None and trial.stops is not None:
        titles = TITLES[: min(trial.parts, skeleton.max_branches)]
        points = (
            Point(number, trial.expected, None, (), title) for number, title in enumerate(titles, 1)
        )
        job = replace(job, outline=Outline("plan", tuple(points), (), "ok"))
    side = bench.side(job)
    prompts = trial.prompts or bench.job.prompts[: trial.parts if skeleton is None else 1]
    requests = [side.session.request(prompt) for prompt in prompts]
    for request in requests:
        request.budget = request.budget if trial.tokens is None else trial.tokens
        request.stop_ids = request.stop_ids if trial.stops is None else trial.stops
    run = _drive(side, requests, watch or Watch())
    return ProbedRun(bench, trial, side, run, tuple(requests))


def _drive(side: Side, requests: Sequence[Request], watch: Watch) -> EngineCore:
    """To the end; looks at the run after every phase.

    Raises:
        RuntimeError: it does not come to an end.
    """
    ops: list[str] = []

    def sink(event: Event) -> None:
        if isinstance(event, OpRan):
            watch.forwards += event.op == FORWARD
            ops.append(event.op)

    run = side.session.start(requests, sink)
    pools = run.manager.pools
    places = [pool.data.data_ptr() for pool in pools]
    most = watch.compared + COMPARED if run.draft_kv is not None else 0

    def look() -> bool:
        if run.steps >= MOST_STEPS:
            raise RuntimeError(f"no end after {MOST_STEPS} transitions")
        if run.steps == 0:
            return True
        watch.look(run)
        for drafter in pooled_drafters(run) if DRAFTED in ops and watch.compared < most else ():
            for branch in (branch for branch in drafter.active if not branch.reads):
                watch.compared += 1
                watch.worst = max(watch.worst, off_by(side, run, drafter, branch))
        ops.clear()
        return True

    while run.step(look):
        pass
    look()
    watch.runs += 1
    watch.reads += run.host.reads
    watch.forked += sum(pool.ledger.bytes["fork"] for pool in pools)
    if places != [pool.data.data_ptr() for pool in pools]:
        watch.wrong.setdefault("moved", "a pool was allocated anew during a run")
    for used in filter(None, (pool.current_length - pool.idle_length for pool in pools)):
        watch.wrong.setdefault("left", f"{used} slots are in use after the end of a run")
    return run
