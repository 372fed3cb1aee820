"""The tables of docs/cluster_simulated.md, on standard output.

    python -m tools.bench.bench_cluster scale|tp|load|links|here

Every line is what `specsot simulate --cluster` gives with the settings that stand above its table.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

from specsot.engine.prepare.files import open_graph
from specsot.engine.simulate.arrivals import Workload, arrivals
from specsot.engine.simulate.cluster import ClusterSetup, ClusterSimulation
from specsot.engine.simulate.costs import LINKS, SHAPES, GroupCost, ModelShape, StepCost
from specsot.engine.simulate.figures import ClusterFigures

# An 8B model in bfloat16 on an H100: 16 GB of weights at 3.35 TB/s and half a millisecond, 16 Gflop
# a row at 400 Tflop/s, 131 kB of keys and values a slot.
LARGE = StepCost(step=0.2, forward=5.3, row=0.04, branch=0.02, slot=0.00004)
# The embedded model on one core, as tools/bench/bench_ranks.py found it beside `loopback`.
SMALL = StepCost(step=0.0, forward=2.5, row=0.17, branch=0.0, slot=0.0)
EMBEDDED = ModelShape(8, 256, 2 * 8 * 2 * 64 * 4, 4096, 4)
SETS = ("layout.max_num_branches=64", "layout.kv_slots=40000", "limits.max_new_tokens=512")
ANSWERS = Workload(prompt=(50, 200), answer=(60, 250), outline=(30, 60), parts=(2, 6))
SHORT = Workload((50, 200), (16, 64), (20, 40), (2, 6), stems=100, shared=1024)
LONG = Workload(prompt=(4000, 4000), answer=(60, 250), outline=(30, 60), parts=(4, 4))


def simulated(setup: ClusterSetup, work: Workload, when: str, count: int) -> ClusterFigures:
    """One cluster; `when` as for `--arrivals`, of the whole of it."""
    graph = open_graph("bim_plain", sets=SETS).graph
    world = ClusterSimulation(graph, LARGE, "sot_priority", setup, seed=1)
    return world.run(arrivals(when, count, work, seed=1))


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> Iterator[str]:
    yield line(*cells)
    yield line(*["---"] * len(cells))


def waits(served: ClusterFigures) -> tuple[str, str]:
    """First token in milliseconds, whole answer in seconds: p50 / p95."""
    first, whole = served.first.document(), served.whole.document()
    return (
        f"{1e3 * first['p50']:.0f} / {1e3 * first['p95']:.0f}",
        f"{whole['p50']:.2f} / {whole['p95']:.2f}",
    )


def scale() -> Iterator[str]:
    """The same load for each worker, whatever their number; and all requests at one moment."""
    yield from head(
        "workers", "parts", "first, ms", "answer, s", "hits", "at once: tokens/s", "of one"
    )
    one = 0.0
    for workers in (1, 10, 100, 1000):
        for together in (True, False):
            setup = ClusterSetup(workers, 1, LINKS["100gbe"], SHAPES["llama-8b"], together)
            count = max(20 * workers, 400)
            served = simulated(setup, SHORT, f"poisson:{8 * workers}", count)
            burst = simulated(setup, SHORT, f"bursts:1:{20 * workers}", 20 * workers)
            speed = burst.tokens / burst.whole.at(1.0)
            one = one or speed
            told = *waits(served), f"{served.hit_rate:.0%}", f"{speed:.0f}", f"{speed / one:.1f}"
            yield line(workers, "together" if together else "spread", *told)


def grouped(work: Workload, rate: float, links: tuple[str, ...]) -> Iterator[str]:
    yield from head("tp", "link", "first, ms", "answer, s", "tokens/s", "busy", "a regroup, ms")
    for tp in (1, 2, 4, 8):
        for name in links if tp > 1 else links[:1]:
            setup = ClusterSetup(8, tp, LINKS[name], SHAPES["llama-8b"])
            served = simulated(setup, work, f"poisson:{rate}", 200)
            regroup = 1e3 * served.regroup_seconds / max(served.regroups, 1)
            speed, busy = served.tokens / served.seconds, served.document()["busy"]
            shown = f"{regroup:.2f}" if tp > 1 else ""
            yield line(tp, name, *waits(served), f"{speed:.0f}", f"{busy:.0%}", shown)


def tp() -> Iterator[str]:
    """Eight workers with little to do."""
    return grouped(ANSWERS, 0.5, ("nvlink", "100gbe", "10gbe"))


def load() -> Iterator[str]:
    """Eight workers with much to do."""
    return grouped(ANSWERS, 16.0, ("nvlink", "100gbe"))


def links() -> Iterator[str]:
    """Prefixes of 4 000 tokens, half a gigabyte each, over links: spread, or by four."""
    yield from head(
        "link", "a regroup of 4, ms", "sent, ms", "tp 1: answer, s", "sent", "tp 4: answer, s"
    )
    for name in ("nvlink", "100gbe", "10gbe"):
        link, size = LINKS[name], 4000 * SHAPES["llama-8b"].kv_bytes
        both = [
            simulated(ClusterSetup(8, tp, link, SHAPES["llama-8b"]), LONG, "poisson:0.5", 60)
            for tp in (1, 4)
        ]
        times = f"{1e3 * link.all_gather(size, 4):.1f}", f"{1e3 * link.send(size):.1f}"
        yield line(name, *times, waits(both[0])[1], both[0].sent, waits(both[1])[1])


def here() -> Iterator[str]:
    """Forwards of two ranks over loopback, as they should be by the same model."""
    cost = GroupCost.of_steps(SMALL, 2, LINKS["loopback"], EMBEDDED, 1)
    yield from head("rows", "alone, ms", "two ranks, ms", "of that in collectives")
    for rows in (1, 8, 32, 256, 1024):
        alone, both = 1e3 * SMALL.seconds(rows, 1, 0), 1e3 * cost.seconds(rows, 1, 0)
        yield line(rows, f"{alone:.1f}", f"{both:.1f}", f"{1e3 * cost.collectives(rows, 1):.1f}")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "scale": scale,
    "tp": tp,
    "load": load,
    "links": links,
    "here": here,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=TABLES)
    for one in TABLES[parser.parse_args().table]():
        print(one, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
