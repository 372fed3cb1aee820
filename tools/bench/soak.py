"""Memory over many prompts: one process, one graph after another, every pool checked each phase.

    python -m tools.bench.soak --graph bim_eagle --graph batching_eagle --prompts 300

After each prompt the process's anonymous resident memory is noted. The least-squares slope over
the last two thirds of the prompts has to stay below 20 KB per prompt; else the exit code is 1."""

import argparse
import gc
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import linear_regression
from time import perf_counter

import torch

from specsot.engine.models import Models, load_models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.run.session import Prompt, Session

from ..embedded.heldout import probes

MOST = 20.0  # KB per prompt
KINDS = ("outline", "unseen", "unknown", "one_hop", "two_hop")
DIRECT = ("What is 3 plus 4?", "Hello!", "Name a colour.", "Who wrote this?", "Is water wet?")


def mixed(count: int, seed: int) -> list[str]:
    """Held-out questions of every kind, one after another, and direct ones between them."""
    kinds = [[p.question for p in probes(kind, count, seed)] for kind in KINDS]
    kinds.append([f"{DIRECT[i % len(DIRECT)]} ({i})" for i in range(count)])
    return list(chain.from_iterable(zip(*kinds, strict=False)))[:count]


def anonymous() -> int:
    """KB of anonymous resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no RssAnon")


def answer(session: Session, key: str, question: str) -> Counter[str]:
    """One run, its pools checked after every phase; finish reasons and phases."""
    run = session.start([Prompt(key, question)], lambda event: None)
    seen: Counter[str] = Counter()
    while not run.finished:
        run.advance()
        seen["phases"] += 1
        for pool in run.board["branches"].pools:
            pool.check_integrity()
    for pool in run.board["branches"].pools:
        assert pool.current_length == 0, "a finished run holds no slots"
    for one in run.board["answers"]:
        seen.update(section.finish for section in one.sections)
    run.close()
    return seen


def slope(kilobytes: Sequence[int]) -> float:
    """KB per prompt over the last two thirds."""
    last = kilobytes[len(kilobytes) // 3 :]
    return float(linear_regression(range(len(last)), last).slope)


def soak(graph: str, models: Models, questions: Sequence[str], budget: int) -> float:
    """All questions through one graph; prints what came of it."""
    session = Session(open_graph(graph), models, max_new_tokens=budget)
    noted, seen, began = [], Counter[str](), perf_counter()
    for number, question in enumerate(questions, 1):
        seen += answer(session, str(number), question)
        gc.collect()
        noted.append(anonymous())
    found = slope(noted)
    ends = ", ".join(f"{count} {name}" for name, count in sorted(seen.items()))
    print(
        f"{graph}: {len(questions)} prompts, {perf_counter() - began:.0f} s, {ends}\n"
        f"  RssAnon {noted[0]} -> {noted[-1]} KB, slope {found:+.2f} KB per prompt "
        f"(at most {MOST:.0f})"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", action="append", help="may be given several times")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = load_models(embedded_folder("target"), embedded_folder("eagle3"))
    questions = mixed(args.prompts, args.seed)
    if len(questions) < max(args.prompts, 6):
        parser.error(f"there are {len(questions)} such prompts, and at least 6 are needed")
    graphs = args.graph or ["bim_eagle", "batching_eagle"]
    slopes = [soak(graph, models, questions, args.max_new_tokens) for graph in graphs]
    raise SystemExit(any(found > MOST for found in slopes))


if __name__ == "__main__":
    main()
