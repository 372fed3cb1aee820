"""What a round takes: its wall time, time in tensor kernels, and the host's, by state and op.

    python -m tools.bench.profile_rounds --graph autoregressive --graph eagle --threads 1
    python -m tools.bench.profile_rounds --graph eagle --profile smollm2 --dtype bfloat16

A kernel is an outermost call of torch's dispatcher, views and allocations among them; everything
else is the host's: Python, numpy, and torch's own way from Python to the dispatcher. Rounds are
timed without a profiler, several runs of one prompt; then runs are profiled. The profiler's time
for a call lies outside of what it notes of the call, but within that of the call around it: so much
is taken off for each inner call as a loop of one kernel, with and without the profiler, says that
it takes. Of times the lower decile is shown: rounds that nothing else on the machine disturbed."""

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session, open_session, recorded
from specsot.models.packed import Team
from specsot.states.machine import Event, OpRan

MARK, OP = "round ", "op "
OUTSIDE = "outside ops"
QUESTION = "Write about the history of tea. Plan a weekend trip."
CALLS, TRIES = 300, 7  # of the loop that shows what the profiler takes


@dataclass(slots=True)
class Timed:
    """A round without the profiler: nanoseconds, and those of them in each op, `state op`."""

    wall: int = 0
    ops: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Kernels:
    """A round under the profiler: nanoseconds of outermost kernels and how many, by op; nanoseconds
    by their name."""

    nanos: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    names: dict[str, float] = field(default_factory=dict)

    def add_(self, op: str, nanos: float, calls: int) -> None:
        """Kernels of an op, which may run several times in a round."""
        self.nanos[op] = self.nanos.get(op, 0.0) + nanos
        self.calls[op] = self.calls.get(op, 0) + calls


@dataclass(frozen=True, slots=True)
class Shares:
    """Nanoseconds of a usual round by `state op`, and outside of ops: the wall's, of which those of
    kernels, and how many of these; nanoseconds by a kernel's name."""

    parts: dict[str, tuple[float, float, float]]
    names: Counter[str]

    @property
    def wall(self) -> float:
        return sum(wall for wall, _, _ in self.parts.values())

    @property
    def kernels(self) -> float:
        return sum(nanos for _, nanos, _ in self.parts.values())

    @property
    def calls(self) -> float:
        return sum(count for _, _, count in self.parts.values())

    @property
    def host(self) -> float:
        """The host's share of the wall time."""
        return 1 - self.kernels / self.wall

    @property
    def outside(self) -> float:
        return self.parts[OUTSIDE][0]


@contextmanager
def compiled_noted() -> Iterator[None]:
    """Compiled functions are noted by the profiler as torch's kernels are."""
    run = Team.run

    def noted(team: Team, function: Callable[[int, int], None], arguments: Any) -> None:
        name = "run_layers" if "layers" in arguments.dtype.names else "multiply"
        with record_function(f"specsot::{name}"):
            run(team, function, arguments)

    with patch.object(Team, "run", noted):
        yield


def rounds_of(session: Session, profiled: bool) -> tuple[list[Timed], Any]:
    """The rounds of one run but the first two, and the profiler."""
    run, recorder = recorded(session, [Prompt("profile", QUESTION)], None)
    meter, found, told, now = recorder.meter, list[Timed](), run.sink, Timed()

    def sink(event: Event) -> None:
        told(event)
        if isinstance(event, OpRan):
            name = f"{event.state} {event.op}"
            now.ops[name] += event.nanos
            if profiled:
                with record_function(OP + name):  # the kernels before it were this op's
                    pass

    with torch.inference_mode():
        while meter.rounds < 2 and not run.finished:
            run.advance()
        run.sink = sink
        watched = profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext()
        with watched, compiled_noted() if profiled else nullcontext():
            began, done = perf_counter_ns(), meter.rounds
            while not run.finished:
                with record_function(f"{MARK}{len(found)}") if profiled else nullcontext():
                    run.advance()
                if meter.rounds > done:
                    now.wall = perf_counter_ns() - began
                    found.append(now)
                    now, done = Timed(), meter.rounds
                    began = perf_counter_ns()
    run.close()
    return found, watched


