"""Rows run out and the youngest makes way: whoever goes on later writes what it would have."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.drafters import KINDS, SETTINGS, drafting
from helpers.support import (
    FULL,
    SEED,
    Graphs,
    PlanBook,
    Tiny,
    drive,
    named,
    pairwise,
    requests_of,
    start,
    tokens_of,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.machine import Run
from specsot.states.requests.branch import Stage

Make = Callable[..., Tiny]
OPTIMISTIC, SMALL = "scheduler.admission=optimistic", "layout.capacity=320"
TEXTS = [Prompt(str(n), f"question {n}", max_new_tokens=15 + n * 5 % 11) for n in range(4)]
CHOICES = tuple((kind, SEED % len(SETTINGS[kind])) for kind in KINDS)
GRID: dict[str, tuple[Any, ...]] = {
    "drafter": CHOICES,
    "graph": ("bim_plain", "autoregressive"),
    "layout": ("bim", "batching"),
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
    book = LongBook(130, case["share"], stops if case["graph"] in FULL else ())
    own = [f"drafter.kind={kind}", *SETTINGS[kind][number], f"layout.kind={case['layout']}"]
    own += [f"sampling.temperature={case['temperature']}", "layout.max_active=4"]
    return graphs.session(case["graph"], drafting(made, kind), book, sets=(*own, *sets))


def force(run: Run, seed: int, chance: float) -> None:
    """Rows run out at any moment, in any layout."""
    scheduler, draw = run.board["branches"].scheduler, random.Random(seed)
    scheduler.admission.optimistic = True
    scheduler.admission.missing = lambda requests, active: int(draw.random() < chance)


def preemptions(run: Run) -> int:
    return int(run.board["branches"].preemption.count)


@pytest.mark.parametrize("case", pairwise(GRID, 21), ids=named)
def test_whoever_makes_way_at_any_moment_writes_the_same(
    case: dict[str, Any], tiny: Make, graphs: Graphs
) -> None:
    made = tiny("llama")
    free = drive(start(session_of(case, made, graphs), TEXTS), check=False)
    names = ("policy", "prefix_cache")
    sets = [f"scheduler.{name}={case[name]}" for name in names]
    sets.append(f"scheduler.max_tokens={case['chunk']}")
    run = start(session_of(case, made, graphs, *sets), TEXTS)
    force(run, SEED, 0.4)
    drive(run)
    assert preemptions(run) > 1
    assert tokens_of(run) == tokens_of(free)
    assert all(r.stage is Stage.DONE for r in requests_of(run))
    for pool in run.board["branches"].pools:
        assert pool.needed_length == 0


@pytest.mark.parametrize("kind", ("eagle3", "ngram"))
def test_a_pool_barely_larger_than_one_request(kind: str, tiny: Make, graphs: Graphs) -> None:
    """Reserved, nobody is ever interrupted; optimistic, more run side by side, and make way."""
    found, steps = [], []
    case = {"drafter": (kind, 0), "graph": "bim_plain", "layout": "bim", "share": "outline"}
    texts = [replace(one, max_new_tokens=70) for one in TEXTS[:2]]
    for sets in (["layout.capacity=2000"], [SMALL], [SMALL, OPTIMISTIC]):
        session = session_of(case | {"temperature": 0.0}, tiny("llama"), graphs, *sets, stops=())
        run = drive(start(session, texts), check=OPTIMISTIC in sets)
        found.append(tokens_of(run))
        steps.append(preemptions(run))
    assert found[0] == found[1] == found[2]
    assert steps[:2] == [0, 0] and steps[2] > 1
