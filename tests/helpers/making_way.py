"""Runs in which rows run out, really or at any moment that a test wants."""

import random
from typing import Any

from helpers.drafters import KINDS, SETTINGS, drafting
from helpers.support import FULL, SEED, Graphs, PlanBook, Tiny, drive, start, tokens_of
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.machine import Run

OPTIMISTIC, SMALL = "scheduler.admission=optimistic", "layout.kv_slots=320"
TEXTS = [
    Prompt(str(n), f"question {n}", max_new_tokens=15 + n * 5 % 11, cache_salt="ab"[n % 2])
    for n in range(4)
]
CHOICES = tuple((kind, SEED % len(SETTINGS[kind])) for kind in KINDS)
GRID: dict[str, tuple[Any, ...]] = {
    "drafter": CHOICES,
    "graph": ("bim_plain", "autoregressive", "samples"),
    "layout": ("bim", "batching", "paged"),
    "share": ("outline", "prompt"),
    "policy": ("fcfs", "max_throughput", "sot_priority"),
    "chunk": ("7", "64", "1024"),
    "prefix_cache": ("true", "false"),
    "temperature": (0.0, 0.9),
}


class LongBook(PlanBook):
    """Prompts long enough to be kept."""

    text = "PLAN\n1|5|-|-|One\n2|4|-|1|Two\n3|5|-|-|Three\n4|3|-|-|Four\nEND"

    def ids(self, text: str, low: int, high: int) -> list[int]:
        more = 70 if text.startswith("prefix") else 0
        return super().ids(text, low + more, high + more)


def session_of(
    case: dict[str, Any], made: Tiny, graphs: Graphs, *sets: str, stops: tuple[int, ...] = (2,)
) -> Session:
    kind, number = case["drafter"]
    samples, graph = case["graph"] == "samples", case["graph"]
    book = LongBook(130, case["share"], stops if case["graph"] in FULL else ())
    own = [f"drafter.kind={kind}", *SETTINGS[kind][number], f"layout.kind={case['layout']}"]
    own += [f"sampling.temperature={case['temperature']}", "layout.max_num_branches=4"]
    if samples:  # of every prompt, which are drawn
        graph = "autoregressive"
        own += ["limits.n=3", "sampling.temperature=0.9"]
    return graphs.session(graph, drafting(made, kind), book, sets=(*own, *sets))


def force(run: Run, seed: int, chance: float) -> None:
    """Rows run out at any moment, in any layout."""
    scheduler, draw = run.board["branches"].scheduler, random.Random(seed)
    scheduler.admission.optimistic = True
    scheduler.admission.missing = lambda requests, active: int(draw.random() < chance)


def preemptions(run: Run) -> int:
    return int(run.board["branches"].lifecycle.preemptions)


def check_forced(case: dict[str, Any], made: Tiny, graphs: Graphs, seed: int) -> int:
    """The tokens of a run in which somebody makes way again and again are those of a free one; how
    often somebody did."""
    free = drive(start(session_of(case, made, graphs), TEXTS), check=False)
    sets = [f"scheduler.{name}={case[name]}" for name in ("policy", "prefix_cache")]
    sets.append(f"scheduler.max_num_batched_tokens={case['chunk']}")
    run = start(session_of(case, made, graphs, *sets), TEXTS)
    force(run, seed, 0.4)
    drive(run)
    assert tokens_of(run) == tokens_of(free)
    assert all(request.finished for request in run.board["branches"].requests)
    for pool in run.board["branches"].pools:
        assert pool.needed_length == 0
    return preemptions(run)
