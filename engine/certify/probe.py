"""What is looked at after every phase of a run: its pools, and whether its drafter knows the text.

A stale or misplaced row in the drafter's pool changes no token, it only makes drafts worse, so no
comparison of answers can find it. Here a branch's rows are computed again, by target and drafter
over the branch's ids alone, and held against what the pool has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from ...ops.kv.pool import KVCache
from ...states.drafter import Drafter
from ...states.machine import Event, OpRan, Run
from ...states.request import Branch, Finish, Request, Stage
from ...states.text.outline import Outline, Point
from ..bench.sides import Side
from ..models import new_pool
from ..prepare.inputs import Prompt
from ..run.core import EngineCore
from ..run.scoring import contexts, full_prefill
from .reference import SHOWN, Bench, Check, Repeat, TeacherTally

ROWS_OFF = {"float32": 1e-3, "float64": 1e-9}
"""How far a drafter's row may be from the same row computed again."""


@dataclass(slots=True)
class Watch:
    """What was seen of all runs of a certificate, phase by phase.

    wrong: a line for every kind of fault, the first time. worst: of the drafter's rows, how far
    they are off, as a share of the largest number in them.
    """

    runs: int = 0
    phases: int = 0
    forwards: int = 0
    reads: int = 0
    forked: int = 0
    joined: int = 0
    compared: int = 0
    worst: float = 0.0
    wrong: dict[str, str] = field(default_factory=dict)

    def look(self, run: Run) -> None:
        """Pools are consistent, and hold what their branches need: nothing else, nothing less."""
        self.phases += 1
        self.joined += run.state == "continuous_decode"
        manager = run.board["branches"]
        target = run.board["kv"]
        for pool in run.board["branches"].pools:
            try:
                pool.check_integrity()
            except AssertionError as error:
                self.wrong.setdefault("integrity", f"{run.state}: {error}")
        if manager.beams is not None:
            return  # a search's rows are a tree, which its own tests look at
        expected = (
            sum(_rows(manager, request) for request in manager.requests)
            + manager.kv_cache.num_cached_rows
        )
        used = target.current_length
        if used != expected:
            self.wrong.setdefault("rows", f"{run.state}: {used} slots in use for {expected} rows")
        for branch in manager.active:
            positions = target.position[_slots(manager, target, branch)].tolist()
            # It must see the rows of its prefix, those of parts that it reads, and its own.
            ranges = [range(0, branch.request.prefix_length)]
            ranges += [range(part.start, part.length) for part in (*branch.reads, branch)]
            if sorted(positions) != sorted(chain.from_iterable(ranges)):
                self.wrong.setdefault("gap", f"{run.state}: {branch.name} has a gap among its rows")


def _rows(manager: Any, request: Request) -> int:
    """Rows of the target's pool that a request must have."""
    there = [b for b in request.branches if b.stage is Stage.RUNNING or b.retained]
    count = 0 if request.finished else sum(b.row_count for b in there)
    if request.stage in (Stage.PREFILL, Stage.OUTLINE, Stage.RUNNING, Stage.MERGING):
        count += request.prefix_length * len(manager.layout.rows_of(request.prefix_owner))
        count -= request.shared
    if request.stage is Stage.OUTLINE and request.root is not None:
        count += request.root.row_count
    return int(count)


def _slots(manager: Any, pool: KVCache, branch: Branch) -> list[int]:
    """Of the committed rows that a branch sees, the prefix's first."""
    (row,) = manager.layout.rows_of(branch.owner)
    path = reversed(manager.table.segments.lineage[branch.owner])
    return [slot for owner in path for slot in pool.slots_of(owner, row).tolist()]


def off_by(side: Side, run: Run, drafter: Drafter, branch: Branch) -> float:
    """The largest difference of any number in a branch's rows of a drafter's pool, as a share of
    the largest number; inf if rows are missing or too many.

    Valid right after that drafter read what was committed.
    """
    pool = drafter.kv
    models = side.session.models
    context = dict(contexts(branch.request, side.session.prompts))[branch]
    ids = [*context, *branch.tokens]
    rows = branch.length + drafter.reads_root
    slots = _slots(run.board["branches"], pool, branch)
    if pool.position[slots].tolist() != list(range(rows)):
        return float("inf")
    with torch.inference_mode():
        fresh = new_pool(drafter.model, rows, 1, models)
        taps = getattr(drafter.model, "tap_ids", ())
        features_QF = None
        if taps:
            output, _ = full_prefill(
                models.target, ids[:rows], models.dtype, models.device, taps=taps
            )
            features_QF = output.taps_QF
        ids_1Q = torch.tensor([ids[: rows + 1]], device=models.device)
        drafter.write_rows_(ids_1Q, rows, features_QF, fresh)
        expected = fresh.data[:, :, :, :rows]
        off = (pool.data[:, :, :, slots] - expected).abs().max() / expected.abs().max()
    return float(off.nan_to_num(nan=torch.inf))