def kernels_of(events: Iterable[Any], rounds: int, cost: float) -> list[Kernels]:
    """What the profiler noted, by round.

    Args:
        cost: nanoseconds that the profiler takes for a call within another one."""
    found = [Kernels() for _ in range(rounds)]
    for move in events:
        if move.cpu_parent is not None or not move.name.startswith(MARK):
            continue
        if (number := int(move.name.removeprefix(MARK))) >= rounds:
            continue
        one, nanos, calls = found[number], 0.0, 0
        for event in sorted(move.cpu_children, key=lambda event: event.time_range.start):
            if event.name.startswith(OP):
                one.add_(event.name.removeprefix(OP), nanos, calls)
                nanos, calls = 0.0, 0
            elif "::" in event.name:
                own = max(1e3 * event.cpu_time_total - cost * sum(1 for _ in inner(event)), 0.0)
                nanos, calls = nanos + own, calls + 1
                one.names[event.name] = one.names.get(event.name, 0.0) + own
        one.add_(OUTSIDE, nanos, calls)
    return found


def inner(event: Any) -> Iterator[Any]:
    """All calls within a call."""
    for child in event.cpu_children:
        yield child
        yield from inner(child)


def profiler_cost() -> float:
    """Nanoseconds that the profiler takes for a call."""
    some = torch.ones(64)

    def loop() -> float:
        began = perf_counter_ns()
        for _ in range(CALLS):
            torch.ones_like(some)
        return (perf_counter_ns() - began) / CALLS

    def least(measure: Callable[[], float]) -> float:
        return min(measure() for _ in range(TRIES))

    plain = least(loop)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        slow = least(loop)
    each = sum("::" in event.name for event in watched.events()) / (CALLS * TRIES)
    return max(slow - plain, 0.0) / each


def low(values: Sequence[float]) -> float:
    """The lower decile."""
    return sorted(values)[len(values) // 10]


def shares_of(session: Session, runs: int) -> Shares:
    """A usual round of a session, from so many runs with the profiler and without."""
    rounds_of(session, False)
    plain = [one for _ in range(runs) for one in rounds_of(session, False)[0]]
    cost, kernels = profiler_cost(), list[Kernels]()
    for _ in range(runs):
        found, watched = rounds_of(session, True)
        kernels += kernels_of(watched.events(), len(found), cost)
    for one in plain:
        one.ops[OUTSIDE] = one.wall - sum(one.ops.values())
    rounds = Counter(name for one in plain for name in one.ops)
    usual = [name for name, count in rounds.items() if 2 * count > len(plain)]  # not who admits
    parts = {
        name: (
            low([one.ops[name] for one in plain if name in one.ops]),
            low([one.nanos[name] for one in kernels if name in one.nanos]),
            median(one.calls[name] for one in kernels if name in one.calls),
        )
        for name in usual
    }
    quiet = sorted(kernels, key=lambda one: sum(one.nanos.values()))[: max(len(kernels) // 3, 1)]
    names = Counter[str]()
    for one in quiet:
        names.update({name: nanos / len(quiet) for name, nanos in one.names.items()})
    return Shares(parts, names)


def lines(title: str, found: Shares, top: int) -> Iterator[str]:
    """A graph's row, and the rows of its parts; then its dearest kernels."""
    yield row(title, found.wall, found.kernels, found.calls)
    for name, part in found.parts.items():
        yield row(f"- `{name}`", *part)
    for name, nanos in found.names.most_common(top):
        yield f"    {nanos / 1e3:9.1f} us  {name}"


def row(title: str, wall: float, kernels: float, calls: float) -> str:
    """A line of the table."""
    cells = " | ".join(f"{nanos / 1e6:.3f}" for nanos in (wall, kernels, wall - kernels))
    return f"| {title} | {cells} | {1 - kernels / max(wall, 1):.0%} | {calls:.0f} |"


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graph", action="append", required=True)
    parser.add_argument("--profile")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", default="full")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--top", type=int, default=0, help="so many of the dearest kernels")
    args = parser.parse_args()
    print("| graph | wall, ms | kernels | host | host's share | kernels called |")
    print("|---|---|---|---|---|---|")
    for graph in args.graph:
        session = open_session(
            graph,
            profile=args.profile,
            dtype=args.dtype,
            weights=args.weights,
            threads=args.threads,
            max_new_tokens=args.tokens,
        )
        title = f"`{graph}` {args.dtype}, {args.threads} threads"
        for line in lines(title, shares_of(session, args.runs), args.top):
            print(line, flush=True)


if __name__ == "__main__":
    main()
