"""How well a simulation foretells a run: the same arrivals, served and simulated, per policy.

    python -m tools.bench.bench_simulated --requests 60 --rate 3

Mixed questions arrive at random moments and are served by the graph on the embedded models. What a
step costs is fitted to the first policy's run; then every policy is simulated with the lengths that
were really written, and both are printed side by side with the error of the simulation.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

from specsot.engine.run.engine import Engine, Handle
from specsot.engine.simulate.arrivals import Arrival
from specsot.engine.simulate.costs import StepCost, fit
from specsot.engine.simulate.figures import Served
from specsot.engine.simulate.world import Simulation
from specsot.states.request import Request
from specsot.states.trace import Event, OpRan

from .soak import mixed

FIGURES = ("tokens/s", "first p50", "first p95", "answer p50", "answer p95")


@dataclass
class Ran:
    """What came of a real run: figures, the arrivals as they were, what its trace would tell."""

    served: Served
    arrivals: list[Arrival] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


def serve(graph: str, sets: Sequence[str], questions: Sequence[str], moments: list[float]) -> Ran:
    """Serve the questions, each at its moment."""
    ran = Ran(Served())

    def see(event: Event) -> None:
        if isinstance(event, OpRan) and "step" in event.results:
            ran.records.append({"kind": "step", "t": perf_counter_ns()})
        if isinstance(event, OpRan) and "committed" in event.results:
            one = engine._run.board["committed"]
            told = {"rows": one.rows, "accepted": one.accepted, "committed": one.committed}
            record = {"kind": "round", "t": perf_counter_ns(), "kv": one.target_length}
            ran.records.append(record | told)

    engine = Engine(graph, threaded=False, threads=1, sets=sets, sink=see)
    engine.generate("warm up")
    ran.records.clear()
    live: dict[Handle, tuple[Request, float]] = {}
    begun, came, first = set[Request](), 0, engine.stats()
    start = perf_counter()
    while came < len(questions) or live:
        while came < len(questions) and perf_counter() - start >= moments[came]:
            handle = engine.submit(questions[came])
            assert handle.request is not None
            live[handle] = handle.request, moments[came]
            came += 1
        if not live:
            sleep(max(moments[came] - (perf_counter() - start), 0))
            continue
        engine.step()
        now = perf_counter() - start
        for handle, (request, at) in list(live.items()):
            if request not in begun and any(one.tokens for one in request.all_branches()):
                begun.add(request)
                ran.served.first.add(now - at)
            if handle.done:
                ran.served.whole.add(now - at)
                ran.arrivals.append(_arrival(request, at))
                del live[handle]
    last = engine.stats()
    ran.served.seconds, ran.served.requests = perf_counter() - start, len(questions)
    ran.served.tokens = last.tokens - first.tokens
    ran.served.preemptions = last.preempted
    ran.arrivals.sort(key=lambda one: one.at)
    engine.close()
    return ran


def _arrival(request: Request, at: float) -> Arrival:
    texts = tuple(max(len(one.tokens), 1) for one in request.branches)
    outline = len(request.root.tokens) if request.root is not None else 0
    return Arrival(at, len(request.prefix) + len(request.tail), texts, outline)


def figures(served: Served) -> list[float]:
    first, whole = served.first.told(), served.whole.told()
    speed = served.tokens / served.seconds
    return [speed, first["p50"], first["p95"], whole["p50"], whole["p95"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="bim_eagle")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--policies", nargs="+", default=["fcfs", "max_throughput", "sot_priority"])
    parser.add_argument("--set", dest="sets", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance, at, moments = random.Random(args.seed), 0.0, list[float]()
    for _ in range(args.requests):
        at += chance.expovariate(args.rate)
        moments.append(at)
    questions, cost, errors = mixed(args.requests, args.seed), StepCost(), list[float]()
    print(f"{'':30} " + " ".join(f"{name:>11}" for name in FIGURES))
    for number, policy in enumerate(args.policies):
        sets = [*args.sets, f"scheduler.policy={policy}"]
        ran = serve(args.graph, sets, questions, moments)
        if not number:
            cost = fit(ran.records)
        graph = Engine(args.graph, threaded=False, sets=sets).session.program.graph
        told = Simulation(graph, cost, policy, args.seed).run(ran.arrivals)
        real, mine = figures(ran.served), figures(told)
        off = [abs(b - a) / a for a, b in zip(real, mine, strict=True)]
        errors += off
        for what, values in (("real", real), ("simulated", mine)):
            print(f"{policy:16} {what:13} " + " ".join(f"{value:11.3f}" for value in values))
        print(f"{'':16} {'error':13} " + " ".join(f"{value:11.1%}" for value in off), flush=True)
    print(f"mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}; {cost}")


if __name__ == "__main__":
    main()
