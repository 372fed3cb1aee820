"""A policy decides who starts when, and no token."""

from collections.abc import Callable

import pytest
from helpers.support import FULL, GRAPHS, Graphs, PlanBook, Tiny, drive, start, tokens_of

from specsot.engine.prepare.inputs import Prompt
from specsot.states.policies import POLICIES

TEXTS = [Prompt(str(n), f"question {n}", max_new_tokens=3 + n * 5 % 11) for n in range(6)]


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_policies_give_the_same_tokens(
    graph: str, tiny: Callable[..., Tiny], graphs: Graphs
) -> None:
    found, orders = [], []
    for policy in POLICIES:
        book = PlanBook(130, "outline", ())
        book.text = "PLAN\n1|50|-|-|One\n2|50|-|1|Two\n3|50|-|-|Three\nEND"
        sets = ("layout.max_num_branches=3", f"scheduler.policy={policy}")
        if graph in FULL and graph.startswith("bim"):
            sets = (*sets, "layout.kv_slots=420")
        run = start(graphs.session(graph, tiny("llama").models, book, sets=sets), TEXTS)
        order: list[str] = []
        while not run.finished:
            drive(run, until=lambda run, steps=run.steps: run.steps > steps)
            order += [key for key in begun(run) if key not in order]
        found.append(tokens_of(run))
        orders.append(order)
    assert found[0] == found[1] == found[2]
    assert orders[0] == [prompt.key for prompt in TEXTS] and orders[0] != orders[1]


def begun(run: object) -> list[str]:
    table = run.board["branches"].table  # type: ignore[attr-defined]
    return [request.key for request in table.open.values()]
