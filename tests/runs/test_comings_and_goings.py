"""Requests that come and are cancelled at any step, in few rows: nobody notices the others."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from helpers.support import (
    FIXED,
    FULL,
    SEED,
    Graphs,
    SizedBook,
    Tiny,
    check_rows,
    drive,
    requests_of,
    start,
)

from specsot.engine.prepare.inputs import Prompt
from specsot.engine.run.session import Session
from specsot.states.machine import Run
from specsot.states.request import Finish, Request
from specsot.states.text.outline import Outline, Point

CAPACITY = {"bim": 2000, "batching": 330}  # of a row: no plan needs more


class PlanBook(SizedBook):
    """Every request has its own plan, drawn from its question."""

    def plan(self, question: str) -> Outline:
        draw = random.Random(f"plan {question}")
        points = []
        for i in range(1, draw.randint(1, 6) + 1):
            deps = tuple(sorted({draw.randrange(1, i) for _ in range(draw.randrange(3)) if i > 1}))
            points.append(Point(i, draw.choice((1, 5, 20, 60, 170)), None, deps, f"Part {i}"))
        return Outline("plan", tuple(points), (), "ok")


def session_of(graph: str, tiny: Callable[..., Tiny], graphs: Graphs, most: int) -> Session:
    made = tiny("llama")
    sets = [f"layout.max_num_branches={most}", f"layout.kv_slots={CAPACITY[graph.split('_')[0]]}"]
    sets += FIXED if "eagle" in graph else ()
    book = PlanBook(made.models.target.vocab_size, "outline", ())
    return graphs.session(graph, made.models, book, budget=9, sets=sets)


def submit(run: Run, session: Session, key: str) -> None:
    """A request with a given plan of its own."""
    request = session.request(Prompt(key, key, max_new_tokens=3 + int(key) % 4 * 5))
    request.given_outline = session.prompts.plan(key)  # type: ignore[attr-defined]
    request.given_ids = list(session.prompts.outline_ids(request.given_outline.points))
    run.board["branches"].lifecycle.submit(request)


def alone(session: Session, key: str) -> list[Any]:
    run = start(session, [])
    submit(run, session, key)
    drive(run)
    return ends(requests_of(run)[0])


def ends(request: Request) -> list[Any]:
    return [(b.finish, list(b.tokens), list(b.accepted)) for b in request.all_branches()]


def busy(session: Session, seed: int) -> Run:
    """Six requests that come one after another; some are cancelled."""
    draw, run, keys = random.Random(seed), start(session, []), iter("012345")
    submit(run, session, next(keys))
    while not run.finished:
        comes = draw.random() < 0.15 and run.state != "idle"  # from where no way leads back
        if comes and (key := next(keys, None)) is not None:
            submit(run, session, key)
        if draw.random() < 0.04:
            run.board["branches"].table.cancel(draw.choice(requests_of(run)).key)
        run.advance()
        check_rows(run)
        assert run.steps < 3000
    return run


@pytest.fixture(scope="module")
def whole(tiny: Callable[..., Tiny], graphs: Graphs) -> Callable[..., list[Any]]:
    """whole(graph, key): what a request gives in a run of its own; the layouts share it."""

    @cache
    def make(drafter: str, key: str) -> list[Any]:
        return alone(session_of(f"bim_{drafter}", tiny, graphs, 8), key)

    return lambda graph, key: make(graph.split("_")[1], key)


@pytest.mark.parametrize("graph", FULL)
@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_nobody_notices_who_comes_and_who_is_cancelled(
    graph: str, most: int, tiny: Callable[..., Tiny], graphs: Graphs, whole: Any
) -> None:
    session = session_of(graph, tiny, graphs, most)
    for seed in (SEED * 10 + most, SEED * 10 + most + 5):
        run = busy(session, seed)
        for request in requests_of(run):
            assert request.finished
            if not request.cancelled:
                assert ends(request) == whole(graph, request.key), (seed, request.key)
                assert {b.finish for b in request.branches} == {Finish.LENGTH}
        for pool in run.board["branches"].pools:
            assert pool.needed_length == 0 and pool.ledger.bytes.keys() <= {
                "fork",
                "keep",
                "prefix",
            }
