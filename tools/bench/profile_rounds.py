"""What a round takes: its wall time, time in tensor kernels, and the host's, in ops and outside.

    python -m tools.bench.profile_rounds --graph autoregressive --graph eagle --threads 1
    python -m tools.bench.profile_rounds --graph eagle --profile smollm2 --dtype bfloat16

Rounds are timed without a profiler, several runs of one prompt; then runs are profiled, where the
outermost calls of torch's kernels are added up, round by round. What the profiler itself takes, the
difference of the two, is spread evenly over the calls that it has noted, and taken off. Of both the
lower decile is shown: that of rounds that nothing else on the machine disturbed.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.opening import open_session
from specsot.engine.run.runner import recorded
from specsot.engine.run.session import Session

MARK = "round "
QUESTION = "Write about the history of tea. Plan a weekend trip."


class Timed(NamedTuple):
    """A round: nanoseconds, and those of them in ops."""

    wall: int
    in_ops: int


class Kernels(NamedTuple):
    """A round under the profiler: nanoseconds of the outermost kernels, how many there were, how
    many with those inside them, and nanoseconds by name."""

    nanos: float
    outer: int
    noted: int
    names: Counter[str]


def rounds_of(session: Session, profiled: bool) -> tuple[list[Timed], Any]:
    """The rounds of one run but the first two."""
    run, recorder = recorded(session, [Prompt("profile", QUESTION)], None)
    meter, found = recorder.meter, list[Timed]()
    with torch.inference_mode():
        while meter.rounds < 2 and not run.finished:
            run.advance()
        watched = profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext()
        with watched:
            began, in_ops, done = perf_counter_ns(), meter.in_ops, meter.rounds
            while not run.finished:
                with record_function(f"{MARK}{len(found)}") if profiled else nullcontext():
                    run.advance()
                if meter.rounds > done:
                    now = perf_counter_ns()
                    found.append(Timed(now - began, meter.in_ops - in_ops))
                    began, in_ops, done = now, meter.in_ops, meter.rounds
    run.close()
    return found, watched


def kernels_of(watched: Any, rounds: int) -> list[Kernels]:
    """What the profiler noted, by round."""
    nanos, outer, noted = [0.0] * rounds, [0] * rounds, [0] * rounds
    names = [Counter[str]() for _ in range(rounds)]
    for event in watched.events():
        depth, top = 0, event
        while top.cpu_parent is not None:
            depth, top = depth + 1, top.cpu_parent
        if "::" not in event.name or not top.name.startswith(MARK):
            continue
        if (number := int(top.name.removeprefix(MARK))) >= rounds:
            continue
        noted[number] += 1
        if depth == 1:
            nanos[number] += 1e3 * event.cpu_time_total
            outer[number] += 1
            names[number][event.name] += event.cpu_time_total
    return list(map(Kernels, nanos, outer, noted, names))


def low(values: Sequence[float]) -> float:
    """The lower decile."""
    return sorted(values)[len(values) // 10]


def show(session: Session, title: str, args: Namespace) -> None:
    """One graph's line, and its dearest kernels."""
    rounds_of(session, False)
    plain = [one for _ in range(args.runs) for one in rounds_of(session, False)[0]]
    slow, kernels = list[Timed](), list[Kernels]()
    for _ in range(args.runs):
        found, watched = rounds_of(session, True)
        slow += found
        kernels += kernels_of(watched, len(found))
    wall, in_ops = low([one.wall for one in plain]), low([one.in_ops for one in plain])
    noted, outer = median(one.noted for one in kernels), median(one.outer for one in kernels)
    each = max(low([one.wall for one in slow]) - wall, 0) / noted
    inside = low([one.nanos for one in kernels]) - each * (noted - outer / 2)
    numbers = (wall, inside, in_ops - inside, wall - in_ops)
    cells = " | ".join(f"{number / 1e6:.2f}" for number in numbers)
    print(f"| {title} | {cells} | {1 - inside / wall:.0%} | {outer:.0f} |", flush=True)
    if args.top:
        usual = sorted(kernels, key=lambda one: one.nanos)[: max(len(kernels) // 3, 1)]
        names = sum((one.names for one in usual), Counter[str]())
        for name, micros in names.most_common(args.top):
            print(f"    {micros / len(usual):9.1f} us  {name}")


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
    print("| graph | wall | kernels | host in ops | outside | host | kernels called |")
    print("|---|---|---|---|---|---|---|")
    for graph in args.graph:
        session = open_session(
            graph,
            profile=args.profile,
            dtype=args.dtype,
            weights=args.weights,
            threads=args.threads,
            max_new_tokens=args.tokens,
        )
        show(session, f"`{graph}` {args.dtype}, {args.threads} threads", args)


if __name__ == "__main__":
    main()
