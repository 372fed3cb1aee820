"""Every drafter in both layouts on the embedded model: acceptance, forwards, time against plain.

    python -m tools.bench.bench_drafters --prompts 6 --threads 2
    python -m tools.bench.bench_drafters --prompts 6 --threads 2 --set sampling.temperature=1.0

Held-out questions; every question runs under every graph in turn, in one process, so that drifts
of the machine hit all alike. `tau` counts tokens per branch and round, the acceptance rate drafts;
the ratio is the median over questions of plain time per token / time per token, the whole run
counted. The last column counts branch-rounds in which the two layouts accepted unequally.
"""

import argparse
from collections import defaultdict
from statistics import median
from time import perf_counter

import torch

from specsot.engine.models import Models, load_models, with_drafter
from specsot.engine.prepare.environment import embedded_folder
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.record.metrics import Meter
from specsot.engine.run.session import Session
from specsot.states.machine import Run
from specsot.states.trace import Event, OpRan

from ..embedded.heldout import probes

KINDS = {
    **{"eagle": "eagle3", "eagle2": "eagle2"},
    **{"dflash": "dflash", "ddtree": "dflash", "vanilla": "vanilla"},
}
NAMES = ("plain", *KINDS, "ngram")
TREE = ("drafter.nodes=4", "drafter.levels=3", "drafter.top_k=2")
SETS = {"eagle2": ("eagle", "drafter.kind=eagle2", *TREE)}  # no graph of its own in these layouts


def sessions(layouts: tuple[str, ...], sets: list[str]) -> dict[tuple[str, str], Session]:
    """A session for every drafter under every layout."""
    target = load_models(embedded_folder("target"), None)
    loaded: dict[str, Models] = {}
    found = {}
    for name in NAMES:
        kind = KINDS.get(name)
        if kind is not None and kind not in loaded:
            loaded[kind] = with_drafter(target, embedded_folder(kind), kind)
        models = target if kind is None else loaded[kind]
        graph, *own = SETS.get(name, (name,))
        for layout in layouts:
            program = open_graph(f"{layout}_{graph}", sets=[*own, *sets])
            found[name, layout] = Session(program, models)
    return found


def answer(session: Session, question: str, meter: Meter) -> tuple[float, Run]:
    """(seconds, the finished run); the meter counts its rounds."""

    def count(event: Event) -> None:
        if isinstance(event, OpRan) and event.op in ("branch.start_", "branch.commit_"):
            meter.forward_done(run.board["committed"], 0)

    run = session.start([Prompt("1", question, seed=1)], count)
    began = perf_counter()
    while not run.finished:
        run.advance()
    return perf_counter() - began, run


def rounds(run: Run) -> list[list[int]]:
    """Accepted drafts in each round of each branch, the outline's branch first."""
    return [b.accepted for r in run.board["branches"].requests for b in r.all_branches()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="a setting, as in specsot run")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    made = sessions(("bim", "batching"), args.set)
    questions = [p.question for p in probes("outline", args.prompts, args.seed)]
    meters: dict[tuple[str, str], Meter] = defaultdict(Meter)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    unequal: dict[str, int] = defaultdict(int)
    for number, question in enumerate([questions[0], *questions]):
        base: dict[str, float] = {}
        accepted: dict[tuple[str, str], list[list[int]]] = {}
        for (name, layout), session in made.items():
            meter = meters[name, layout] if number else Meter()  # the first one warms up
            seconds, run = answer(session, question, meter)
            branches = [b for r in run.board["branches"].requests for b in r.all_branches()]
            per_token = seconds / sum(len(b.tokens) for b in branches)
            base.setdefault(layout, per_token)
            accepted[name, layout] = rounds(run)
            if number:
                ratios[name, layout].append(base[layout] / per_token)
            run.close()
        for name in NAMES:
            one, other = (accepted[name, layout] for layout in ("bim", "batching"))
            for a, b in zip(one, other, strict=True):
                unequal[name] += sum(x != y for x, y in zip(a, b, strict=False)) if number else 0
    print("drafter | layout | tau_step | acceptance_rate | speed against plain | unequal rounds")
    for (name, layout), meter in meters.items():
        figures = f"{meter.tau_step:.2f} | {meter.acceptance_rate:.3f}"
        speed = median(ratios[name, layout])
        print(f"{name} | {layout} | {figures} | {speed:.2f}x | {unequal[name]}")


if __name__ == "__main__":
    main()
