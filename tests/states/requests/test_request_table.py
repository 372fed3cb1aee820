"""Who there is: requests that come, end and are forgotten, and the numbers of their branches."""

import pytest
from helpers.managers import (
    STOP,
    accepted,
    chain,
    commit_,
    fan_out_,
    limits,
    manager,
    open_requests_,
    proposal,
    request,
    running,
    tree_rows_,
)

from specsot.states.request import Finish, Stage, move
from specsot.states.request_table import RequestTable


def test_requests_keep_the_order_of_their_submission() -> None:
    table, some = RequestTable(limits()), [request(key) for key in "cab"]
    for one in some:
        table.add(one)
    assert table.requests == table.unfinished == some
    assert len({one.prefix_owner for one in some}) == 3
    assert all(table.segments.home[one.prefix_owner] == one.prefix_owner for one in some)


def test_budgets_are_cut_to_what_the_model_can_write_at_all() -> None:
    table, one = RequestTable(limits(max_positions=9)), request(budget=10, outline_budget=11)
    table.add(one)
    assert (one.budget, one.outline_budget) == (9, 9)
    assert table.new_branch(one, 0, 50).budget == 9


def test_a_branch_goes_on_behind_its_requests_prefix() -> None:
    table, one = RequestTable(limits()), request()
    table.add(one)
    branch = table.new_branch(one, 3, 5)
    assert (branch.index, branch.budget, branch.stage) == (3, 5, Stage.WAITING)
    assert table.segments.path(branch.owner) == [branch.owner, one.prefix_owner]


def test_what_ended_is_handed_over_once_and_nothing_of_it_stays() -> None:
    table, some = RequestTable(limits()), [request(key) for key in "ab"]
    for one in some:
        table.add(one)
    assert table.forget_finished() == []
    move(some[0], "run")
    table.close(some[0])
    assert table.unfinished == some[1:] and table.requests == some, "its answer may be wanted"
    assert table.forget_finished() == some[:1]
    assert table.requests == some[1:] and table.forget_finished() == []


def test_the_number_of_a_branch_is_what_its_rows_are_shown_with() -> None:
    made, one = manager(), request(tail=[7], outline_budget=4)
    (root,) = running(made, one)
    root.end(Finish.STOP)
    branches = fan_out_(made, one, [], [[41], [42]])
    owners = [one.prefix_owner, root.owner, *(branch.owner for branch in branches)]
    assert [made.table.bim(owner) for owner in owners] == [-1, -1, 0, 1]
    assert made.table.bim(99) == -1


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_a_cancelled_request_ends_at_the_next_step_and_keeps_its_text(layout: str) -> None:
    made = manager(layout, "ngram")
    first, second = running(made, request("a"), request("b"))
    made.table.cancel("a")
    assert made.active == [first, second], "a step that has begun is finished"
    offer = proposal(chain(50), chain(51))
    batch = tree_rows_(made, offer)
    commit_(made, batch, outcome=accepted(batch, offer, [[1], [1]], [90, 91]))
    assert (first.finish, first.tokens) == (Finish.CANCELLED, [20, 50, 90])
    assert made.active == [second] and first.request.finished
    assert made.kv.current_length == second.length
    assert made.table.forget_finished() == [first.request]


def test_a_request_that_is_cancelled_before_it_starts_never_does() -> None:
    made = manager(most=1)
    running(made, request("a"))
    late = request("b")
    made.lifecycle.submit(late)
    made.table.cancel("b")
    made.table.cancel("unknown")
    made.lifecycle.release_and_prepare_()
    assert late.finished and [b.finish for b in late.branches] == [Finish.CANCELLED]
    assert made.unfinished == made.requests[:1]


def test_a_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    made = manager(capacity=16)
    long, longer = request("a", budget=15), request("b", prefix=[1] * 1000)
    made.lifecycle.submit(long)
    made.lifecycle.submit(longer)
    assert [b.note for one in (long, longer) for b in one.branches] == [
        "needs 18 slots, the pool has 16",
        "prompt of 1002 tokens, the model takes 1000",
    ]
    assert not made.unfinished and len(made.table.segments) == 0


def test_an_answer_that_ends_frees_all_segments() -> None:
    made, one = manager(), request(prefix=[5])
    made.lifecycle.submit(one)
    commit_(made, open_requests_(made), [STOP])
    assert one.finished and len(made.table.segments) == 0 and not made.kv.regions
