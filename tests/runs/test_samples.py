"""`limits.n`: several answers are drawn behind one prompt, each as if it were alone."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.drafters import KINDS, drafting, settings_of
from helpers.support import (
    FixedBook,
    Graphs,
    Tiny,
    check_rows,
    drive,
    requests_of,
    run_all,
    start,
    taking_turns,
    tokens_of,
)
from helpers.toy_graph import told

from specsot.engine.prepare.files import open_graph
from specsot.engine.run.scoring import contexts, next_scores
from specsot.engine.run.session import Session
from specsot.states.request import Branch, Stage
from specsot.states.yaml.source import GraphError

Make = Callable[..., Tiny]
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


def drawn(made: Tiny, branch: Branch) -> list[int]:
    """What one sample draws with the coins of its number, put together from the ids alone."""
    context = [*branch.request.prefix, *branch.request.tail]
    places = range(len(branch.tokens))
    return [int(next_scores(made.models, branch, context, at).argmax()) for at in places]


@pytest.mark.parametrize(("kind", "layout"), taking_turns(["none", *KINDS], LAYOUTS))
def test_each_sample_is_what_its_coins_draw_alone(
    kind: str, layout: str, made: Tiny, graphs: Graphs
) -> None:
    more = () if kind == "none" else settings_of(kind, 1)
    run = run_all(session(graphs, made, layout, *more, kind=kind), [*PROMPTS])
    for request in requests_of(run):
        assert [b.index for b in request.branches] == [0, 1, 2, 3]
        assert len({tuple(b.tokens) for b in request.branches}) > 1, "all are the same"
        for branch in request.branches:
            assert branch.tokens == drawn(made, branch) and branch.tokens
        ids = [context for _, context in contexts(request, run.board["prompts"])]
        assert ids == [PROMPTS[request.question]] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_many_run_at_a_time_and_what_is_kept_changes_nothing(
    layout: str, made: Tiny, graphs: Graphs
) -> None:
    found = []
    for sets in (
        (),
        ("layout.max_num_branches=1",),
        ("layout.max_num_branches=2", "scheduler.max_num_batched_tokens=9"),
    ):
        for cache in ("true", "false"):
            sets = (*sets, f"scheduler.prefix_cache={cache}")
            run = run_all(session(graphs, made, layout, *sets), ["long", "long", "two"])
            found.append(tokens_of(run))
    assert all(one == found[0] for one in found)
    alone = tokens_of(run_all(session(graphs, made, layout, "limits.n=1"), ["long"]))
    assert alone["0"][0] == found[0]["0"][0], "the first one is the answer without others"


def test_the_prompt_is_computed_once_and_its_rows_are_held_once(made: Tiny, graphs: Graphs) -> None:
    run = start(session(graphs, made), ["long"])
    kv, computed = run.board["kv"], []
    append = kv.append_

    def counting(owner: Any, *more: Any) -> Any:
        computed.append(len(owner))
        return append(owner, *more)

    kv.append_ = counting
    drive(run, until=lambda run: len(run.board["branches"].active) == 4)
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
    kv = run.board["kv"]
    assert kv.ledger.bytes["fork"] == 3 * (len(PROMPTS["long"]) - 1) * kv.slot_bytes


@pytest.mark.parametrize("kind", ["none", "eagle3"])
def test_all_samples_that_end_with_the_first_leave_nobody_waiting(
    kind: str, made: Tiny, graphs: Graphs
) -> None:
    """Answers of one token: the first has ended before the others begin."""
    run = run_all(session(graphs, made, kind=kind, budget=1), [*PROMPTS])
    assert all(len(b.tokens) == 1 for r in requests_of(run) for b in r.branches)


def test_the_answer_shows_all_of_them(made: Tiny, graphs: Graphs) -> None:
    run = run_all(session(graphs, made), ["long"])
    (answer,), (request,) = run.board["answers"], requests_of(run)
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
