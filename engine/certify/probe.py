"""Runs that are looked at after every phase, with stop ids and budgets of their own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...states.machine import Run
from ...states.requests.branch import Branch, Request, Stage
from ...states.text.outline import Outline, Point
from ...states.trace import Event, OpRan
from ..bench.sides import Side
from ..prepare.inputs import Prompt
from ..run.contexts import contexts
from .draft_rows import off_by
from .workbench import Bench

MOST_STEPS = 100_000  # transitions after which a run counts as hanging
COMPARED = 60  # branches of a probe whose drafter rows are computed again
TITLES = ("Goal", "Main parts", "Risks", "Summary", "Steps", "Time", "Cost", "Place")
FORWARD, DRAFTED = "target.forward_", "draft.expand_root_"


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

    def fault(self, kind: str, text: str) -> None:
        self.wrong.setdefault(kind, text)


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of `parts` branches: of one given outline, or of as many requests.

    sets: as of `--set`. tokens: the budget of every branch. stops: stop ids; None for the model's
    own. prompts: instead of the first ones of the certificate. own_outline: the model writes the
    outlines itself. Greedy, unless `sets` say otherwise.
    """

    sets: tuple[str, ...] = ()
    parts: int = 4
    tokens: int | None = None
    stops: frozenset[int] | None = frozenset()
    prompts: tuple[Prompt, ...] = ()
    own_outline: bool = False
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class ProbedRun:
    """A trial's run that came to its end."""

    bench: Bench
    trial: Trial
    side: Side
    run: Run
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


def probe(bench: Bench, trial: Trial, watch: Watch | None = None) -> ProbedRun:
    """Run a trial to its end and note in `watch` what is seen of it."""
    greedy = () if bench.job.program.graph.beam is not None else ("sampling.temperature=0",)
    job = bench.changed(*greedy, *trial.sets, tokens=bench.extent.gate_tokens, dtype=trial.dtype)
    skeleton = job.program.graph.skeleton
    outline = None
    if skeleton is not None and not trial.own_outline:
        outline = outline_of(min(trial.parts, skeleton.max_branches))
    side = bench.side(job, outline=outline)
    prompts = trial.prompts or bench.job.prompts[: trial.parts if skeleton is None else 1]
    requests = [side.session.request(prompt) for prompt in prompts]
    if trial.tokens is not None:
        requests = [replace(request, budget=trial.tokens) for request in requests]
    if trial.stops is not None:
        requests = [replace(request, stop_ids=trial.stops) for request in requests]
    run = _drive(side, requests, watch or Watch())
    return ProbedRun(bench, trial, side, run, tuple(requests))


def outline_of(count: int) -> Outline:
    """A given outline of so many parts, none of which waits for another."""
    points = tuple(Point(n, 60, None, (), TITLES[n - 1]) for n in range(1, count + 1))
    return Outline("plan", points, (), "ok")


def _drive(side: Side, requests: Sequence[Request], watch: Watch) -> Run:
    """To the end; looks at the run after every phase.

    Raises:
        RuntimeError: it does not come to an end.
    """
    drafts: list[bool] = []

    def sink(event: Event) -> None:
        if isinstance(event, OpRan):
            watch.forwards += event.op == FORWARD
            drafts.append(event.op == DRAFTED)

    board = side.session.board()
    for request in requests:
        board["branches"].submit(request)
    run, pools = Run(side.job.program, board, sink), _pools(board)
    places = [pool.data.data_ptr() for pool in pools]
    most = watch.compared + COMPARED
    while not run.finished:
        if run.steps >= MOST_STEPS:
            raise RuntimeError(f"no end after {MOST_STEPS} transitions")
        drafts.clear()
        run.advance()
        watch.phases += 1
        watch.joined += run.state == "continuous_decode"
        _look(run, watch)
        for branch in board["branches"].active if any(drafts) and watch.compared < most else ():
            if (off := off_by(side, run, branch)) is not None:
                watch.compared += 1
                watch.worst = max(watch.worst, off)
    watch.runs += 1
    watch.reads += board["host"].reads
    watch.forked += sum(pool.ledger.bytes["fork"] for pool in pools)
    if places != [pool.data.data_ptr() for pool in pools]:
        watch.fault("moved", "a pool was allocated anew during a run")
    for used in filter(None, (pool.current_length for pool in pools)):
        watch.fault("left", f"{used} slots are in use after the end of a run")
    return run


def _pools(board: dict[str, Any]) -> list[Any]:
    return [board[key] for key in ("kv", "kv_draft") if board[key] is not None]


def _look(run: Run, watch: Watch) -> None:
    """Pools are consistent, and hold what their branches need: nothing else, nothing less."""
    book = run.board["branches"]
    for pool in _pools(run.board):
        try:
            pool.check_integrity()
        except AssertionError as error:
            watch.fault("integrity", f"{run.state}: {error}")
    if book.beams is not None:
        return  # a search's rows are a tree, which its own tests look at
    expected = sum(_rows(book, request) for request in book.requests)
    used = run.board["kv"].current_length
    if used != expected:
        watch.fault("rows", f"{run.state}: {used} slots in use for {expected} rows")
    for branch in book.active:
        positions = _positions(book, run.board["kv"], branch)
        if positions != list(range(branch.length)):
            watch.fault("gap", f"{run.state}: {branch.name} has a gap among its rows")


def _rows(book: Any, request: Request) -> int:
    """Rows of the target's pool that a request must have."""
    own = sum(b.length - b.start for b in request.branches if b.stage is Stage.RUNNING)
    if request.stage in (Stage.OUTLINE, Stage.RUNNING):
        own += request.prefix_length * len(book.layout.rows_of(request.prefix_owner))
    if request.stage is Stage.OUTLINE and request.root is not None:
        own += request.root.length - request.root.start
    return int(own)


def _positions(book: Any, pool: Any, branch: Branch) -> list[int]:
    """Of the committed rows that a branch sees, increasing."""
    (row,) = book.layout.rows_of(branch.owner)
    own = np.isin(pool.owner, [branch.owner, branch.request.prefix_owner]) & pool.committed
    own &= np.arange(pool.slots) // pool.capacity == row
    return sorted(pool.position[own].tolist())


def drafted(branch: Branch) -> list[int]:
    """For each token of an answer: how deep in its tree it was drafted, 0 if the target drew it."""
    depths = [0]
    for accepted, emitted in zip(branch.accepted, branch.emitted, strict=True):
        depths += [depth if depth <= accepted else 0 for depth in range(1, emitted + 1)]
    return depths


def cut(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    """An answer up to its first stop token."""
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:end])
