"""What both layouts hold and cost for 1 to 8 branches: KV bytes, bytes at the fork, time per round.

    python -m tools.bench.bench_memory --threads 2

Every branch writes the same number of tokens behind the same prefix, so that the formula beside a
measurement is exact. Both layouts run in turn, in one process; times are medians over rounds with
all branches active, the best of `--repeats` runs.
"""

import argparse
from statistics import median
from time import perf_counter

import torch

from specsot.engine.models import load_models
from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.machine import Run
from specsot.states.request import Branch
from specsot.states.text.outline import Outline, Point

TITLES = ("Campsite", "Packing list", "Food and water", "Weather", "Safety", "Cost", "Time", "Fun")
QUESTION = "Plan a weekend camping trip."
ROUND = ("expand_root", "grow_tree", "verify")
GRAPHS = ("bim_plain", "batching_plain", "bim_eagle", "batching_eagle")


def outline_of(count: int) -> Outline:
    points = tuple(Point(i + 1, 100, None, (), TITLES[i]) for i in range(count))
    return Outline("plan", points, (), "ok")


def timed(run: Run, branches: int) -> list[float]:
    """Seconds of each round with all branches active."""
    rounds, current = [], 0.0
    while not run.finished:
        state, active = run.state, len(run.board["branches"].active)
        start = perf_counter()
        run.advance()
        current = current + perf_counter() - start if run.state in ROUND else 0.0
        if state == "verify" or run.state == "verify":
            if active == branches:
                rounds.append(current)
            current = 0.0
    return rounds


def formula(run: Run, layout: str, tokens: int, nodes: int) -> tuple[int, int]:
    """(slots held at most, slots copied at the fork), from lengths alone."""
    (request,) = run.board["branches"].requests
    branches: list[Branch] = request.branches
    hoisted, own = request.prefix_length, [len(b.prompt) + tokens - 1 + nodes for b in branches]
    if layout == "bim":
        return hoisted + sum(own), 0
    shared = request.root.length if request.root is not None else 0
    return len(branches) * hoisted + sum(own), (len(branches) - 1) * shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48, help="of every branch")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    print("graph | branches | held KB | formula KB | fork KB | formula KB | ms per round")
    for count in range(1, 9):
        rows: dict[str, list[str]] = {}
        best: dict[str, float] = {}
        for _ in range(args.repeats):
            for graph in GRAPHS:
                run, seconds = measure(graph, models, count, args.tokens)
                best[graph] = min(best.get(graph, 9e9), seconds)
                rows[graph] = described(run, graph, args.tokens)
        for graph in GRAPHS:
            print(" | ".join([graph, str(count), *rows[graph], f"{1000 * best[graph]:.2f}"]))


def measure(graph: str, models: object, count: int, tokens: int) -> tuple[Run, float]:
    program = open_graph(graph, sets=("drafter.nodes=4",) if "eagle" in graph else ())
    session = Session(program, models, max_new_tokens=tokens, outline=outline_of(count))
    run = session.start([Prompt("1", QUESTION)], lambda event: None)
    seconds = median(timed(run, count))
    (request,) = run.board["branches"].requests
    assert all(b.ended and len(b.tokens) == tokens for b in request.branches)
    return run, seconds


def described(run: Run, graph: str, tokens: int) -> list[str]:
    kv = run.board["kv"]
    layout = graph.partition("_")[0]
    held, copied = formula(run, layout, tokens, 0 if "plain" in graph else 4)
    kilo = kv.slot_bytes / 1000
    return [
        f"{kv.peak_length * kilo:.0f}",
        f"{held * kilo:.0f}",
        f"{kv.ledger.bytes['fork'] / 1000:.0f}",
        f"{copied * kilo:.0f}",
    ]


if __name__ == "__main__":
    main()
