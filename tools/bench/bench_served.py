"""What a step costs after many requests were served, and whether memory stays flat.

    python -m tools.bench.bench_served --requests 10000

One run of `autoregressive` that is given a new short request whenever one ends; finished ones are
handed over and forgotten. Processor time per request in each tenth of the run and the resident
memory are printed; the last line compares the last tenth with the second.
"""

import argparse
import resource
from pathlib import Path
from time import process_time

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.api import open_session

from .bench_requests import requests

AT_ONCE = 8


def resident() -> float:
    """MiB now; the peak where the system does not tell."""
    status = Path("/proc/self/statm")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--graph", default="autoregressive")
    parser.add_argument("--layout", default="bim")
    args = parser.parse_args()
    sets = [
        f"layout.kind={args.layout}",
        f"layout.max_num_branches={AT_ONCE}",
        "layout.kv_slots=512",
    ]
    session = open_session(args.graph, sets=sets, threads=1)
    run = session.start([Prompt("first", "?", max_new_tokens=1)], lambda event: None)
    manager, pool = run.board["branches"], requests(session, 64, 12, 4)
    submitted, served, tenth = 0, 0, args.requests // 10
    costs, memory, times = list[float](), list[float](), list[float]()
    while not run.finished:
        while len(manager.unfinished) < 2 * AT_ONCE and submitted < args.requests:
            one = pool[submitted % len(pool)]
            if submitted and submitted % len(pool) == 0:
                pool = requests(session, 64, 12, 4)
                one = pool[0]
            manager.submit(one)
            submitted += 1
        began = process_time()
        run.advance()
        times.append(process_time() - began)
        served += len(manager.table.forget_finished())
        if served >= tenth * (len(costs) + 1) and len(costs) < 10:
            costs.append(sum(times) / tenth * 1e3)
            memory.append(resident())
            print(
                f"{served:6} served: {costs[-1]:.2f} ms a request, {memory[-1]:.0f} MiB", flush=True
            )
            times = []
    change = costs[-1] / costs[1]
    print(f"last tenth / second tenth: {change:.3f}; memory {memory[-1] - memory[1]:+.1f} MiB")


if __name__ == "__main__":
    main()
