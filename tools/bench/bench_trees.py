"""Which tree pays: acceptance and time per token over tree sizes, against plain decoding.

    python -m tools.bench.bench_trees --graph bim_eagle --prompts 8 --threads 2

Every prompt runs under every setting in turn, in one process, so that drifts of the machine hit
all settings alike. Times are of the whole run (outline and prefill included); the ratio is the
median over prompts of plain time per token / time per token, on the same tokens.
"""

import argparse
from collections import defaultdict
from statistics import median
from time import perf_counter

import torch

from specsot.engine.models import load_models
from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.prepare.files import open_graph
from specsot.engine.run.session import Prompt, Session

from ..embedded.heldout import probes

TREES = ((2, 2, 2), (3, 3, 2), (4, 3, 2), (4, 4, 2), (6, 4, 3), (8, 5, 3), (10, 5, 4), (16, 6, 4))


def sets(graph: str, tree: tuple[int, int, int] | None) -> tuple[str, ...]:
    if tree is None:
        return ("drafter.kind=none",)
    nodes, levels, top_k = tree
    return (f"drafter.nodes={nodes}", f"drafter.levels={levels}", f"drafter.top_k={top_k}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", default="bim_eagle")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    trees = (None, *TREES)
    sessions = [Session(open_graph(args.graph, sets=sets(args.graph, t)), models) for t in trees]
    questions = [probe.question for probe in probes("outline", args.prompts, args.seed)]
    ratios, taus = defaultdict(list), defaultdict(list)
    for question in [questions[0], *questions]:  # the first one warms up and is not counted
        base = 0.0
        for tree, session in zip(trees, sessions, strict=True):
            per_token, emitted = measure(session, question)
            base = base if tree is not None else per_token
            ratios[tree].append(base / per_token)
            taus[tree] += emitted
    print("nodes levels top_k | tau_step | speed against plain")
    for tree in trees:
        tau = sum(taus[tree]) / len(taus[tree])
        print(f"{tree or 'plain'!s:>18} | {tau:8.2f} | {median(ratios[tree][1:]):.2f}x")


def measure(session: Session, question: str) -> tuple[float, list[int]]:
    """Seconds per token of one run, and the tokens committed per branch and round."""
    run = session.start([Prompt("1", question)], lambda event: None)
    began = perf_counter()
    while not run.finished:
        run.advance()
    seconds = perf_counter() - began
    branches = [b for r in run.board["branches"].requests for b in r.all_branches()]
    emitted = [count for branch in branches for count in branch.emitted]
    tokens = sum(len(branch.tokens) for branch in branches)
    run.close()
    return seconds / tokens, emitted


if __name__ == "__main__":
    main()
