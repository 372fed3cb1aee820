"""Who there is: requests that come, end and are forgotten, and the numbers of their branches."""

import ast
from pathlib import Path
from typing import Any

import pytest
from helpers import managers

from specsot.states.request import (
    ENDED_STAGES,
    ENDING_OF,
    LIFECYCLES,
    LIVE_STAGES,
    Finish,
    Stage,
    StageError,
    move,
)
from specsot.states.request_table import RequestTable


def test_requests_keep_the_order_of_their_submission_and_branches_follow_their_prefix() -> None:
    table, some = (
        RequestTable(managers.limits(max_positions=9)),
        [managers.request(key) for key in "ca"],
    )
    some.append(managers.request("b", budget=10, outline_budget=11))
    for one in some:
        table.add(one)
    assert table.requests == table.unfinished == some
    assert len({one.prefix_owner for one in some}) == 3
    assert all(table.segments.home[one.prefix_owner] == one.prefix_owner for one in some)
    assert (one.budget, one.outline_budget) == (9, 9), "what the model can write at all"
    assert table.new_branch(one, 0, 50).budget == 9
    branch = table.new_branch(one, 3, 5)
    assert (branch.index, branch.budget, branch.stage) == (3, 5, Stage.WAITING)
    assert table.segments.path(branch.owner) == [branch.owner, one.prefix_owner]


def test_what_ended_is_handed_over_once_and_nothing_of_it_stays() -> None:
    table, some = RequestTable(managers.limits()), [managers.request(key) for key in "ab"]
    for one in some:
        table.add(one)
    assert table.forget_finished() == []
    move(some[0], "run")
    table.close(some[0])
    assert table.unfinished == some[1:] and table.requests == some, "its answer may be wanted"
    assert table.forget_finished() == some[:1]
    assert table.requests == some[1:] and table.forget_finished() == []


@pytest.mark.parametrize("layout", ["bim", "batching", "paged"])
def test_a_cancelled_request_ends_at_the_next_step_and_keeps_its_text(layout: str) -> None:
    made = managers.manager(layout, "ngram")
    first, second = managers.running(made, managers.request("a"), managers.request("b"))
    made.table.cancel("a")
    assert made.active == [first, second], "a step that has begun is finished"
    offer = managers.proposal(managers.chain(50), managers.chain(51))
    batch = managers.tree_rows_(made, offer)
    managers.commit_(made, batch, outcome=managers.accepted(batch, offer, [[1], [1]], [90, 91]))
    assert (first.finish, first.tokens) == (Finish.CANCELLED, [20, 50, 90])
    assert made.active == [second] and first.request.finished
    assert made.kv.current_length == second.length
    assert made.table.forget_finished() == [first.request]


def test_a_request_that_is_cancelled_before_it_starts_never_does() -> None:
    made = managers.manager(most=1)
    managers.running(made, managers.request("a"))
    late = managers.request("b")
    made.lifecycle.submit(late)
    made.table.cancel("b")
    made.table.cancel("unknown")
    made.lifecycle.release_and_prepare_()
    assert late.finished and [b.finish for b in late.branches] == [Finish.CANCELLED]
    assert made.table.unfinished == made.requests[:1]


def test_a_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    made = managers.manager(capacity=16)
    long, longer = managers.request("a", budget=15), managers.request("b", prefix=[1] * 1000)
    made.lifecycle.submit(long)
    made.lifecycle.submit(longer)
    assert [b.note for one in (long, longer) for b in one.branches] == [
        "needs 18 slots, the pool has 16",
        "prompt of 1002 tokens, the model takes 1000",
    ]
    assert not made.table.unfinished and not made.table.segments.parent


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kind", LIFECYCLES)
def test_every_stage_is_reached_and_every_life_ends(kind: str) -> None:
    ways = LIFECYCLES[kind]
    reached = {Stage.WAITING}
    for _ in Stage:
        reached |= {target for sources, target in ways.values() if reached & {*sources}}
    assert reached == {one for sources, target in ways.values() for one in (*sources, target)}
    assert ways.keys() >= set(ENDING_OF.values())
    for stage in reached & {*LIVE_STAGES}:
        assert any(stage in some and target in ENDED_STAGES for some, target in ways.values())
    for name, (sources, _) in ways.items():
        left = {*sources} & {*ENDED_STAGES}
        assert not left or (name, left) == ("fail", {Stage.DONE})


def test_a_way_that_is_none_is_a_fault_of_ours() -> None:
    made, one = managers.manager(), managers.request()
    made.lifecycle.submit(one)
    with pytest.raises(StageError, match="merge"):
        branch = made.table.new_branch(one, 0, 3)
        branch.end(Finish.STOP)
        move(one, "run")
        move(one, "finish")
        move(one, "merge")
    with pytest.raises(StageError):
        branch.end(Finish.STOP)


@pytest.mark.parametrize(
    ("finish", "stage"),
    [
        (Finish.STOP, Stage.DONE),
        (Finish.LENGTH, Stage.DONE),
        (Finish.REFUSED, Stage.REFUSED),
        (Finish.CANCELLED, Stage.CANCELLED),
        (Finish.TIMEOUT, Stage.CANCELLED),
        (Finish.FAILED, Stage.FAILED),
    ],
)
def test_how_a_branch_and_its_request_end(finish: Finish, stage: Stage) -> None:
    made, one = managers.manager(), managers.request()
    made.lifecycle.submit(one)
    branch = made.table.new_branch(one, 0, 3)
    branch.end(finish)
    assert branch.ended and branch.stage is stage
    one.finish = finish
    if stage is Stage.DONE:
        move(one, "run")
    made.table.close(one)
    assert one.finished and one.stage is stage


def test_nothing_else_sets_a_stage() -> None:
    places = []
    for path in [*ROOT.glob("states/**/*.py"), *ROOT.glob("engine/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[Any] = node.targets if isinstance(node, ast.Assign) else []
            names = [n for target in targets for n in ast.walk(target)]
            stages = [n for n in names if isinstance(n, ast.Attribute) and n.attr == "stage"]
            places += [f"{path.relative_to(ROOT)}: {ast.unparse(n)}" for n in stages]
    assert places == ["states/request.py: item.stage"], "`move` alone sets one"
