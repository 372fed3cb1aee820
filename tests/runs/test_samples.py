"""`limits.n`: answers that are drawn behind one prompt; their tokens: test_axes.py."""

from typing import Any

import pytest
from helpers.drafters import drafting
from helpers.support import (
    FixedBook,
    Graphs,
    Make,
    Tiny,
    check_rows,
    drive,
    requests_of,
    run_all,
    start,
)
from helpers.toy_graph import told

from specsot.engine.prepare.files import open_graph
from specsot.engine.run.session import Session
from specsot.states.request import Stage
from specsot.states.yaml.source import GraphError

LAYOUTS = ("layout.kind=bim", "layout.kind=batching")
DRAWN = ("sampling.temperature=2.0", "limits.n=4")
PROMPTS = {"long": [3 + n % 11 for n in range(90)], "one": [7], "two": [9, 8]}


@pytest.fixture
def made(tiny: Make) -> Tiny:
    return tiny("llama", context=2.0)


def session(
    graphs: Graphs, made: Tiny, *sets: str, kind: str = "none", budget: int = 12
) -> Session:
    models = made.models if kind == "none" else drafting(made, kind)
    book, sets = FixedBook(PROMPTS), (*DRAWN, f"drafter.kind={kind}", *sets)
    return graphs.session("autoregressive", models, book, budget=budget, sets=sets)


def test_the_prompt_is_computed_once_and_its_rows_are_held_once(made: Tiny, graphs: Graphs) -> None:
    run = start(session(graphs, made), ["long"])
    kv, computed = run.manager.kv, []
    append = kv.append_

    def counting(owner: Any, *more: Any) -> Any:
        computed.append(len(owner))
        return append(owner, *more)

    kv.append_ = counting
    drive(run, until=lambda run: len(run.branches) == 4)
    check_rows(run)
    (request,) = requests_of(run)
    rows = sum(b.length - b.start for b in request.branches)
    assert kv.current_length == len(PROMPTS["long"]) - 1 + rows
    # one forward read the prompt; one went on with the first sample, and began the other three
    assert computed == [len(PROMPTS["long"]), 1 + 3]
    assert not sum(kv.ledger.moves.values())
    drive(run)
    assert all(branch.stage is Stage.DONE for branch in request.branches)


def test_in_rows_of_their_own_the_prompt_is_copied(made: Tiny, graphs: Graphs) -> None:
    run = run_all(session(graphs, made, LAYOUTS[1]), ["long"])
    kv = run.manager.kv
    assert kv.ledger.bytes["fork"] == 3 * (len(PROMPTS["long"]) - 1) * kv.slot_bytes


def test_the_answer_shows_all_of_them(made: Tiny, graphs: Graphs) -> None:
    run = run_all(session(graphs, made), ["long"])
    (answer,), (request,) = run.answers, requests_of(run)
    book = run.board["prompts"]
    assert answer.samples == tuple(book.decode(b.tokens) for b in request.branches)
    assert all(text in answer.text for text in answer.samples)
    assert [s.title for s in answer.sections] == ["sample"] * 4


@pytest.mark.parametrize(
    ("graph", "sets", "why"),
    [
        ("eagle", (), "temperature 0 gives the same answer every time"),
        ("bim_eagle", ("sampling.temperature=1",), "`skeleton` answers each prompt once"),
        ("beam", ("sampling.temperature=1",), "`beam` draws no tokens"),
    ],
)
def test_where_nothing_is_drawn_there_are_no_samples(
    graph: str, sets: tuple[str, ...], why: str
) -> None:
    with pytest.raises(GraphError) as caught:
        open_graph(graph, (*sets, "limits.n=3"))
    assert any(f"3 samples, but {why}" in line for line in told(caught.value))
