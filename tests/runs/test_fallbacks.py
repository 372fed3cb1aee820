"""Outlines that are none, partial ones, and what an answer is put together from."""

from dataclasses import replace

import pytest
from helpers import support

from specsot.engine.models import load_models
from specsot.engine.prepare.files import open_graph
from specsot.engine.prepare.inputs import Prompt
from specsot.engine.prepare.job import embedded_folder
from specsot.engine.run.session import Session
from specsot.models.files import ModelError
from specsot.states.request import Finish


@pytest.mark.parametrize("share", ["outline", "prompt"])
@pytest.mark.parametrize(
    ("text", "status"),
    [("DIRECT", "direct"), ("no outline at all", "unparsable"), ("", "unparsable")],
)
def test_without_a_usable_outline_the_answer_is_an_ordinary_one(
    text: str, status: str, share: str, tiny: support.Make, graphs: support.Graphs
) -> None:
    made = tiny("qwen3")
    book = support.PlanBook(130, share, ())
    book.text = text
    run = support.run_all(graphs.session("bim_eagle", made.models, book), ["hello"])
    (request,) = support.requests_of(run)
    assert request.outline.status == status
    (branch,) = request.branches
    assert (len(branch.tokens), branch.budget) == (10, 10), "the run's own budget"
    assert sum(branch.accepted), "it is speculated like any other"
    support.check_lossless(run, book, made.reference, plain=False)


def test_a_budget_that_is_asked_for_binds_an_ordinary_answer_too(
    tiny: support.Make, graphs: support.Graphs
) -> None:
    book = support.PlanBook(130, "outline", ())
    book.text = "DIRECT"
    session = graphs.session("bim_eagle", tiny("qwen3").models, book)
    asked = [Prompt(str(most), "hello", max_new_tokens=most) for most in (5, 40)]
    run = support.drive(support.start(session, asked))
    lengths = [len(request.branches[0].tokens) for request in support.requests_of(run)]
    assert lengths == [5, 13], "skeleton.direct_tokens is the most"


def test_an_outline_and_a_direct_answer_have_their_own_budgets(
    tiny: support.Make, graphs: support.Graphs
) -> None:
    made = tiny("llama")
    sets = ("skeleton.max_tokens=9", "skeleton.direct_tokens=5")
    session = graphs.session("bim_eagle", made.models, made.book(stop_ids=()), sets=sets)
    request = support.requests_of(support.run_all(session, ["hello"]))[0]
    assert len(request.root.tokens) == 9 and request.root.finish is Finish.LENGTH
    assert [len(b.tokens) for b in request.branches] == [5]


def test_an_answer_has_its_sections_in_reading_order_with_their_reasons(
    tiny: support.Make, graphs: support.Graphs
) -> None:
    made = tiny("llama")
    book = made.book(stop_ids=())
    outline = support.outline_of(4, {2: (1,), 3: (2,)})
    session = graphs.session("bim_eagle", made.models, book, outline=outline, budget=6)
    run = support.run_all(session, ["hello"])
    (answer,) = run.answers
    assert [s.index for s in answer.sections] == [0, 1, 2, 3]
    assert [s.title for s in answer.sections] == [f"Part {i}" for i in range(1, 5)]
    assert [list(s.tokens) for s in answer.sections] == [b.tokens for b in support.branches_of(run)]
    assert {s.finish for s in answer.sections} == {"length"}
    assert answer.outline_tokens == (), "it was given"


def test_a_tokenizer_that_no_grammar_can_use_is_a_problem_of_the_model() -> None:
    models = load_models(embedded_folder("target"), None)
    with pytest.raises(ModelError, match="no usable end-of-turn tokens"):
        Session(open_graph("bim_plain"), replace(models, stop_ids=(10**6,)))