def memory_checks(bench: Bench, watch: Watch) -> Iterator[Check]:
    """What was seen of the pools, phase by phase, in all runs of the gates."""
    wrong = list(watch.wrong.values())
    figures = {"runs": watch.runs, "phases": watch.phases, "faults": len(wrong)}
    text = f"pools and book agree after each of {watch.phases} phases of {watch.runs} runs"
    text += ", and pools are empty at the end"
    yield Check("memory/integrity", not wrong, figures, "; ".join([text, *wrong[:SHOWN]]))
    reads = {"reads": watch.reads, "forwards": watch.forwards}
    text = f"{watch.reads} host reads for {watch.forwards} forwards of the target"
    yield Check("memory/one host read per forward", watch.reads <= watch.forwards, reads, text)
    copied = bench.graph.layout.kind == "batching" or watch.forked == 0
    text = f"{watch.forked} bytes copied by forks"
    yield Check("memory/forks", copied, {"bytes": watch.forked}, text)
    if watch.compared:
        limit = ROWS_OFF[bench.dtype]
        rows = {"branches": watch.compared, "worst": watch.worst, "tolerance": limit}
        text = f"the drafter's rows of {watch.compared} branches in mid-run, newcomers among them,"
        text += f" are those of their text computed again: at most {watch.worst:.1e} apart"
        yield Check("memory/the drafter's rows", watch.worst <= limit, rows, text)


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
        """Every branch that was decoded, outlines too, with the token ids of its context."""
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

        return self.bench.repeat(rerun)

    def hold(self) -> TeacherTally:
        """All answers, compared with transformers."""
        tally = self.bench.tally()
        for request in self.requests:
            tally.hold(self.side, request, self.repeat)
        return tally

    def agree(self, expected: Sequence[Sequence[int]]) -> list[str]:
        """What is wrong with answers that should be these; what transformers says counts."""
        if len(self.branches) != len(expected):
            return [f"{len(self.branches)} branches, expected were {len(expected)}"]
        tally = self.bench.tally()
        ids = dict(self.answers())
        for branch, tokens in zip(self.branches, expected, strict=True):
            if branch not in ids or branch.finish not in (Finish.STOP, Finish.LENGTH):
                tally.wrong.append(f"{branch.name} is {branch.finish}: {branch.note}")
            elif branch.tokens != list(tokens):
                tally.hold_branch(branch, ids[branch], self.repeat)
        return tally.wrong


def probe(bench: Bench, trial: Trial, watch: Watch | None = None) -> ProbedRun:
    """Run a trial to its end and note in `watch` what is seen of it."""
    greedy = () if bench.graph.beam is not None else ("sampling.temperature=0",)
    dtype = trial.dtype or bench.dtype
    most = bench.extent.gate_tokens
    job = bench.changed(*greedy, *trial.sets, tokens=most, dtype=dtype)
    skeleton = job.program.graph.skeleton
    if skeleton is not None and trial.stops is not None:
        titles = TITLES[: min(trial.parts, skeleton.max_branches)]
        points = (
            Point(number, trial.expected, None, (), title=title)
            for number, title in enumerate(titles, 1)
        )
        job = replace(job, outline=Outline("plan", tuple(points), (), "ok"))
    side = bench.side(job)
    prompts = trial.prompts or bench.job.prompts[: trial.parts if skeleton is None else 1]
    requests = [side.session.request(prompt) for prompt in prompts]
    for request in requests:
        request.budget = request.budget if trial.tokens is None else trial.tokens
        request.stop_ids = request.stop_ids if trial.stops is None else trial.stops
    run = _drive(side, requests, watch or Watch())
    return ProbedRun(bench, trial, side, run, requests=tuple(requests))


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
    most = watch.compared + COMPARED if run.board["kv_draft"] is not None else 0

    def look() -> bool:
        if run.steps >= MOST_STEPS:
            raise RuntimeError(f"no end after {MOST_STEPS} transitions")
        if run.steps == 0:
            return True
        watch.look(run)
        if DRAFTED in ops and watch.compared < most:
            pooled = [part for part in run.board["drafter"].parts if part.kv is not None]
            pairs = ((drafter, branch) for drafter in pooled for branch in drafter.active)
            for drafter, branch in pairs:
                if not branch.reads:
                    watch.compared += 1
                    watch.worst = max(watch.worst, off_by(side, run, drafter, branch))
        ops.clear()
        return True

    while run.step(look):
        pass
    look()
    watch.runs += 1
    watch.reads += run.board["host"].reads
    watch.forked += sum(pool.ledger.bytes["fork"] for pool in pools)
    if places != [pool.data.data_ptr() for pool in pools]:
        watch.wrong.setdefault("moved", "a pool was allocated anew during a run")
    for used in filter(None, (pool.current_length - pool.idle_length for pool in pools)):
        watch.wrong.setdefault("left", f"{used} slots are in use after the end of a run")
    return run
