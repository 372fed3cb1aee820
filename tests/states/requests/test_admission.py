"""Who may start: first come first served, nobody left behind, and never a hang."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from helpers import support
from helpers.managers import request as request_of
from helpers.support import drive, outline_with

from specsot.engine.prepare.inputs import Prompt
from specsot.states.admission import CapacityModel, request_slots
from specsot.states.machine import Run
from specsot.states.request import Branch, Finish, Stage
from specsot.states.text.outline import Outline
from specsot.states.text.tokens import PromptTokens

BUDGET = 8


@pytest.fixture
def run_of(made: support.Tiny) -> Callable[..., Run]:
    """run_of(outlines, capacity, graph): one request per outline."""

    def make(
        outlines: Sequence[Outline],
        capacity: int,
        graph: str = "bim_eagle",
        nodes: int = 6,
        budgets: Sequence[int] = (BUDGET,) * 4,
        most: int = 6,
    ) -> Run:
        book = support.SizedBook(130, "outline", ())
        sets = (f"drafter.num_draft_tokens={nodes}",) if "eagle" in graph else ()
        session = support.graphs.session(
            graph,
            made.models,
            book,
            outline=outlines[0],
            budget=BUDGET,
            sets=(*sets, f"layout.kv_slots={capacity}", f"layout.max_num_branches={most}"),
        )
        run = support.start(session, [])
        for index, given in enumerate(outlines):
            prompt = Prompt(str(index), "hello", max_new_tokens=budgets[index])
            request = session.request(prompt)
            run.manager.lifecycle.submit(replace(request, given_outline=given))
        return run

    return make


def own_rows(run: Run) -> int:
    request = support.requests_of(run)[0]
    return len(request.prefix) + len(request.tail) + len(request.given_ids) + 3


def test_a_branch_that_finds_no_room_beside_others_waits_for_them(
    run_of: Callable[..., Run], made: support.Tiny
) -> None:
    probe = run_of([outline_with([5])], 2000)
    shared, tree = own_rows(probe), 7
    long = 250
    capacity = shared + long + BUDGET + tree + 10
    run = run_of([outline_with([long]), outline_with([5, 6])], capacity)
    both = sum(request_slots(r) for r in support.requests_of(run)) + 2 * tree
    assert both <= capacity, "both requests were meant to be open at once"
    drive(run)
    assert [b.finish for b in support.branches_of(run)] == [Finish.LENGTH] * 3, [
        (b.name, b.note) for b in support.branches_of(run)
    ]
    support.check_lossless(run, run.board["prompts"], made.reference, plain=False)


def test_requests_that_shut_each_other_out_come_to_an_end(
    run_of: Callable[..., Run], made: support.Tiny
) -> None:
    shared, tree = own_rows(run_of([outline_with([5])], 2000)), 7
    long = 250
    capacity = shared + long + BUDGET + tree + 10
    alike = [outline_with([long]), outline_with([long])]
    run = drive(run_of(alike, capacity))
    first, second = support.branches_of(run)
    assert (first.finish, first.tokens) == (Finish.REFUSED, [])
    assert first.note == "no room with the other requests"
    assert second.finish is Finish.LENGTH
    assert run.manager.kv.needed_length == 0
    request, book = second.request, run.board["prompts"]
    hoist, own = book.branch(second.point, request.outline, ())
    context = [*request.prefix, *request.tail, *request.given_ids, *hoist, *own]
    made.reference.check(second, context, ())


@pytest.mark.parametrize("nodes", [6, 30])
def test_admitted_branches_always_run_to_their_end(nodes: int, run_of: Callable[..., Run]) -> None:
    given, full = outline_with([9, 30, 2, 60, 7, 7], {4: (1, 2)}), 0
    need = request_slots(support.requests_of(run_of([given], 2000, nodes=nodes))[0]) + nodes + 1
    for capacity in range(max(need, 6 * (nodes + 1)), need + 180, 36):
        run = drive(run_of([given] * 2, capacity, nodes=nodes))
        for branch in support.branches_of(run):
            assert branch.finish in (Finish.LENGTH, Finish.REFUSED)
            assert len(branch.tokens) == (BUDGET if branch.finish is Finish.LENGTH else 0)
        full = max(full, run.manager.kv.peak_length / capacity)
    assert 0.85 < full <= 1, "the pools were meant to be used up"


@pytest.mark.parametrize(
    ("model", "slots"),
    [
        (CapacityModel(100, 8, 0), [1, 2, 3, 4, 5]),
        # With a map of tree sizes, fewer branches can need more slots than many.
        (CapacityModel(100, 8, {1: 20, 2: 4, 4: 3}), [21, 21, 21, 21, 21, 24]),
        # In a row of its own a branch meets one tree, as large as any.
        (CapacityModel(100, 6, {1: 4, 2: 20, 4: 3}, rows=6), [21] * 6),
        (CapacityModel(100, 1, {1: 4, 2: 20}, rows=1), [5]),
        # Branches that share their nodes are counted together.
        (CapacityModel(100, 8, 10, shared=24), [11, 22, 27, 28, 29]),
        (CapacityModel(100, 8, {1: 20, 2: 4}, shared=12), [13, 13]),
        (CapacityModel(100, 5, 10, rows=5, shared=24), [11] * 5),
        (CapacityModel(100, 5, 10, rows=5, shared=6), [7] * 5),
    ],
)
def test_a_rounds_trees_are_counted_for_the_worst_number_of_branches(
    model: CapacityModel, slots: list[int]
) -> None:
    assert [model.tree_slots(active) for active in range(1, len(slots) + 1)] == slots
    assert model.slots_alone(10, 5, 7) == 10 + 5 + 7 + slots[0]


@pytest.mark.parametrize(
    ("most", "graph"), support.taking_turns((1, 2, 3, 5), ("batching_plain", "batching_eagle"))
)
def test_rows_are_handed_out_as_slots_are(
    most: int, graph: str, run_of: Callable[..., Run], made: support.Tiny
) -> None:
    given = outline_with([9, 30, 2, 60, 7, 7], {4: (1, 2), 6: (5,)})
    run, order, peak = run_of([given] * 3, 400, graph, most=most), list[str](), 0
    while not run.finished:
        run.advance()
        support.check_rows(run)
        peak = max(peak, len(run.branches))
        opened = [r.key for r in support.requests_of(run) if r.stage is not Stage.WAITING]
        order += [key for key in opened if key not in order]
    assert order == ["0", "1", "2"] and peak == most
    assert run.manager.kv.rows == most
    assert {b.finish for b in support.branches_of(run)} == {Finish.LENGTH}
    support.check_lossless(run, run.board["prompts"], made.reference, plain=False)


def test_a_branch_too_long_for_a_row_is_refused_and_all_others_run(
    run_of: Callable[..., Run],
) -> None:
    shared = own_rows(run_of([outline_with([5])], 2000, "batching_eagle"))
    capacity = shared + 100 + BUDGET + 7
    run = drive(run_of([outline_with([100, 101, 100])] * 2, capacity, "batching_eagle", most=2))
    for request in support.requests_of(run):
        first, second, third = request.branches
        assert (first.finish, third.finish) == (Finish.LENGTH, Finish.LENGTH)
        assert second.finish is Finish.REFUSED and second.tokens == []
        assert second.note == f"needs {capacity + 1} slots, the pool has {capacity}"


def test_rows_that_idle_prefixes_hold_are_used_by_their_own_branches(
    run_of: Callable[..., Run],
) -> None:
    rounds = {}
    for graph in ("bim_plain", "batching_plain"):
        run = run_of([outline_with((3, 3, 3))] * 8, 400, graph, budgets=(BUDGET,) * 8)
        busy: list[int] = []
        drive(run, until=lambda run, busy=busy: bool(busy.append(len(run.branches))))
        assert all(len(b.tokens) == BUDGET for b in support.branches_of(run) if not b.is_root)
        rounds[graph] = sum(count > 0 for count in busy)
    assert rounds["batching_plain"] <= 1.3 * rounds["bim_plain"]


def test_the_slots_of_a_request_that_resumes_are_counted_by_hand() -> None:
    one = request_of("a", prefix=[5] * 40, tail=[6], budget=10)
    assert request_slots(one) == 40 + 1 + 10
    one.prefix_parts.append(PromptTokens((7,) * 30))
    one.common_prompt = PromptTokens((8,) * 3)
    one.first_branch = Branch(one, 0, owner=1, budget=10, prompt=PromptTokens((9, 9)))
    one.first_branch.tokens = [4, 4, 4]
    assert request_slots(one) == 40 + 30 + 3 + 2 + 10, "its answer so far is part of the budget"
