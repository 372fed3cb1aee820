"""Room is checked before work starts, in the pool and in the model's context; answers' budgets."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import support
from helpers.folds import book_of, combined_of
from helpers.folds import session as combining
from helpers.support import FULL, GRAPHS, PLAIN, Tiny

from specsot.engine.prepare.inputs import Prompt, RequestSettings
from specsot.engine.run.core import EngineCore
from specsot.engine.run.session import Session
from specsot.ops.kv.pool import FREE, KVCache, PoolFullError
from specsot.states.admission import request_slots
from specsot.states.phases.parse import divided
from specsot.states.request import Finish, Request
from specsot.states.text.tokens import PromptTokens

# -- capacity ----------------------------------------------------------------------------------


# shared: drafted tokens of all branches together
JUST = [(graph, layout, 0) for graph in PLAIN for layout in ("bim", "batching", "paged")]
JUST += [("eagle", layout, shared) for layout in ("bim", "batching", "paged") for shared in (4, 9)]


@pytest.mark.parametrize(("graph", "layout", "shared"), [*JUST, *((g, "", 0) for g in FULL)])
def test_what_just_fits_runs_and_one_slot_less_refuses_it(
    graph: str, layout: str, shared: int, made: support.Tiny
) -> None:
    nodes = min(6, shared or 6) if "eagle" in graph else 0
    book = made.book(stop_ids=())
    sets = (*(support.FIXED if nodes else ()), *([f"layout.kind={layout}"] if layout else ()))
    sets = (*sets, *(["layout.max_num_branches=1"] if layout else ()))
    sets = (*sets, *([f"drafter.rows_per_round={shared}"] if shared else ()))
    wide = support.outlined(made, graph, parts=3, sets=sets)
    needed = request_slots(support.requests_of(wide)[0]) + nodes + 1
    if graph in PLAIN:
        assert needed == len(book.plain("hello")) + 10 + nodes + 1
    for capacity in (needed, needed - 1):
        fixed = (*sets, f"layout.kv_slots={capacity}")
        session = support.graphs.session(
            graph, made.models, book, outline=support.outline_of(3), sets=fixed
        )
        run = support.run_all(session, ["hello"])
        if capacity == needed:
            assert support.tokens_of(run) == support.tokens_of(wide)
            continue
        (branch,) = support.branches_of(run)
        assert branch.finish is Finish.REFUSED and branch.tokens == []
        assert branch.note == f"needs {needed} slots, the pool has {capacity}"
        assert run.manager.kv.peak_length == 0, "nothing was computed for it"
        assert run.answers[0].sections[0].finish == "refused"


@pytest.mark.parametrize("graph", FULL)
def test_a_branch_that_just_fits_runs_and_one_slot_more_refuses_it_alone(
    graph: str, made: support.Tiny
) -> None:
    """Capacity is counted after the outline was read, for every branch by itself."""
    nodes = 6 if "eagle" in graph else 0
    book = support.SizedBook(130, "outline", ())
    prefix, tail = book.skeleton("hello")
    given = book.outline_ids(support.outline_of(3).points)
    shared = len(prefix) + len(tail) + len(given)
    capacity, budget = shared + 160, 10
    fits = capacity - shared - book.hoist - budget - nodes - 1
    session = support.graphs.session(
        graph,
        made.models,
        book,
        outline=support.outline_with((7, fits, fits + 1)),
        budget=budget,
        sets=(*(support.FIXED if nodes else ()), f"layout.kv_slots={capacity}"),
    )
    run = support.run_all(session, ["hello"])
    small, exact, large = support.branches_of(run)
    for branch, context in support.contexts(support.requests_of(run)[0], book, False)[:2]:
        made.reference.check(branch, context, ())
    assert (small.finish, exact.finish) == (Finish.LENGTH, Finish.LENGTH)
    assert large.finish is Finish.REFUSED and large.tokens == []
    assert large.note == f"needs {capacity + 1} slots, the pool has {capacity}"


SHARED = ("drafter.rows_per_round=9",)  # all branches' drafted tokens together
FILLED = [(name, ()) for name in GRAPHS] + [(name, SHARED) for name in GRAPHS if "eagle" in name]


@pytest.mark.parametrize(("graph", "sets"), FILLED)
def test_a_pool_may_be_filled_to_its_last_slot(
    graph: str, sets: tuple[str, ...], made: support.Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = made.book(stop_ids=())
    session = support.graphs.session(
        graph, made.models, book, outline=support.outline_of(4), sets=("layout.kv_slots=600", *sets)
    )
    peaks = _watch_rows(monkeypatch)
    free = support.run_all(session, ["hello"])
    need = peaks[id(free.manager.kv)].copy()
    assert np.count_nonzero(need) == (4 if "batching" in graph else 1), need
    for less in (0, 1):
        run = support.start(session, ["hello"])
        _occupy_(run.manager.kv, 600 - need + less)
        if less:
            with pytest.raises(PoolFullError):
                support.drive(run, check=False)
        else:
            support.drive(run, check=False)
            assert support.tokens_of(run) == support.tokens_of(free)
            assert peaks[id(run.manager.kv)].tolist() == [600] * len(need)


def _watch_rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    append_, peaks = KVCache.append_, dict[int, Any]()

    def noted(kv: KVCache, *args: Any) -> Any:
        slots = append_(kv, *args)
        used = (kv.owner != FREE).reshape(kv.rows, kv.capacity).sum(1)
        peaks[id(kv)] = np.maximum(peaks.get(id(kv), used), used)
        return slots

    monkeypatch.setattr(KVCache, "append_", noted)
    return peaks


def _occupy_(pool: KVCache, counts: Any) -> None:
    assert (pool.owner == FREE).all()
    draw = np.random.default_rng(1)
    for row, count in enumerate(counts):
        taken = draw.permutation(pool.capacity)[:count]
        pool._label_(row * pool.capacity + taken, 10_000)
    pool.current_length = 0  # of this run


# -- the model's context -----------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_budget_beyond_the_models_context_is_cut_to_it_and_reported(
    graph: str, tiny: support.Make
) -> None:
    """The cut comes first: what the model can never write needs no slots."""
    made = tiny("llama", max_positions=90)
    book = made.book(stop_ids=())
    session = support.graphs.session(
        graph, made.models, book, outline=support.outline_of(2), budget=100_000
    )
    run = support.run_all(session, ["hello"])
    support.check_lossless(run, book, made.reference, graph in PLAIN)
    for branch, context in support.contexts(support.requests_of(run)[0], book, graph in PLAIN):
        assert len(context) + len(branch.tokens) == 90
        assert branch.finish is Finish.LENGTH
        assert branch.note == "cut to the model's 90"


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_prompt_without_room_for_one_token_is_refused_and_others_run(
    graph: str, tiny: support.Make
) -> None:
    made = tiny("llama", max_positions=90)
    book = made.book(stop_ids=())
    book.skeleton = _long_for("long", 60, 30, book.skeleton)
    book.plain = lambda question, documents: operator.add(*book.skeleton(question, documents))
    session = support.graphs.session(graph, made.models, book, budget=5)
    run = support.run_all(session, ["long", "hello"])
    refused, fine = support.requests_of(run)
    assert refused.branches[0].finish is Finish.REFUSED
    assert refused.branches[0].note == "prompt of 90 tokens, the model takes 90"
    assert [b.finish for b in fine.branches] == [Finish.LENGTH]


def _long_for(question: str, prefix: int, tail: int, otherwise: Callable[..., Any]) -> Any:
    def skeleton(text: str, documents: PromptTokens) -> tuple[PromptTokens, PromptTokens]:
        long = PromptTokens((5,) * prefix), PromptTokens((6,) * tail)
        return long if text == question else otherwise(text)

    return skeleton


@pytest.mark.parametrize("share", ["outline", "prompt"])
def test_a_branch_prompt_without_room_is_refused_by_name(share: str, tiny: support.Make) -> None:
    made = tiny("llama", max_positions=120)
    book = support.SizedBook(130, share, ())
    outline = support.outline_with((10, 120))
    session = support.graphs.session("bim_eagle", made.models, book, outline=outline)
    run = support.run_all(session, ["hello"])
    short, long = support.branches_of(run)
    assert short.finish is Finish.LENGTH
    assert long.finish is Finish.REFUSED
    assert long.note.startswith("context of ")
    assert long.note.endswith(" tokens, the model takes 120")


@pytest.mark.parametrize("graph", FULL)
def test_a_direct_answer_that_can_never_fit_is_refused_with_the_numbers(
    graph: str, made: support.Tiny
) -> None:
    book = support.PlanBook(130, "outline", ())
    sets = ("skeleton.direct_tokens=380", "layout.kv_slots=400", "layout.max_num_branches=2")
    session = support.graphs.session(
        graph, made.models, book, budget=None, sets=(*sets, "limits.max_new_tokens=10")
    )
    (branch,) = support.branches_of(support.run_all(session, ["hello"]))
    assert branch.finish is Finish.REFUSED and branch.tokens == []
    root = support.requests_of(support.run_all(session, ["hello"]))[0].root
    nodes = 10 if "eagle" in graph else 0
    context = root.start + len(root.prompt) + root.num_cached_tokens + len(branch.prompt)
    assert branch.note == f"needs {context + 380 + nodes + 1} slots, the pool has 400"


@pytest.mark.parametrize("graph", FULL)
def test_a_direct_answer_without_room_in_the_models_context_is_refused(
    graph: str, tiny: support.Make
) -> None:
    made = tiny("llama", max_positions=60)
    book = support.PlanBook(130, "outline", ())
    session = support.graphs.session(graph, made.models, book, sets=("skeleton.max_tokens=60",))
    run = support.run_all(session, ["hello"])
    (branch,) = support.branches_of(run)
    assert branch.finish is Finish.REFUSED and branch.tokens == []
    assert branch.note.startswith("context of ") and branch.note.endswith("the model takes 60")
    root = support.requests_of(run)[0].root
    assert root.note == "cut to the model's 60" and root.finish is Finish.LENGTH


# -- budgets of whole answers ---------------------------------------------------------------------

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
def test_parts_share_the_answers_budget_by_their_lengths(graph: str, made: Tiny) -> None:
    book = support.PlanBook(130, "outline", ())
    book.text = PLAN
    sets = ("skeleton.max_tokens=8",)
    session = support.graphs.session(graph, made.models, book, sets=sets)
    for most, expected in ((30, [8, 5, 10, 7]), (9, [4, 2, 2, 1]), (None, [8, 10, 10, 10])):
        run = asked(session, most)
        (request,) = support.requests_of(run)
        assert budgets(request) == expected
        assert written(request) == sum(expected) and request.spare_tokens >= 0
        assert all(branch.finish is Finish.LENGTH for branch in support.branches_of(run))
        support.check_lossless(run, book, made.reference, plain=False)
    (request,) = support.requests_of(asked(session, 300, max_new_tokens=6))
    assert budgets(request) == [8, 6, 6, 6], "the budget of a part holds too"


def test_a_budget_below_that_of_all_parts_reads_fewer_parts(made: Tiny) -> None:
    book = support.PlanBook(130, "outline", ())
    book.text = PLAN
    session = support.graphs.session("bim_eagle", made.models, book)
    (request,) = support.requests_of(asked(session, 4))
    assert budgets(request) == [2, 1, 1] and request.outline.status == "partial"
    (request,) = support.requests_of(asked(session, 1))
    assert request.root is None and written(request) == 1, "there is no room for an outline"
    book.text = "DIRECT"
    (request,) = support.requests_of(asked(session, 7))
    assert budgets(request) == [3, 4], "a plain answer has what the outline leaves"


@pytest.mark.parametrize("graph", ["bim_blend_merge", "bim_attend_merge"])
def test_the_answer_that_combines_parts_has_half_of_the_budget(graph: str, made: Tiny) -> None:
    for parts, expected in ((2, [7, 3, 10]), (1, [14])):
        session = combining(
            support.graphs,
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
