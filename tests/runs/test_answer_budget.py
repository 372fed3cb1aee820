"""A budget of the whole answer: its outline and its parts share it."""

from typing import Any

import pytest
from helpers import support
from helpers.folds import book_of, combined_of
from helpers.folds import session as combining

from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.states.phases.parse import divided
from specsot.states.request import Finish, Request

PLAN = "PLAN\n1|50|-|-|One\n2|150|-|-|Two\n3|100|-|-|Three\nEND"


def asked(session: Session, most: int | None, **more: Any) -> EngineCore:
    prompt = Prompt("a", "hello", **more)
    request = session.request(prompt, RequestSettings(answer_tokens=most))
    run = session.start([request], lambda event: None)
    return support.drive(run)


def budgets(request: Request) -> list[int]:
    return [branch.budget for branch in request.all_branches()]


def written(request: Request) -> int:
    return sum(len(branch.tokens) for branch in request.all_branches())


def test_a_total_is_divided_by_weights_and_its_remainder_goes_to_the_first() -> None:
    assert divided(24, [50, 150, 100]) == [5, 11, 8]
    assert divided(11, [60, 60, 60]) == [4, 4, 3]
    assert divided(3, [990, 10, 10]) == [1, 1, 1]
    assert divided(2, [10, 10, 10]) == [1, 1, 1], "every part has a token"


@pytest.mark.parametrize("graph", ["bim_eagle", "batching_plain", "paged_eagle"])
def test_parts_share_the_answers_budget_by_their_lengths(
    graph: str, tiny: support.Make, graphs: support.Graphs
) -> None:
    made = tiny("llama")
    book = support.PlanBook(130, "outline", ())
    book.text = PLAN
    sets = ("skeleton.max_tokens=8",)
    session = graphs.session(graph, made.models, book, sets=sets)
    for most, expected in ((30, [8, 5, 10, 7]), (9, [4, 2, 2, 1]), (None, [8, 10, 10, 10])):
        run = asked(session, most)
        (request,) = support.requests_of(run)
        assert budgets(request) == expected
        assert written(request) == sum(expected) and request.spare_tokens >= 0
        assert all(branch.finish is Finish.LENGTH for branch in support.branches_of(run))
        support.check_lossless(run, book, made.reference, plain=False)
    (request,) = support.requests_of(asked(session, 300, max_new_tokens=6))
    assert budgets(request) == [8, 6, 6, 6], "the budget of a part holds too"


def test_a_budget_below_that_of_all_parts_reads_fewer_parts(
    tiny: support.Make, graphs: support.Graphs
) -> None:
    book = support.PlanBook(130, "outline", ())
    book.text = PLAN
    session = graphs.session("bim_eagle", tiny("llama").models, book)
    (request,) = support.requests_of(asked(session, 4))
    assert budgets(request) == [2, 1, 1] and request.outline.status == "partial"
    (request,) = support.requests_of(asked(session, 1))
    assert request.root is None and written(request) == 1, "there is no room for an outline"
    book.text = "DIRECT"
    (request,) = support.requests_of(asked(session, 7))
    assert budgets(request) == [3, 4], "a plain answer has what the outline leaves"


@pytest.mark.parametrize("graph", ["bim_blend_merge", "bim_attend_merge"])
def test_the_answer_that_combines_parts_has_half_of_the_budget(
    graph: str, tiny: support.Make, graphs: support.Graphs
) -> None:
    made = tiny("llama")
    for parts, expected in ((2, [7, 3, 10]), (1, [14])):
        session = combining(
            graphs,
            made,
            "blend.ratios=[0.3]" if "blend" in graph else "version=1",
            outline=support.outline_of(parts),
            book=book_of(made),
            graph=graph,
            budget=14,
        )
        (request,) = support.requests_of(asked(session, 20))
        assert [branch.budget for branch in request.branches] == expected
        if parts > 1:
            assert len(combined_of(request).tokens) == 10 and written(request) == 20
